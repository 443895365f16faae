import math
import re

import pytest
import torch

from lit_rl.aggregations import SequenceMean, Totals
from lit_rl.policy_losses import SequenceClipped, binding_sequence_clips, sequence_clipped

NAN, LOG_4 = math.nan, math.log(4)
WIDE = {"clip_low": 0.9, "clip_high": 9.0}
NARROW = {"clip_low": 0.2, "clip_high": 0.2}


def test_every_token_has_the_geometric_mean_of_the_ratios(evaluate):
    # sqrt(4 * 1) = 2, in value and in gradient.
    loss, gradient = evaluate(sequence_clipped, [LOG_4, 0.0], [3.0, 3.0], **WIDE)
    assert loss == pytest.approx([-6.0, -6.0])
    assert gradient == pytest.approx([-6.0, -6.0])


def test_a_token_keeps_its_own_advantage(evaluate):
    loss, gradient = evaluate(sequence_clipped, [LOG_4, 0.0], [3.0, -1.0], **WIDE)
    assert loss == pytest.approx([-6.0, 2.0])
    assert gradient == pytest.approx([-6.0, 2.0])


def test_the_mean_over_the_tokens_is_the_loss_of_the_sequence_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    log_probs = (0.3 * torch.randn(3, 4, generator=generator)).double().requires_grad_()
    old, mask = torch.zeros(3, 4).double(), torch.arange(4) < torch.tensor([[4], [2], [1]])
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).double()

    per_token = sequence_clipped(log_probs, old, advantages.expand(3, 4), mask, **NARROW)
    ours = SequenceMean()(per_token, mask, Totals.of(mask))

    # The paper's objective, without the stopped gradient.
    ratio = (torch.where(mask, log_probs, 0.0).sum(1) / mask.sum(1)).exp()[:, None]
    paper = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    torch.testing.assert_close(ours, paper)
    torch.testing.assert_close(
        torch.autograd.grad(ours, log_probs), torch.autograd.grad(paper, log_probs)
    )


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "binding"),
    [
        (math.log(1.5), 1.0, -1.2, "high"),
        (math.log(1.5), -1.0, 1.5, None),
        (math.log(0.5), -1.0, 0.8, "low"),
        (math.log(0.5), 1.0, -0.5, None),
        (math.log(1.5), 0.0, 0.0, None),
    ],
)
def test_a_clip_binds_at_the_whole_sequence(evaluate, log_ratio, advantage, loss, binding):
    # The tokens' log-ratios differ, their mean is log_ratio.
    log_probs, advantages = [log_ratio + 1, log_ratio - 1], [advantage, advantage]
    losses, gradient = evaluate(sequence_clipped, log_probs, advantages, **NARROW)
    assert losses == pytest.approx([loss, loss])
    stopped = binding is not None or advantage == 0
    assert gradient == pytest.approx([0.0, 0.0] if stopped else [loss, loss])

    tensors = (torch.tensor([values]) for values in (log_probs, [0.0, 0.0], advantages))
    clips = binding_sequence_clips(*tensors, torch.ones(1, 2, dtype=torch.bool), **NARROW)
    assert {name for name, flag in clips.items() if flag.all()} == ({binding} - {None})
    assert {name for name, flag in clips.items() if flag.any()} == ({binding} - {None})


def test_ratios_that_cancel_are_not_clipped(evaluate):
    loss, gradient = evaluate(sequence_clipped, [LOG_4, -LOG_4], [1.0, 1.0], **NARROW)
    assert loss == gradient == pytest.approx([-1.0, -1.0])


def test_padding_takes_no_part_in_the_ratio(evaluate):
    mask = [True, True, False, False]
    padded = evaluate(
        sequence_clipped, [LOG_4, 0.0, 9.0, NAN], [1.0, 1.0, 10.0, NAN], mask=mask, **WIDE
    )
    assert padded[0] == pytest.approx([-2.0, -2.0, 0.0, 0.0])
    assert padded[1] == pytest.approx([-2.0, -2.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("mean_log_ratio", "is_clipped"), [(3.9e-4, False), (4.1e-4, True), (-1.0, False)]
)
def test_the_default_range_is_narrow(experience, mean_log_ratio, is_clipped):
    # 1 + 4e-4 is exp(3.9992e-4).
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.full((1, 3), -8.0, dtype=torch.float64)
    batch = experience(old, torch.ones(1, 3).double(), mask)
    high = SequenceClipped().clipped(old + mean_log_ratio, batch)["high"]
    assert high.tolist() == [[is_clipped] * 3]


def test_extreme_ratios_are_finite_with_a_finite_gradient(evaluate):
    for advantage, loss in ((1.0, -1.2), (0.0, 0.0), (-1.0, math.exp(20))):
        result = evaluate(sequence_clipped, [100.0, 100.0], [advantage, advantage], **NARROW)
        assert result[0] == pytest.approx([loss, loss])
        assert result[1] == [0.0, 0.0]


def test_nan_at_a_token_that_counts_is_seen_in_its_whole_sequence(evaluate):
    loss, _ = evaluate(sequence_clipped, [NAN, 0.0], [1.0, 1.0], **NARROW)
    assert all(math.isnan(value) for value in loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 0.0}, "clip_low must be in (0, 1], for example 0.0004, not 0.0"),
        ({"clip_high": -1.0}, "clip_high must be above 0, for example 0.0004, not -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceClipped(**settings)
