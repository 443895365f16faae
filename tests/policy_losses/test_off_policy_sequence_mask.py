import math

import pytest
import torch

from lit_rl.aggregations import TokenMean, Totals
from lit_rl.policy_losses import (
    ClippedSurrogate,
    OffPolicySequenceMask,
    SequenceClipped,
    Surrogate,
    off_policy_negatives,
)

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
# Means of old minus new over the tokens that count: 1, 1 and 0.4.
LOG_PROBS = torch.tensor([[-2.0, 0.0, NAN], [-2.0, 0.0, NAN], [-1.2, 0.0, 0.0]])
ADVANTAGES = torch.tensor([[-1.0, -1.0, NAN], [1.0, 1.0, NAN], [-1.0, -1.0, -1.0]])


@pytest.fixture
def batch(experience):
    return experience(torch.zeros(3, 3), ADVANTAGES, MASK)


def loss_and_gradient(loss, batch):
    log_probs = LOG_PROBS.clone().requires_grad_()
    value = loss(log_probs, batch)
    value.sum().backward()
    return value.detach(), log_probs.grad


@pytest.mark.parametrize("inner", [Surrogate(), ClippedSurrogate(), SequenceClipped()])
def test_a_bad_sequence_that_the_policy_left_has_no_loss_and_no_gradient(batch, inner):
    masked = loss_and_gradient(OffPolicySequenceMask(inner, max_kl=0.5), batch)
    plain = loss_and_gradient(inner, batch)
    for ours, theirs in zip(masked, plain, strict=True):
        assert ours[0].eq(0).all()
        # A good sequence, and a bad one that is still likely, are trained as before.
        assert torch.equal(ours[1:], theirs[1:])
    assert plain[0][0, 0] != 0


@pytest.mark.parametrize(("max_kl", "left_out"), [(1.5, []), (0.5, [0]), (0.3, [0, 2])])
def test_the_limit_is_of_the_mean_over_the_tokens_that_count(max_kl, left_out):
    # Over the padded width the mean of the first row would be 2 / 3, and NaN.
    flags = off_policy_negatives(LOG_PROBS, torch.zeros(3, 3), ADVANTAGES, MASK, max_kl=max_kl)
    expected = torch.zeros(3, 3, dtype=torch.bool)
    expected[left_out] = MASK[left_out]
    assert torch.equal(flags, expected)


def test_a_sequence_that_became_more_likely_is_trained():
    flags = off_policy_negatives(-LOG_PROBS, torch.zeros(3, 3), ADVANTAGES, MASK, max_kl=0.3)
    assert not flags.any()


def test_only_the_tokens_with_a_negative_advantage_are_left_out():
    advantages = torch.tensor([[-1.0, 1.0]])
    flags = off_policy_negatives(
        torch.full((1, 2), -2.0), torch.zeros(1, 2), advantages, advantages.ne(0), max_kl=0.5
    )
    assert flags.tolist() == [[True, False]]


def test_a_token_that_is_left_out_counts_in_the_denominator(batch):
    loss, _ = loss_and_gradient(OffPolicySequenceMask(Surrogate(), max_kl=0.3), batch)
    # Only the second row is left, -(exp(-2) + 1), over all 7 tokens.
    mean = TokenMean()(loss, MASK, Totals.of(MASK))
    assert mean.item() == pytest.approx(-(math.exp(-2) + 1) / 7)


def test_what_is_left_out_is_counted_apart_from_the_clips(batch):
    # At negative advantages, exp(-2) in the first row and exp(-1.2) in the last are below 0.8.
    clips = OffPolicySequenceMask(ClippedSurrogate(), max_kl=0.5).clipped(LOG_PROBS, batch)
    assert set(clips) == {"low", "high", "off_policy"}
    assert clips["off_policy"].tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert clips["low"].tolist() == [[False] * 3, [False] * 3, [True, False, False]]


def test_nan_at_a_token_that_counts_is_not_hidden(experience):
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = experience(torch.zeros(1, 2), -torch.ones(1, 2), mask)
    loss = OffPolicySequenceMask(Surrogate(), max_kl=0.5)(torch.tensor([[NAN, -9.0]]), batch)
    assert loss[0, 0].isnan()


def test_a_limit_that_makes_no_sense_is_refused():
    with pytest.raises(
        ValueError, match=r"max_kl must be above 0, for example 0\.1 nats, not 0\.0"
    ):
        OffPolicySequenceMask(Surrogate(), max_kl=0.0)
