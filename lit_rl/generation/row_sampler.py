"""Drawing tokens row by row, each row with random numbers of its own."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
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


def draw(
    scores: Float[Tensor, "rollouts vocab"], uniforms: Float[Tensor, " rollouts"]
) -> Int[Tensor, " rollouts"]:
    """P(token = v) = p_v with p = softmax(scores): min {v : sum_{w <= v} p_w > uniform}.

    Sampling by inversion of the cumulative distribution.
    A token of probability 0 (score -inf) is never drawn, whatever the rounding of the sums.

    Args:
        scores: unnormalised log-probs, in nats; -inf for a token that is filtered out.
        uniforms: one number in [0, 1) per row.

    Returns:
        One token id per row, distributed as p if the numbers are uniform.

    Example:
        >>> probabilities = torch.tensor([[0.5, 0.0, 0.25, 0.25]])
        >>> [int(draw(probabilities.log(), torch.tensor([u]))) for u in (0.0, 0.49, 0.5, 0.99)]
        [0, 0, 2, 3]
    """
    probabilities = scores.softmax(dim=-1)
    # Parallel sums need not be monotone: a token of probability 0 must not profit from that.
    cumulative = probabilities.cumsum(dim=-1).masked_fill(probabilities == 0, 0.0)
    total = cumulative.amax(dim=-1)
    # A product rounded up to the total would lie beyond every token.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[:, None]).int().argmax(dim=-1)


class RowSampler(LogitsProcessor):
    """Chooses the next token of each row and leaves `generate` no other.

    Args:
        sampling: temperature and filters.
        uniforms: the random numbers of each row, see `row_uniforms`.
        prompt_tokens: width of the prompts.
        end_ids: ids that may not be drawn before `min_new_tokens`.

    Attributes:
        log_probs: for each step so far the log-probs of the chosen tokens, in nats, in float32, at
            the temperature and before any filter.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        uniforms: Float[Tensor, "rollouts max_new_tokens"],
        *,
        prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        self.sampling = sampling
        self.uniforms = uniforms
        self.prompt_tokens = prompt_tokens
        self.log_probs: list[Float[Tensor, " rollouts"]] = []
        self.filters = _filters(sampling, prompt_tokens, end_ids, uniforms.device)

    def __call__(
        self,
        input_ids: Int[Tensor, "rollouts positions"],
        scores: Float[Tensor, "rollouts vocab"],
    ) -> Float[Tensor, "rollouts vocab"]:
        """Return scores that are 0 for the chosen token and -inf for all others."""
        scores = scores.float() / self.sampling.temperature
        allowed: Tensor = self.filters(input_ids, scores)  # type: ignore[arg-type]
        if self.sampling.greedy:
            tokens = allowed.argmax(dim=-1)
        else:
            tokens = draw(allowed, self.uniforms[:, input_ids.shape[1] - self.prompt_tokens])
        chosen = tokens[:, None]
        self.log_probs.append(scores.log_softmax(dim=-1).gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _filters(
    sampling: SamplingSettings, prompt_tokens: int, end_ids: tuple[int, ...], device: torch.device
) -> LogitsProcessorList:
    filters = LogitsProcessorList()
    if sampling.min_new_tokens > 0 and end_ids:
        filters.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_tokens, sampling.min_new_tokens, list(end_ids), device=str(device)
            )
        )
    if sampling.top_k > 0:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        filters.append(MinPLogitsWarper(sampling.min_p))
    return filters
