import math

import pytest
import torch

from lit_rl.functional import bounded_exp, log_ratio, probability_ratio
from lit_rl.functional.ratios import MAX_LOG_RATIO

ALL = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, torch.inf, -torch.inf])
def test_the_log_ratio_is_bounded_and_has_no_gradient_beyond(log_ratio):
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    ratio = probability_ratio(log_probs, torch.zeros(1, 1), ALL)
    ratio.sum().backward()
    assert ratio.item() == pytest.approx(math.exp(math.copysign(MAX_LOG_RATIO, log_ratio)))
    assert log_probs.grad.item() == 0


def test_nan_at_a_position_that_counts_stays_visible():
    assert probability_ratio(torch.tensor([[torch.nan]]), torch.zeros(1, 1), ALL).isnan().all()


def test_bfloat16_is_subtracted_in_float32():
    log_probs = torch.tensor([[-8.0]], dtype=torch.bfloat16)
    old_log_probs = torch.tensor([[-8.01]])
    ratio = probability_ratio(log_probs, old_log_probs, ALL)
    # exp(0.01); in bfloat16 -8.01 would be -8 and the ratio 1.
    torch.testing.assert_close(ratio, torch.tensor([[1.01005]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("anything", [torch.nan, torch.inf, -torch.inf])
def test_a_masked_position_has_ratio_one_and_no_gradient(anything):
    log_probs = torch.tensor([[anything, 0.5]], requires_grad=True)
    ratio = probability_ratio(
        log_probs, torch.tensor([[anything, 0.0]]), torch.tensor([[False, True]])
    )
    ratio.sum().backward()
    torch.testing.assert_close(ratio, torch.tensor([[1.0, math.exp(0.5)]]))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, math.exp(0.5)]]))


def test_a_log_ratio_is_not_bounded_and_has_a_gradient_of_one():
    log_probs = torch.tensor([[100.0, torch.nan]], requires_grad=True)
    difference = log_ratio(log_probs, torch.zeros(1, 2), torch.tensor([[True, False]]))
    difference.sum().backward()
    assert difference.tolist() == [[100.0, 0.0]]
    assert log_probs.grad.tolist() == [[1.0, 0.0]]


def test_the_exponential_is_exact_within_its_bound():
    values = torch.tensor([-MAX_LOG_RATIO, -1.0, 0.0, MAX_LOG_RATIO])
    assert torch.equal(bounded_exp(values), values.exp())
