import math

import pytest
import torch

from lit_rl.aggregations import SequenceMean, Totals
from lit_rl.policy_losses import GeometricMeanClipped, geometric_mean_clipped

NAN = math.nan
CLIPS = {"clip_low": 0.4, "clip_high": 0.4}


def test_ratios_are_clipped_one_by_one_before_their_mean(evaluate):
    # 0.8 is clipped to 0.4: exp((0.4 - 0.2) / 2). The clip of the mean 0.3 would not bind.
    loss, gradient = evaluate(geometric_mean_clipped, [0.8, -0.2], [2.0, 2.0], **CLIPS)
    assert loss == pytest.approx([-2 * math.exp(0.1)] * 2)
    assert gradient == pytest.approx([0.0, -2 * math.exp(0.1)])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.8, 1.0, 0.4), (0.8, -1.0, 0.8), (-0.8, -1.0, -0.4), (-0.8, 1.0, -0.8), (0.39, 1.0, 0.39)],
)
def test_the_clip_is_pessimistic_and_in_nats(evaluate, experience, log_ratio, advantage, clipped):
    loss, gradient = evaluate(geometric_mean_clipped, [log_ratio], [advantage], **CLIPS)
    assert loss == pytest.approx([-advantage * math.exp(clipped)])
    binds = clipped != log_ratio
    assert gradient == pytest.approx([0.0] if binds else loss)

    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = experience(torch.zeros(1, 1), torch.tensor([[advantage]]), mask)
    names = GeometricMeanClipped().clipped(torch.tensor([[log_ratio]]), batch)
    side = "high" if log_ratio > 0 else "low"
    assert {name for name, flag in names.items() if flag.any()} == ({side} if binds else set())


def test_the_mean_over_the_tokens_is_the_papers_objective_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 4, generator=generator).double().requires_grad_()
    old, mask = torch.zeros(3, 4).double(), torch.arange(4) < torch.tensor([[4], [2], [1]])
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).double()

    per_token = geometric_mean_clipped(log_probs, old, advantages.expand(3, 4), mask, **CLIPS)
    ours = SequenceMean()(per_token, mask, Totals.of(mask))

    # (prod_t min(ratio^sign, clip(ratio)^sign)^sign)^(1 / length) * A, as it is printed there.
    sign, ratio = advantages.sign(), log_probs.exp()
    in_bounds = ratio.clamp(math.exp(-0.4), math.exp(0.4))
    factors = torch.minimum(ratio**sign, in_bounds**sign) ** sign
    products = torch.where(mask, factors, 1.0).prod(dim=1)
    paper = -(products ** (1 / mask.sum(1)) * advantages[:, 0]).mean()
    torch.testing.assert_close(ours, paper)
    torch.testing.assert_close(
        torch.autograd.grad(ours, log_probs), torch.autograd.grad(paper, log_probs)
    )


def test_a_token_without_advantage_counts_with_ratio_one(evaluate):
    # The mean is (0.2 + 0) / 2, and only the first token has a loss.
    loss, gradient = evaluate(geometric_mean_clipped, [0.2, 5.0], [1.0, 0.0], **CLIPS)
    assert loss == gradient == pytest.approx([-math.exp(0.1), 0.0])


def test_padding_takes_no_part_in_the_mean(evaluate):
    result = evaluate(
        geometric_mean_clipped,
        [0.2, 0.2, 9.0, NAN],
        [1.0, 1.0, 10.0, NAN],
        mask=[True, True, False, False],
        **CLIPS,
    )
    for values in result:
        assert values == pytest.approx([-math.exp(0.2), -math.exp(0.2), 0.0, 0.0])


def test_extreme_ratios_are_finite_with_a_finite_gradient(evaluate):
    for advantage, loss in ((1.0, -math.exp(0.4)), (0.0, 0.0), (-1.0, math.exp(20))):
        result = evaluate(geometric_mean_clipped, [100.0, 100.0], [advantage] * 2, **CLIPS)
        assert result[0] == pytest.approx([loss, loss])
        assert result[1] == [0.0, 0.0]


@pytest.mark.parametrize(("log_prob", "advantage"), [(NAN, 1.0), (0.0, NAN)])
def test_nan_at_a_token_that_counts_is_not_hidden(evaluate, log_prob, advantage):
    assert math.isnan(evaluate(geometric_mean_clipped, [log_prob], [advantage], **CLIPS)[0][0])


@pytest.mark.parametrize("name", ["clip_low", "clip_high"])
def test_settings_that_make_no_sense_are_refused(name):
    with pytest.raises(
        ValueError, match=rf"{name} must be above 0, for example 0\.4 nats, not 0\.0"
    ):
        GeometricMeanClipped(**{name: 0.0})
