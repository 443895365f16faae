"""What every generator is: prompts in, rollouts out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rl.generation.response_ends import ResponseEnds
from lit_rl.generation.row_sampler import TokenSampler, row_uniforms
from lit_rl.generation.sampling import SamplingSettings
from lit_rl.models import Policy
from lit_rl.types import Prompts, Rollout


class Generator(ABC):
    """Samples responses from the policy."""

    def refusal(self, device: torch.device) -> str | None:
        """Return why this generator cannot sample on a device; None: it can.

        Args:
            device: where the policy will be.
        """
        return None

    @abstractmethod
    def __call__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        sampling: SamplingSettings,
        *,
        group_size: int,
        seed: tuple[int, ...],
    ) -> Rollout:
        """Return `group_size` responses to each prompt; the policy and all random states stay.

        Args:
            policy: the model to sample from; in evaluation mode meanwhile.
            tokenizer: the model's tokenizer.
            prompts: the prompts, on the policy's device.
            sampling: every setting of the sampling.
            group_size: responses per prompt, at least 1.
            seed: non-negative numbers such as (run seed, purpose, iteration). Each response is
                drawn with random numbers of its own, given by the seed, the prompt's row id and
                its place in the group: it depends neither on the other rows of the batch (but for
                rounding of the logits) nor on rank and world size.

        Returns:
            The rollouts, without gradient; the tensors may be used in a loss.

        Raises:
            ValueError: if a prompt is empty, or is too long for the model's context.
        """


def end_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response: the model's and the tokenizer's end tokens, sorted."""
    ids = set(policy.end_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return tuple(sorted(ids))


def check_request(
    policy: Policy, prompts: Prompts, sampling: SamplingSettings, group_size: int
) -> None:
    """Refuse what no generator can do: see the errors of `Generator.__call__`."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, such as 8; it is {group_size}")
    lengths = prompts.mask.sum(dim=1).tolist()
    if min(lengths) < 1:
        raise ValueError(
            f"prompt {lengths.index(min(lengths))} of the batch is empty; a prompt needs a token"
        )
    limit = policy.max_context_tokens
    if limit is not None and max(lengths) + sampling.max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and max_new_tokens = {sampling.max_new_tokens} do "
            f"not fit into the model's context of {limit} tokens: make max_new_tokens or the "
            f"limit of the prompts smaller, such as {max(1, limit - max(lengths))} new tokens"
        )


def sampler_and_ends(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    sampling: SamplingSettings,
    group_size: int,
    seed: tuple[int, ...],
) -> tuple[TokenSampler, ResponseEnds]:
    """Return what draws the tokens of a request, and what tells where its responses end.

    The arguments are those of `Generator.__call__`.

    Raises:
        ValueError: if a prompt is empty, or is too long for the model's context.
    """
    check_request(policy, prompts, sampling, group_size)
    device = prompts.ids.device
    uniforms = row_uniforms(seed, prompts.row_ids, group_size, sampling.max_new_tokens)
    ids = end_ids(policy, tokenizer)
    ends = ResponseEnds(
        tokenizer,
        end_ids=ids,
        stop_strings=sampling.stop_strings,
        num_rollouts=len(prompts) * group_size,
        device=device,
    )
    return TokenSampler(sampling, uniforms.to(device), ids), ends


def rollout(
    prompts: Prompts,
    group_size: int,
    tokenizer: PreTrainedTokenizerBase,
    response_ids: Int[Tensor, "rollouts tokens"],
    log_probs: Float[Tensor, "rollouts tokens"],
    filtered_log_probs: Float[Tensor, "rollouts tokens"],
    ends: ResponseEnds,
) -> Rollout:
    """Return what was sampled as a rollout.

    Args:
        prompts: the prompts.
        group_size: responses per prompt.
        tokenizer: pads.
        response_ids: the sampled tokens; anything behind the end of a row.
        log_probs: as `Rollout.sampler_log_probs`; anything behind the end of a row.
        filtered_log_probs: as `Rollout.filtered_log_probs`, likewise.
        ends: where the rows end.
    """
    columns = torch.arange(response_ids.shape[1], device=response_ids.device)
    mask = columns < ends.lengths[:, None]

    def repeated(entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(entry for entry in entries for _ in range(group_size))

    return Rollout(
        prompt_ids=prompts.ids.repeat_interleave(group_size, dim=0),
        prompt_mask=prompts.mask.repeat_interleave(group_size, dim=0),
        response_ids=response_ids.masked_fill(~mask, tokenizer.pad_token_id),
        mask=mask,
        sampler_log_probs=log_probs.masked_fill(~mask, 0.0),
        filtered_log_probs=filtered_log_probs.masked_fill(~mask, 0.0),
        finished=ends.finished,
        prompts=repeated(prompts.texts),
        responses=ends.texts(response_ids),
        answers=repeated(prompts.answers),
        columns={name: repeated(column) for name, column in prompts.columns.items()},
        group_size=group_size,
    )
