import pytest
import torch

from lit_rl.aggregations import (
    FixedLength,
    SequenceMean,
    SequenceSum,
    TokenMean,
    TokenSum,
    Totals,
)

# Two responses with losses [4] and [1, 1, 1].
LOSS = torch.tensor([[4.0, torch.nan, torch.nan], [1.0, 1.0, 1.0]])
MASK = torch.tensor([[True, False, False], [True, True, True]])
EXPECTED = [
    (TokenMean(), 1.75),  # 7 / 4
    (SequenceMean(), 2.5),  # (4 + 1) / 2
    (SequenceSum(), 3.5),  # (4 + 3) / 2
    (FixedLength(length=8), 0.4375),  # 7 / (2 * 8)
    (TokenSum(), 7.0),
]
over_aggregations = pytest.mark.parametrize(
    ("aggregation", "expected"), EXPECTED, ids=[type(a).__name__ for a, _ in EXPECTED]
)


@over_aggregations
def test_reference_numbers(aggregation, expected):
    assert aggregation(LOSS, MASK, Totals.of(MASK)).item() == expected


@over_aggregations
def test_row_by_row_the_parts_add_up_to_the_whole(aggregation, expected):
    totals = Totals.of(MASK)
    parts = [aggregation(LOSS[row : row + 1], MASK[row : row + 1], totals) for row in (1, 0)]
    assert sum(part.item() for part in parts) == expected


@over_aggregations
def test_a_fully_masked_response_is_not_a_sequence(aggregation, expected):
    loss = torch.cat([LOSS, torch.full((1, 3), torch.nan)])
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    assert aggregation(loss, mask, Totals.of(mask)).item() == expected


@over_aggregations
def test_padding_does_not_change_the_result(aggregation, expected):
    loss, mask = (torch.nn.functional.pad(tensor, (0, 5)) for tensor in (LOSS, MASK))
    assert aggregation(loss, mask, Totals.of(mask)).item() == expected


@over_aggregations
def test_a_step_in_which_nothing_counts_has_loss_zero(aggregation, expected):
    mask = torch.zeros_like(MASK)
    assert aggregation(LOSS, mask, Totals.of(mask)).item() == 0


def test_the_mean_over_ranks_of_scaled_parts_is_the_mean_over_all_tokens():
    # Two ranks, one response each; data parallelism averages gradients, so each scales by two.
    totals = Totals.of(MASK)
    ranks = [2 * TokenMean()(LOSS[row : row + 1], MASK[row : row + 1], totals) for row in (0, 1)]
    assert [rank.item() for rank in ranks] == [2.0, 1.5]
    assert sum(ranks).item() / 2 == 1.75


def test_totals_count_tokens_and_sequences():
    totals = Totals.of(torch.tensor([[True, True], [False, True], [False, False]]))
    assert (totals.tokens.item(), totals.sequences.item()) == (3, 2)


@pytest.mark.parametrize("length", [0, -5])
def test_a_length_that_is_not_above_zero_is_refused(length):
    with pytest.raises(ValueError, match=rf"length must be above 0.*not {length}"):
        FixedLength(length=length)
