"""The embedded task on two processes."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_grpo_learns_on_two_processes(held_out_accuracies, strategy):
    accuracies = held_out_accuracies(
        "algorithm/grpo.yaml",
        f"strategy/{strategy}.yaml",
        seed=0,
        options=("--trainer.accelerator", "cpu", "--trainer.devices", "2"),
    )
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.9


def test_ppo_improves_in_shards_of_deepspeed(held_out_accuracies):
    """As `test_every_algorithm` asks of one process, on two with DeepSpeed stage 3."""
    accuracies = held_out_accuracies(
        "algorithm/ppo.yaml",
        seed=0,
        kind="sampled",
        options=(
            *("--trainer.strategy", "lit_rl.strategies.DeepSpeedOnCPU"),
            *("--trainer.strategy.stage", "3", "--trainer.strategy.persistence_threshold", "0"),
            *("--trainer.accelerator", "cpu", "--trainer.devices", "2"),
            *("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "30"),
        ),
    )
    assert 0 < accuracies[0] < 0.02
    assert accuracies[-1] > max(2 * accuracies[0], 0.03)
