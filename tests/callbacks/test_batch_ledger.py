"""The counts of a run, worked out by hand."""

import pytest

from lit_rl.callbacks.batch_ledger import BatchLedger


def ledger(**counts):
    defaults = {
        "prompts": 32,
        "group_size": 16,
        "epochs": 2,
        "minibatches": 4,
        "ranks": 1,
        "longest_row": 100,
        "micro_batch_tokens": 1000,
        "iterations": 100,
    }
    return BatchLedger(**{**defaults, **counts})


def test_prompts_become_responses_become_optimizer_steps():
    lines = ledger().lines()
    assert lines["iteration"] == (
        "32 prompts x 16 = 512 responses -> 2 epochs x 4 minibatches of 128 = 8 optimizer steps"
    )
    assert lines["run"] == "100 iterations = 51,200 responses trained on, 800 optimizer steps"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, 13),  # 128 rows, 10 to a pass
        ({"ranks": 2}, 7),  # 64 rows
        ({"longest_row": 2000}, 128),  # a row that is longer than the budget has a pass of its own
        ({"micro_batch_tokens": 12_800}, 1),
    ],
)
def test_micro_batches_at_most(counts, expected):
    assert ledger(**counts).most_micro_batches == expected


def test_ranks_share_the_prompts():
    assert ledger(ranks=4).lines()["rank"] == (
        "4 x 8 prompts, 128 responses; an optimizer step in at most 4 micro-batches of 1,000 tokens"
    )


def test_a_run_without_end_has_no_total_and_dynamic_sampling_has_its_rounds():
    assert "run" not in ledger(iterations=None).lines()
    assert "= 512 responses, sampled in up to 3 rounds ->" in ledger(rounds=3).lines()["iteration"]
