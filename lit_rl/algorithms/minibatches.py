"""Which rows form an optimizer step, and which rows share a forward pass."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lit_rl.functional import distinct_rows
from lit_rl.types import Sequences


def minibatch_rows(
    prompt_ranks: Sequence[int],
    group_size: int,
    num_minibatches: int,
    *,
    seed: tuple[int, ...],
    rank: int = 0,
) -> list[Int[Tensor, " selected"]]:
    """Shuffle the rollouts of all ranks and deal them into minibatches of equal size.

    Every rank draws the same permutation of the rollouts of all ranks and keeps the rows that lie
    on it, so the minibatches as a whole do not depend on the number of ranks.

    Args:
        prompt_ranks: for each prompt of the iteration the rank on which its group lies. The groups
            of one rank stand in its batch in this order.
        group_size: rollouts per prompt.
        num_minibatches: optimizer steps that one pass over the rollouts takes.
        seed: numbers that seed the permutation, such as (run seed, iteration, epoch).
        rank: this process, from 0.

    Returns:
        For each minibatch the rows that lie on this rank; together each row once.

    Raises:
        ValueError: if the rollouts of all ranks do not divide into equal minibatches.

    Example:
        >>> [rows.tolist() for rows in minibatch_rows([0, 0], 2, 2, seed=(0,))]
        [[2, 0], [1, 3]]
    """
    check_minibatches(len(prompt_ranks), group_size, num_minibatches)
    local = torch.tensor(prompt_ranks) == rank
    place = local.cumsum(0) - 1
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(local) * group_size))
    minibatches = []
    for chunk in order.chunk(num_minibatches):
        prompt, sample = chunk // group_size, chunk % group_size
        here = local[prompt]
        minibatches.append(place[prompt[here]] * group_size + sample[here])
    return minibatches


def check_minibatches(num_prompts: int, group_size: int, num_minibatches: int) -> None:
    """Raise a ValueError unless the rollouts of a batch divide into equal minibatches."""
    total = num_prompts * group_size
    if total % num_minibatches:
        valid = [n for n in range(1, total + 1) if total % n == 0]
        nearest = min(valid, key=lambda n: abs(n - num_minibatches))
        raise ValueError(
            f"{num_prompts} prompts x group_size {group_size} = {total} rollouts do not divide "
            f"into num_minibatches {num_minibatches}; num_minibatches {nearest} would do"
        )


def micro_batch_rows(
    sequences: Sequences, micro_batch_tokens: int, *, packs: bool
) -> list[Int[Tensor, " selected"]]:
    """Group rows so that a pass over a group keeps to a budget of tokens, longest rows first.

    Rows are taken greedily, those of one prompt after each other. A packed pass costs the tokens of
    its responses and, once each, of its prompts; a padded one of `n` rows `n` times the widest
    prompt plus the widest response among them. A row longer than the budget goes alone.

    Args:
        sequences: prompts with their responses.
        micro_batch_tokens: tokens of one forward and backward pass, prompt and padding included.
        packs: whether the passes are packed.

    Returns:
        Groups of rows; together each row once.
    """
    widths: list[list[int]] = sequences.widths.tolist()
    if packs:
        masked_ids = torch.where(sequences.prompt_mask, sequences.prompt_ids, -1)
        _, prompts = distinct_rows(masked_ids)
        groups = _packed_groups(prompts.tolist(), widths, micro_batch_tokens)
    else:
        groups = _padded_groups(widths, micro_batch_tokens)
    return [torch.tensor(group, device=sequences.mask.device) for group in groups]


def _packed_groups(prompts: list[int], widths: list[list[int]], budget: int) -> list[list[int]]:
    longest: dict[int, int] = {}
    for prompt, columns in zip(prompts, widths, strict=True):
        longest[prompt] = max(longest.get(prompt, 0), sum(columns))
    order = sorted(
        range(len(widths)), key=lambda r: (-longest[prompts[r]], prompts[r], -widths[r][1])
    )
    groups: list[list[int]] = []
    cost = 0
    for row in order:
        prompt_width, width = widths[row]
        shares = bool(groups) and prompts[groups[-1][-1]] == prompts[row]
        if groups and cost + width + (not shares) * prompt_width <= budget:
            groups[-1].append(row)
            cost += width + (not shares) * prompt_width
        else:
            groups.append([row])
            cost = prompt_width + width
    return groups


def _padded_groups(widths: list[list[int]], budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    prompt_width = width = 0
    for row in sorted(range(len(widths)), key=lambda row: -sum(widths[row])):
        wider_prompt, wider = max(prompt_width, widths[row][0]), max(width, widths[row][1])
        if groups and (len(groups[-1]) + 1) * (wider_prompt + wider) <= budget:
            groups[-1].append(row)
            prompt_width, width = wider_prompt, wider
        else:
            groups.append([row])
            prompt_width, width = widths[row]
    return groups
