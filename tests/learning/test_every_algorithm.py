"""Every algorithm begins to learn the embedded task."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "configs" / "algorithm"
ALGORITHMS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# These reach nearly everything in tests of their own.
LEARN_ALL = ("grpo", "dr_grpo", "ppo")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in LEARN_ALL])
def test_every_algorithm_improves_within_30_iterations(held_out_accuracies, name):
    """Sampled accuracy at least doubles, and by more than its error: from 0.007 to above 0.03."""
    accuracies = held_out_accuracies(
        f"algorithm/{name}.yaml",
        seed=0,
        kind="sampled",
        options=("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "30"),
    )
    assert 0 < accuracies[0] < 0.02
    assert accuracies[-1] > max(2 * accuracies[0], 0.03)
