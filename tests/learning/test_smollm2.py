"""A pretrained model learns addition."""

import pytest

pytestmark = pytest.mark.slow


def test_grpo_teaches_smollm2_addition(held_out_accuracies):
    """The pretrained model begins near 0.45 and gains at least 0.2 on held-out pairs."""
    accuracies = held_out_accuracies(
        "algorithm/grpo.yaml",
        "model/smollm2.yaml",
        "task/addition_few_shot.yaml",
        "update/single.yaml",
        seed=0,
    )
    assert 0.3 < accuracies[0] < 0.6
    assert accuracies[-1] >= 0.75
