import math

import pytest
import torch

from lit_rl.policy_losses import SoftGate, soft_gate

NAN = math.nan
TAUS = {"tau_positive": 1.0, "tau_negative": 1.05}


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 3.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_value_and_slope_by_hand(evaluate, ratio, advantage, tau):
    loss, gradient = evaluate(soft_gate, [math.log(ratio)], [advantage], **TAUS)
    gate = sigmoid(tau * (ratio - 1))
    assert loss == pytest.approx([-advantage * 4 / tau * gate])
    # sigmoid' = gate * (1 - gate); tau cancels; the derivative of the ratio is the ratio.
    assert gradient == pytest.approx([-advantage * 4 * gate * (1 - gate) * ratio])


def test_at_ratio_one_the_value_is_two_over_tau(evaluate):
    loss, _ = evaluate(soft_gate, [0.0, 0.0, 0.0], [1.0, -1.0, 0.0], **TAUS)
    assert loss == pytest.approx([-2.0, 2 / 1.05, 0.0])


def test_the_gate_closes_on_both_sides_and_faster_for_negative_advantages(evaluate):
    log_ratios = [math.log(ratio) for ratio in (0.1, 1.0, 3.0)]
    positive = evaluate(soft_gate, log_ratios, [1.0] * 3, **TAUS)[1]
    negative = evaluate(soft_gate, log_ratios, [-1.0] * 3, **TAUS)[1]
    # Slope in the ratio: gradient over ratio.
    slopes = [-gradient / ratio for gradient, ratio in zip(positive, (0.1, 1.0, 3.0), strict=True)]
    assert slopes[1] == pytest.approx(1.0)
    assert max(slopes[0], slopes[2]) < 0.9
    assert negative[0] < -positive[0]
    assert negative[2] < -positive[2]


def test_no_token_is_clipped(experience):
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = experience(torch.zeros(1, 1), torch.ones(1, 1), mask)
    assert SoftGate().clipped(torch.tensor([[3.0]]), batch) == {}


def test_extreme_ratios_are_finite_with_a_finite_gradient(evaluate):
    loss, gradient = evaluate(soft_gate, [100.0] * 3, [1.0, 0.0, -1.0], **TAUS)
    # The gate is open: 4 / tau.
    assert loss == pytest.approx([-4.0, 0.0, 4 / 1.05])
    assert gradient == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("log_prob", "advantage"), [(NAN, 1.0), (NAN, 0.0), (0.0, NAN)])
def test_nan_at_a_token_that_counts_is_not_hidden(evaluate, log_prob, advantage):
    assert math.isnan(evaluate(soft_gate, [log_prob], [advantage], **TAUS)[0][0])


@pytest.mark.parametrize("name", ["tau_positive", "tau_negative"])
def test_settings_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must be above 0, for example 1\.0, not 0\.0"):
        SoftGate(**{name: 0.0})
