import math
import re

import pytest
import torch

from lit_rl.advantages import group_normalized
from lit_rl.aggregations import SequenceMean, TokenMean, Totals
from lit_rl.policy_losses import ClippedSurrogate, binding_clips, clipped_surrogate

NAN = torch.nan


def surrogate(log_ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """Loss of one token, and its gradient in the log-prob."""
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    loss = clipped_surrogate(
        log_probs,
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        torch.tensor([[True]]),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    loss.sum().backward()
    return loss.item(), log_probs.grad.item()


def clips(ratio, advantage, dual_clip=None):
    """Names of the clips that bind at one token."""
    flags = binding_clips(
        torch.tensor([[ratio]]).log(),
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        torch.tensor([[True]]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=dual_clip,
    )
    return {name for name, flag in flags.items() if flag.item()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_high", "loss", "gradient"),
    # Where the clip does not bind the gradient of -ratio * A in the log-prob is -ratio * A.
    [
        (1.5, 1.0, 0.2, -1.2, 0.0),
        (1.5, -1.0, 0.2, 1.5, 1.5),
        (0.5, -1.0, 0.2, 0.8, 0.0),
        (0.5, 1.0, 0.2, -0.5, -0.5),
        (1.5, 1.0, 0.28, -1.28, 0.0),
        (1.1, 2.0, 0.2, -2.2, -2.2),
    ],
)
def test_the_clip_is_pessimistic(ratio, advantage, clip_high, loss, gradient):
    result = surrogate(math.log(ratio), advantage, clip_high=clip_high)
    assert result == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "loss", "gradient"),
    [
        (-1.0, 3.0, 3.0, 0.0),
        (-1.0, None, 5.0, 5.0),
        (-1.0, 6.0, 5.0, 5.0),
        (1.0, 3.0, -1.2, 0.0),
        (0.0, 3.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_bounds_negative_advantages_only(advantage, dual_clip, loss, gradient):
    result = surrogate(math.log(5.0), advantage, dual_clip=dual_clip)
    assert result == pytest.approx((loss, gradient))


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, torch.inf])
def test_an_advantage_of_zero_gives_zero_whatever_the_ratio(log_ratio):
    assert surrogate(log_ratio, 0.0) == (0.0, 0.0)


def test_extreme_ratios_are_finite_with_a_finite_gradient():
    assert surrogate(100.0, 1.0) == pytest.approx((-1.2, 0.0))
    loss, gradient = surrogate(100.0, -1.0)
    assert loss == pytest.approx(math.exp(20.0))
    assert gradient == 0.0
    assert surrogate(100.0, -1.0, dual_clip=3.0) == (3.0, 0.0)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize(("log_ratio", "advantage"), [(NAN, 1.0), (NAN, 0.0), (0.0, NAN)])
def test_nan_at_a_token_that_counts_is_not_hidden(log_ratio, advantage, dual_clip):
    assert math.isnan(surrogate(log_ratio, advantage, dual_clip=dual_clip)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "binding"),
    [
        (1.5, 1.0, None, {"high"}),
        (1.5, -1.0, None, set()),
        (0.5, -1.0, None, {"low"}),
        (0.5, 1.0, None, set()),
        (1.1, 1.0, 3.0, set()),
        (1.5, 0.0, 3.0, set()),
        (5.0, -1.0, 3.0, {"dual"}),
        (5.0, 1.0, 3.0, {"high"}),
        (0.5, -1.0, 3.0, {"low"}),
        (2.0, -1.0, 3.0, set()),
    ],
)
def test_a_clip_is_counted_where_it_binds(ratio, advantage, dual_clip, binding):
    assert clips(ratio, advantage, dual_clip) == binding
    # It binds exactly where the gradient of a token with an advantage is zero.
    gradient = surrogate(math.log(ratio), advantage, dual_clip=dual_clip)[1]
    assert (gradient == 0) == (bool(binding) or advantage == 0)


def test_the_clip_fraction_counts_binding_tokens_among_those_that_count(experience):
    mask = torch.tensor([[True, True, False, False]])
    batch = experience(torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 1.0, NAN]]), mask)
    clipped = ClippedSurrogate().clipped(torch.full((1, 4), math.log(1.5)), batch)
    # Two tokens with ratio 1.5: the clip binds at the one with A > 0.
    assert clipped["high"].tolist() == [[True, False, False, False]]
    assert clipped["high"].sum() / mask.sum() == 0.5
    assert not clipped["low"].any()
    assert set(clipped) == {"low", "high"}
    assert set(ClippedSurrogate(dual_clip=3.0).clipped(batch.advantages, batch)) == {
        "low",
        "high",
        "dual",
    }


def test_the_settings_reach_the_loss(experience):
    mask = torch.ones(1, 3, dtype=torch.bool)
    batch = experience(torch.zeros(1, 3), torch.tensor([[1.0, -1.0, -1.0]]), mask)
    log_probs = torch.tensor([[1.5, 0.5, 5.0]]).log()
    loss = ClippedSurrogate(clip_low=0.4, clip_high=0.3, dual_clip=4.0)(log_probs, batch)
    # -1.3 * 1, 0.6 * 1, and 4 * 1.
    torch.testing.assert_close(loss, torch.tensor([[-1.3, 0.6, 4.0]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 0.9}, "dual_clip must be above 1, for example 3.0, not 0.9"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, for example 3.0, not 1.0"),
        ({"clip_low": 0.0}, "clip_low must be in (0, 1], for example 0.2, not 0.0"),
        ({"clip_low": 1.1}, "clip_low must be in (0, 1], for example 0.2, not 1.1"),
        ({"clip_low": NAN}, "clip_low must be in (0, 1], for example 0.2, not nan"),
        ({"clip_high": 0.0}, "clip_high must be above 0, for example 0.2, not 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ClippedSurrogate(**settings)


def test_the_mean_over_a_sequence_leaves_padding_out(experience):
    mask = torch.tensor([[True, True, False, False]])
    batch = experience(torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 10.0, 10.0]]), mask)
    loss = ClippedSurrogate()(torch.zeros(1, 4), batch)
    for aggregation in (SequenceMean(), TokenMean()):
        assert aggregation(loss, mask, Totals.of(mask)) == -1.0


@pytest.mark.parametrize(
    ("lengths", "token_mean"),
    # A = +-0.7071. Equal lengths cancel; with 1 and 3 tokens -(0.7071 - 3 * 0.7071) / 4 = 0.35355.
    [([2, 2], 0.0), ([1, 3], 0.35355)],
)
def test_a_loss_of_zero_at_equal_policies_still_has_a_gradient(lengths, token_mean, experience):
    valid = torch.tensor([True, True])
    rewards = group_normalized(torch.tensor([1.0, 0.0]), 2, valid=valid, epsilon=1e-6)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = experience(torch.zeros(mask.shape), rewards[:, None] * mask, mask)
    log_probs = torch.zeros(mask.shape, requires_grad=True)
    loss = ClippedSurrogate()(log_probs, batch)

    assert TokenMean()(loss, mask, Totals.of(mask)).item() == pytest.approx(token_mean, abs=1e-5)
    assert SequenceMean()(loss, mask, Totals.of(mask)).item() == pytest.approx(0.0, abs=1e-7)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -batch.advantages)
    assert log_probs.grad.norm() > 1
