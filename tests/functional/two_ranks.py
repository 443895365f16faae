"""What each of two processes gets, stored in the folder that is named: run by `test_ranks.py`."""

import sys
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from lit_rl.advantages import BatchMean, MovingAverage, NormalizedParts, WhitenedReturn
from lit_rl.functional import (
    gather_over_ranks,
    masked_whiten,
    maximum_over_ranks,
    minimum_over_ranks,
    sum_over_ranks,
    top_fraction,
)
from lit_rl.types import ScoredRollout, at_last_token

VALUES = torch.tensor([[3.0, 1.0, 7.0], [4.0, 1.5, 9.0], [2.0, 6.0, 5.0], [8.0, 0.5, 2.5]])
MASK = torch.tensor(
    [[True, True, False], [True, False, False], [True, True, True], [False, True, False]]
)
REWARDS = torch.tensor([1.0, 0.0, 4.0, 3.0])
# The first process has the first prompt; in the other case, all of them.
ROWS = {"shared": (slice(0, 2), slice(2, 4)), "one-sided": (slice(0, 4), slice(0, 0))}


def scored_rollout(rows):
    mask, rewards = MASK[rows], REWARDS[rows]
    texts = ("",) * len(rewards)
    return ScoredRollout(
        prompt_ids=torch.ones(len(rewards), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(rewards), 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        sampler_log_probs=torch.zeros(mask.shape),
        finished=torch.ones(len(rewards), dtype=torch.bool),
        prompts=texts,
        responses=texts,
        answers=texts,
        columns={},
        group_size=2,
        rewards=rewards,
        token_rewards=at_last_token(rewards, mask),
        step_rewards=torch.full(mask.shape, torch.nan),
        reward_parts={"right": rewards, "short": VALUES[rows, 0]},
        missing=torch.zeros(len(rewards), dtype=torch.bool),
    )


def whitened(values, mask):
    return masked_whiten(values, mask, unbiased=True, epsilon=1e-8, epsilon_inside_sqrt=True)


def results(rows):
    """What a process that has these rows gets."""
    values, mask = VALUES[rows], MASK[rows]
    average = MovingAverage(decay=0.5)
    average.observe(values, mask)
    found = {
        "sum": sum_over_ranks(mask.sum()),
        "minimum": minimum_over_ranks(torch.where(mask, values, torch.inf).amin(dim=0)),
        "maximum": maximum_over_ranks(torch.where(mask, values, -torch.inf).amax(dim=0)),
        "gathered": gather_over_ranks(values),
        "gathered numbers": gather_over_ranks(mask.sum(dim=1)),
        "whitened": whitened(values, mask),
        "top": top_fraction(values, mask, 0.5),
        "batch mean": BatchMean()(values, mask),
        "average": torch.tensor(average.average),
    }
    if len(values):
        scored = scored_rollout(rows)
        found["whitened return"] = WhitenedReturn(gamma=0.9)(scored)
        found["normalized parts"] = NormalizedParts()(scored)
    return found


def work(rank, folder):
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    masked = torch.zeros(2, 3, dtype=torch.bool)
    found = {
        "shared": results(ROWS["shared"][rank]),
        # The second process has rows, of which no token counts.
        "one-sided": {
            "whitened": whitened(VALUES, MASK) if rank == 0 else whitened(VALUES[:2], masked),
            "top": top_fraction(*((VALUES, MASK) if rank == 0 else (VALUES[:2], masked)), 0.5),
            "gathered": gather_over_ranks(VALUES[ROWS["one-sided"][rank]]),
        },
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
    torch.save(results(slice(0, 4)), Path(sys.argv[1]) / "alone.pt")
