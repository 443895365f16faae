"""GRPO, Dr. GRPO and PPO learn the embedded task nearly whole."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_the_largest_digit(held_out_accuracies, seed):
    """A random model answers almost nothing right; the task can be learnt to nearly all."""
    accuracies = held_out_accuracies("algorithm/grpo.yaml", seed=seed)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.95


def test_dr_grpo_learns_the_largest_digit(held_out_accuracies):
    accuracies = held_out_accuracies("algorithm/dr_grpo.yaml", seed=0)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.95


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_the_largest_digit(held_out_accuracies, seed):
    accuracies = held_out_accuracies("algorithm/ppo.yaml", seed=seed)
    assert accuracies[0] < 0.05
    assert accuracies[-1] >= 0.9
