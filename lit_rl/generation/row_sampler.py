"""Drawing tokens row by row, each row with random numbers of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rl.generation.sampling import SamplingSettings


def row_uniforms(
    seed: tuple[int, ...], row_ids: Sequence[int], group_size: int, num_tokens: int
) -> Float[Tensor, "rollouts tokens"]:
    """Return the random numbers of each rollout, one per token, uniform in [0, 1).

    A row depends on the seed, the prompt's row id and its place in the group, on nothing else; no
    global random state is read or changed.

    Args:
        seed: non-negative numbers.
        row_ids: one per prompt, non-negative.
        group_size: rollouts per prompt.
        num_tokens: numbers per rollout.

    Example:
        >>> alone = row_uniforms((0, 1), [17], group_size=2, num_tokens=3)
        >>> in_a_batch = row_uniforms((0, 1), [4, 17], group_size=2, num_tokens=3)
        >>> torch.equal(alone, in_a_batch[2:])
        True
    """
    rows = [
        np.random.default_rng((*seed, row_id, place)).random(num_tokens, dtype=np.float32)
        for row_id in row_ids
        for place in range(group_size)
    ]
    return torch.from_numpy(np.stack(rows))


BLOCK = 256
"""Tokens whose probabilities are summed before the drawn one is looked for among them."""


def draw(
    weights: Float[Tensor, "rollouts vocab"], uniforms: Float[Tensor, " rollouts"]
) -> Int[Tensor, " rollouts"]:
    """P(token = v) = w_v / sum(w): min {v : sum_{w <= v} w > uniform * sum(w)}.

    Sampling by inversion of the cumulative distribution, first of blocks of tokens, then within
    one. A token of weight 0 is never drawn, whatever the rounding of the sums.

    Args:
        weights: not negative; 0 for a token that is filtered out, above 0 for another one at least.
        uniforms: one number in [0, 1) per row.

    Returns:
        One token id per row, distributed as the weights if the numbers are uniform.

    Example:
        >>> weights = torch.tensor([[2.0, 0.0, 1.0, 1.0]])
        >>> [int(draw(weights, torch.tensor([u]))) for u in (0.0, 0.49, 0.5, 0.99)]
        [0, 0, 2, 3]
    """
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(
        1, (-1, BLOCK)
    )
    sums = blocks.sum(dim=2)
    block, target = _inverted(sums, uniforms * sums.sum(dim=1))
    within, _ = _inverted(blocks[torch.arange(len(block), device=block.device), block], target)
    return block * BLOCK + within


def _inverted(
    weights: Float[Tensor, "rollouts choices"], target: Float[Tensor, " rollouts"]
) -> tuple[Int[Tensor, " rollouts"], Float[Tensor, " rollouts"]]:
    """Return the first choice whose cumulative weight is above the target, and what it is above."""
    # Parallel sums need not be monotone: a choice of weight 0 must not profit from that.
    cumulative = weights.cumsum(dim=1).masked_fill(weights == 0, 0.0)
    total = cumulative.amax(dim=1)
    # A product rounded up to the total would lie beyond every choice.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    choice = (cumulative > target[:, None]).int().argmax(dim=1)
    before = (cumulative - weights).gather(1, choice[:, None])[:, 0]
    return choice, (target - before).clamp(min=0)


class Draw(NamedTuple):
    """Tokens with their log-probs at the temperature, in nats.

    Attributes:
        tokens: the tokens.
        log_probs: before any filter.
        filtered_log_probs: of the distribution that was left by the filters.
    """

    tokens: Int[Tensor, " rollouts"]
    log_probs: Float[Tensor, " rollouts"]
    filtered_log_probs: Float[Tensor, " rollouts"]


class TokenSampler:
    """Chooses the next token of rows by their logits, each row with random numbers of its own.

    Args:
        sampling: temperature and filters.
        uniforms: the random numbers of each row, see `row_uniforms`.
        end_ids: ids that may not be drawn before `min_new_tokens`.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        uniforms: Float[Tensor, "rollouts max_new_tokens"],
        end_ids: tuple[int, ...],
    ) -> None:
        self.sampling = sampling
        self.uniforms = uniforms
        self.end_ids = torch.tensor(end_ids, dtype=torch.long, device=uniforms.device)
        self.filters = _filters(sampling)

    def __call__(
        self,
        logits: Float[Tensor, "running vocab"],
        *,
        rows: Int[Tensor, " running"] | slice = slice(None),
        step: int,
    ) -> Draw:
        """Return a token for each row.

        Args:
            logits: of the next token, before temperature and filters.
            rows: the rows.
            step: number of the token in the response, from 0.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits / self.sampling.temperature
        highest = scores.amax(dim=1, keepdim=True)
        weights = (scores - highest).exp()
        total = weights.sum(dim=1)
        allowed = self._allowed(scores, step)
        kept = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        if self.sampling.greedy:
            tokens = kept.argmax(dim=1)
        else:
            tokens = draw(kept, self.uniforms[rows, step])
        shifted = (scores - highest).gather(1, tokens[:, None])[:, 0]
        return Draw(tokens, shifted - total.log(), shifted - kept.sum(dim=1).log())

    def _allowed(
        self, scores: Float[Tensor, "running vocab"], step: int
    ) -> Bool[Tensor, "running vocab"] | None:
        waits = step < self.sampling.min_new_tokens and len(self.end_ids) > 0
        if not waits and not self.filters:
            return None
        if waits:
            scores = scores.index_fill(1, self.end_ids, -torch.inf)
        ids: Any = None  # no filter looks at the tokens so far
        return self.filters(ids, scores) > -torch.inf


class RowSampler(LogitsProcessor):
    """Chooses the next token of each row and leaves `generate` no other.

    Args:
        sampler: chooses.
        prompt_tokens: width of the prompts.

    Attributes:
        draws: what was chosen, for each step so far.
    """

    def __init__(self, sampler: TokenSampler, *, prompt_tokens: int) -> None:
        self.sampler = sampler
        self.prompt_tokens = prompt_tokens
        self.draws: list[Draw] = []

    def __call__(
        self,
        input_ids: Int[Tensor, "rollouts positions"],
        scores: Float[Tensor, "rollouts vocab"],
    ) -> Float[Tensor, "rollouts vocab"]:
        """Return scores that are 0 for the chosen token and -inf for all others."""
        self.draws.append(self.sampler(scores, step=input_ids.shape[1] - self.prompt_tokens))
        chosen = self.draws[-1].tokens[:, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _filters(sampling: SamplingSettings) -> LogitsProcessorList:
    filters = LogitsProcessorList()
    if sampling.top_k > 0:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        filters.append(MinPLogitsWarper(sampling.min_p))
    return filters
