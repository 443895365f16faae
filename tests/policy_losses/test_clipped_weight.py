import math
import re

import pytest
import torch

from lit_rl.policy_losses import ClippedWeight, clipped_weight

NAN = math.nan
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("ratio", "weight", "side"),
    [
        (1.5, 1.28, "high"),
        (5.0, 1.28, "high"),
        (1.2, 1.2, None),
        (0.9, 0.9, None),
        (0.1, 0.8, "low"),
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_every_token_keeps_a_gradient_of_a_bounded_size(
    evaluate, experience, ratio, weight, side, advantage
):
    old = -1 - math.log(ratio)
    loss, gradient = evaluate(clipped_weight, [-1.0], [advantage], old_log_probs=[old], **CLIPS)
    # The loss is -weight * A * log_prob with log_prob -1; the weight has no gradient.
    assert loss == pytest.approx([weight * advantage])
    assert gradient == pytest.approx([-weight * advantage])

    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = experience(torch.tensor([[old]]), torch.tensor([[advantage]]), mask)
    clips = ClippedWeight(**CLIPS).clipped(torch.tensor([[-1.0]]), batch)
    assert {name for name, flag in clips.items() if flag.any()} == ({side} - {None})


def test_the_largest_weight_is_one_more_than_the_setting(evaluate):
    # A clip_high of 4 bounds at 5, not at 4.
    _, gradient = evaluate(clipped_weight, [math.log(6)], [1.0], clip_low=1.0, clip_high=4.0)
    assert gradient == pytest.approx([-5.0])


def test_the_default_has_no_lower_bound(experience):
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = experience(torch.zeros(1, 1), torch.ones(1, 1), mask)
    log_probs = torch.tensor([[math.log(1e-6)]], requires_grad=True)
    ClippedWeight()(log_probs, batch).sum().backward()
    assert log_probs.grad.item() == pytest.approx(-1e-6)
    assert not ClippedWeight().clipped(log_probs, batch)["low"].any()


def test_a_token_without_advantage_is_not_counted_as_clipped(experience):
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = experience(torch.zeros(1, 1), torch.zeros(1, 1), mask)
    assert not ClippedWeight().clipped(torch.tensor([[math.log(5)]]), batch)["high"].any()


def test_extreme_ratios_are_finite_with_a_finite_gradient(evaluate):
    result = evaluate(clipped_weight, [100.0] * 3, [1.0, 0.0, -1.0], **CLIPS)
    assert result[0] == pytest.approx([-128.0, 0.0, 128.0])
    assert result[1] == pytest.approx([-1.28, 0.0, 1.28])


@pytest.mark.parametrize(("log_prob", "advantage"), [(NAN, 1.0), (NAN, 0.0), (0.0, NAN)])
def test_nan_at_a_token_that_counts_is_not_hidden(evaluate, log_prob, advantage):
    assert math.isnan(evaluate(clipped_weight, [log_prob], [advantage], **CLIPS)[0][0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 10.0}, "clip_low must be in (0, 1], for example 0.2, not 10.0"),
        ({"clip_high": 0.0}, "clip_high must be above 0, for example 0.2, not 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ClippedWeight(**settings)
