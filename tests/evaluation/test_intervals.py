"""The standard error of a mean over prompts."""

import math

import pytest
import torch

from lit_rl.evaluation import standard_error


def test_by_hand():
    # Mean 3, squared deviations 4 + 1 + 9 = 14, variance 14 / 2 = 7, divided by 3 prompts.
    assert standard_error(torch.tensor([1.0, 2.0, 6.0])).item() == pytest.approx(
        math.sqrt(7 / 3), rel=1e-15
    )


def test_accuracy_is_the_binomial_error_with_n_minus_one():
    # p = 0.8 of 100: sqrt(p (1 - p) / (n - 1)) = sqrt(0.16 / 99).
    correct = torch.tensor([1] * 80 + [0] * 20)
    assert standard_error(correct).item() == pytest.approx(math.sqrt(0.16 / 99), rel=1e-14)


def test_one_value_and_equal_values_give_zero():
    assert standard_error(torch.tensor([0.7])).item() == 0.0
    assert standard_error(torch.ones(5)).item() == 0.0


def test_no_value_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        standard_error(torch.tensor([]))
