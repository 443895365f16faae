import math

import pytest
import torch

from lit_rl.policy_losses import Surrogate, surrogate

NAN = math.nan


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (5.0, 1.0), (0.5, -1.0), (5.0, -1.0)])
def test_no_ratio_is_clipped(evaluate, experience, ratio, advantage):
    loss, gradient = evaluate(surrogate, [math.log(ratio)], [advantage])
    # The derivative of a ratio in the log-prob is the ratio.
    assert loss == pytest.approx([-ratio * advantage])
    assert gradient == pytest.approx([-ratio * advantage])
    batch = experience(
        torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool)
    )
    assert Surrogate().clipped(torch.tensor([[math.log(ratio)]]), batch) == {}


def test_extreme_ratios_are_finite_with_a_finite_gradient(evaluate):
    loss, gradient = evaluate(surrogate, [100.0, 100.0, 100.0], [1.0, 0.0, -1.0])
    assert loss == pytest.approx([-math.exp(20), 0.0, math.exp(20)])
    assert gradient == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("log_prob", "advantage"), [(NAN, 1.0), (NAN, 0.0), (0.0, NAN)])
def test_nan_at_a_token_that_counts_is_not_hidden(evaluate, log_prob, advantage):
    assert math.isnan(evaluate(surrogate, [log_prob], [advantage])[0][0])
