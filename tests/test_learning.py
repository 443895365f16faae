"""Real learning runs through the command line, from the files in configs/."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))
# These reach nearly everything in tests of their own.
LEARN_ALL = ("grpo", "dr_grpo", "ppo")


def held_out_accuracies(
    folder: Path, *configs: str, seed: int, kind: str = "greedy", options: tuple[str, ...] = ()
) -> list[float]:
    arguments = [a for config in configs for a in ("--config", str(ROOT / "configs" / config))]
    arguments += options
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "fit", *arguments, "--seed_everything", str(seed)],
        cwd=folder,
        check=True,
        timeout=1200,
    )
    (file,) = folder.glob("runs/*/metrics.csv")
    with file.open() as lines:
        column = [row[f"val/{kind}_accuracy"] for row in csv.DictReader(lines)]
    return [float(value) for value in column if value]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_the_largest_digit(tmp_path, seed):
    """A random model answers almost nothing right; the task can be learnt to nearly all."""
    accuracies = held_out_accuracies(tmp_path, "algorithm/grpo.yaml", seed=seed)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.95


@pytest.mark.slow
def test_dr_grpo_learns_the_largest_digit(tmp_path):
    accuracies = held_out_accuracies(tmp_path, "algorithm/dr_grpo.yaml", seed=0)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_the_largest_digit(tmp_path, seed):
    accuracies = held_out_accuracies(tmp_path, "algorithm/ppo.yaml", seed=seed)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_grpo_learns_on_two_processes(tmp_path, strategy):
    accuracies = held_out_accuracies(
        tmp_path,
        "algorithm/grpo.yaml",
        f"strategy/{strategy}.yaml",
        seed=0,
        options=("--trainer.accelerator", "cpu", "--trainer.devices", "2"),
    )
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.9


@pytest.mark.slow
def test_ppo_improves_in_shards_of_deepspeed(tmp_path):
    """As below, on two processes with DeepSpeed stage 3."""
    accuracies = held_out_accuracies(
        tmp_path,
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in LEARN_ALL])
def test_every_algorithm_improves_within_30_iterations(tmp_path, name):
    """Sampled accuracy at least doubles, and by more than its error: from 0.007 to above 0.03."""
    accuracies = held_out_accuracies(
        tmp_path,
        f"algorithm/{name}.yaml",
        seed=0,
        kind="sampled",
        options=("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "30"),
    )
    assert 0 < accuracies[0] < 0.02
    assert accuracies[-1] > max(2 * accuracies[0], 0.03)


@pytest.mark.slow
def test_grpo_teaches_smollm2_addition(tmp_path):
    """The pretrained model begins near 0.45 and gains at least 0.2 on held-out pairs."""
    accuracies = held_out_accuracies(
        tmp_path,
        "algorithm/grpo.yaml",
        "model/smollm2.yaml",
        "task/addition_few_shot.yaml",
        "update/single.yaml",
        seed=0,
    )
    assert 0.3 < accuracies[0] < 0.6
    assert accuracies[-1] >= 0.75
