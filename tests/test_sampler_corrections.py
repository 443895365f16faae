"""Weights between sampler and trainer by hand; the laws stand in test_laws.py."""

import math
import re

import pytest
import torch

from lit_rl.sampler_corrections import (
    ImportanceMask,
    TruncatedImportance,
    check_level,
    effective_sample_size,
    importance_mask,
    sampler_ratio,
    truncated_importance,
)
from lit_rl.types import Experience

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, True, True]])
# Ratios trainer / sampler per token; products of the rows 0.75 and 6.
RATIOS = torch.tensor([[0.25, 3.0, NAN], [1.0, 2.0, 3.0]])
SAMPLER = torch.full((2, 3), -1.5)
OLD = SAMPLER + RATIOS.log()


def experience():
    return Experience(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        response_ids=torch.zeros(2, 3, dtype=torch.long),
        mask=MASK,
        sampler_log_probs=SAMPLER,
        advantages=torch.ones(2, 3),
        old_log_probs=OLD,
        ref_log_probs=None,
    )


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedImportance("token"), [[0.25, 2.0, 1.0], [1.0, 2.0, 2.0]]),
        (TruncatedImportance("token", maximum=2.5), [[0.25, 2.5, 1.0], [1.0, 2.0, 2.5]]),
        (TruncatedImportance("sequence"), [[0.75, 0.75, 1.0], [2.0, 2.0, 2.0]]),
        (ImportanceMask("token", maximum=2.5), [[0.0, 0.0, 1.0], [1.0, 2.0, 0.0]]),
        (ImportanceMask("token", minimum=0.0, maximum=5.0), [[0.25, 3.0, 1.0], [1.0, 2.0, 3.0]]),
        (ImportanceMask("sequence"), [[0.75, 0.75, 1.0], [0.0, 0.0, 0.0]]),
        (ImportanceMask("sequence", minimum=0.8, maximum=7.0), [[0.0, 0.0, 1.0], [6.0, 6.0, 6.0]]),
    ],
)
def test_weights_by_hand(correction, weights):
    torch.testing.assert_close(correction.weights(experience()), torch.tensor(weights))


def test_a_ratio_on_the_edge_of_the_band_is_kept():
    old, sampler = torch.tensor([[math.log(2), -math.log(2)]]), torch.zeros(1, 2)
    low, high = old.exp().min().item(), old.exp().max().item()
    both = torch.ones(1, 2, dtype=torch.bool)
    weights = importance_mask(old, sampler, both, level="token", minimum=low, maximum=high)
    assert weights.tolist() == [[high, low]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sampler_from_another_world_has_finite_weights(level):
    both = torch.ones(1, 2, dtype=torch.bool)
    for log_ratio, bound in ((100.0, 20), (-100.0, -20)):
        ratio = sampler_ratio(torch.full((1, 2), log_ratio), torch.zeros(1, 2), both, level=level)
        assert ratio.tolist() == [pytest.approx([math.exp(bound)] * 2)]


def test_a_long_response_is_summed_before_it_is_bounded():
    # Bounding each token at 20 nats first would give 20 - 15 = 5.
    old = torch.tensor([[30.0, -15.0]])
    both = torch.ones(1, 2, dtype=torch.bool)
    ratio = sampler_ratio(old, torch.zeros(1, 2), both, level="sequence")
    assert ratio[0, 0].item() == pytest.approx(math.exp(15))


def test_bfloat16_is_subtracted_in_float32():
    old = torch.tensor([[-8.0]], dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bool)
    weights = truncated_importance(old, torch.tensor([[-8.01]]), one, level="token", maximum=2.0)
    # exp(0.01); in bfloat16 -8.01 would be -8 and the weight 1.
    assert weights.item() == pytest.approx(1.01005, rel=1e-5)


def size_of(weights):
    return effective_sample_size(sum(weights), sum(weight**2 for weight in weights))


@pytest.mark.parametrize(
    ("weights", "size"),
    # (1 + 2)^2 / (1 + 4) = 1.8; a common factor changes nothing.
    [([1.0] * 4, 4.0), ([0.5] * 4, 4.0), ([1.0, 0.0, 0.0], 1.0), ([1.0, 2.0], 1.8), ([0.0], 0.0)],
)
def test_effective_sample_size_by_hand(weights, size):
    assert size_of(weights) == pytest.approx(size)


def test_the_sums_of_parts_give_the_size_of_the_whole():
    parts = [[1.0, 2.0], [0.5], [3.0, 0.0]]
    whole = [weight for part in parts for weight in part]
    sums = [sum(part) for part in parts]
    squares = [sum(weight**2 for weight in part) for part in parts]
    assert effective_sample_size(sum(sums), sum(squares)) == pytest.approx(size_of(whole))
    # 6.5^2 / 14.25, while the sizes of the parts add up to 1.8 + 1 + 1.
    assert size_of(whole) == pytest.approx(42.25 / 14.25)
    assert sum(map(size_of, parts)) == pytest.approx(3.8)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: check_level("row"), "level must be token or sequence, not 'row'"),
        (
            lambda: TruncatedImportance("token", maximum=0.5),
            "maximum must be at least 1, for example 2.0, not 0.5",
        ),
        (
            lambda: ImportanceMask("token", minimum=1.5),
            "minimum must be in [0, 1] and maximum at least 1, for example 0.5 and 2.0, not "
            "1.5 and 2.0",
        ),
        (
            lambda: ImportanceMask("token", maximum=NAN),
            "minimum must be in [0, 1] and maximum at least 1, for example 0.5 and 2.0, not "
            "0.5 and nan",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(construct, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        construct()
