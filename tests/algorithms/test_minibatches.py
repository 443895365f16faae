"""Rows are dealt into minibatches and micro-batches: each once, whatever the number of ranks."""

import pytest
import torch

from lit_rl.algorithms.minibatches import micro_batch_rows, minibatch_rows
from lit_rl.types import Sequences


def sequences(prompt_lengths: list[int], lengths: list[int]) -> Sequences:
    prompt_width, width = max(prompt_lengths), max(1, *lengths)
    prompt_mask = torch.arange(prompt_width) >= prompt_width - torch.tensor(prompt_lengths)[:, None]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Sequences(
        prompt_ids=prompt_mask.long(), prompt_mask=prompt_mask, response_ids=mask.long(), mask=mask
    )


def test_every_row_is_in_one_minibatch():
    minibatches = minibatch_rows([0] * 6, 4, 3, seed=(0, 1))
    assert [len(rows) for rows in minibatches] == [8, 8, 8]
    assert sorted(torch.cat(minibatches).tolist()) == list(range(24))


def test_minibatches_as_a_whole_do_not_depend_on_the_number_of_ranks():
    """Law: global prompt i lies on rank i % 2 as local prompt i // 2; the union is the same."""
    alone = minibatch_rows([0] * 6, 4, 2, seed=(3,))
    for number, whole in enumerate(alone):
        union = set()
        for rank in range(2):
            rows = minibatch_rows([0, 1] * 3, 4, 2, seed=(3,), rank=rank)[number].tolist()
            union |= {(row // 4 * 2 + rank) * 4 + row % 4 for row in rows}
        assert union == set(whole.tolist())


def test_ranks_may_hold_different_numbers_of_prompts():
    """Law: a rank holds its groups in the order of the prompts; the union is the same."""
    alone = minibatch_rows([0] * 4, 2, 2, seed=(3,))
    for ranks in ([0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]):
        places = {rank: [n for n, r in enumerate(ranks) if r == rank] for rank in (0, 1)}
        for number, whole in enumerate(alone):
            union = []
            for rank in (0, 1):
                rows = minibatch_rows(ranks, 2, 2, seed=(3,), rank=rank)[number].tolist()
                union += [places[rank][row // 2] * 2 + row % 2 for row in rows]
            assert sorted(union) == sorted(whole.tolist())


def test_another_seed_deals_otherwise():
    first, second = (minibatch_rows([0] * 8, 4, 2, seed=(0, i))[0].tolist() for i in range(2))
    assert first != second


def test_batch_that_does_not_divide_is_refused_with_a_valid_choice():
    with pytest.raises(ValueError, match=r"3 prompts x group_size 2 = 6 .* 4; num_minibatches 3"):
        minibatch_rows([0] * 3, 2, 4, seed=(0,))


def test_micro_batches_keep_the_budget_and_hold_each_row_once():
    """By hand: totals 9, 8, 4, 3; budget 18 takes the two long rows (2 x (4 + 5)), then the rest.

    The first two cost 2 x (4 + 5) = 18, a third would make 27.
    """
    batch = sequences([2, 4, 1, 4], [2, 5, 2, 4])
    assert [rows.tolist() for rows in micro_batch_rows(batch, 18, packs=False)] == [[1, 3], [0, 2]]


def test_row_beyond_the_budget_goes_alone():
    batch = sequences([9, 1], [1, 1])
    for packs in (False, True):
        groups = micro_batch_rows(batch, 4, packs=packs)
        assert [rows.tolist() for rows in groups] == [[0], [1]]


def test_row_without_response_costs_its_prompt():
    batch = sequences([3, 3], [0, 0])
    assert [rows.tolist() for rows in micro_batch_rows(batch, 6, packs=False)] == [[0, 1]]


def test_packed_rows_of_one_prompt_count_it_once():
    """By hand: prompts of 3 (rows 0, 2) and 4 tokens (rows 1, 3), responses of 2, 1, 5 and 1.

    The prompt with the longest row comes first, its longest response first: 3 + 5 + 2 = 10 fill the
    budget of 12, as the other prompt would add 4 + 1; that one makes 4 + 1 + 1 = 6.
    """
    batch = sequences([3, 4, 3, 4], [2, 1, 5, 1])
    groups = micro_batch_rows(batch, 12, packs=True)
    assert [rows.tolist() for rows in groups] == [[2, 0], [1, 3]]
    assert len(micro_batch_rows(batch, 16, packs=True)) == 1
    assert len(micro_batch_rows(batch, 15, packs=True)) == 2


def test_trimmed_drops_only_columns_that_all_rows_pad():
    """By hand: of widths (2, 1) and (1, 3) in a 4 x 5 batch, prompts need 2 and responses 3."""
    batch = sequences([4, 2, 1], [5, 1, 3]).select(torch.tensor([1, 2])).trimmed()
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
