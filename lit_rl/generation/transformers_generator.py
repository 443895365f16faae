"""Generation by transformers' `generate`, with a sampler and stopping rules of our own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from lit_rl.generation.base import Generator, rollout, sampler_and_ends
from lit_rl.generation.response_ends import ResponseEnds, StopAtEnds
from lit_rl.generation.row_sampler import RowSampler
from lit_rl.generation.sampling import SamplingSettings
from lit_rl.models import Policy, evaluation_mode
from lit_rl.types import Prompts, Rollout


class TransformersGenerator(Generator):
    """Runs `generate` of transformers on any causal language model, with its key-value cache."""

    # Tensors made in inference mode, in which validation may run, could not be used in a loss.
    @torch.inference_mode(False)
    @torch.no_grad()
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
        """Return `group_size` responses to each prompt, see `Generator`."""
        token_sampler, ends = sampler_and_ends(
            policy, tokenizer, prompts, sampling, group_size, seed
        )
        prompt_ids = prompts.ids.repeat_interleave(group_size, dim=0)
        prompt_mask = prompts.mask.repeat_interleave(group_size, dim=0)
        sampler = RowSampler(token_sampler, prompt_tokens=prompt_ids.shape[1])
        with evaluation_mode(policy), _without_generation_config(policy.model):
            response_ids = _generated(
                policy.model, prompt_ids, prompt_mask, tokenizer, sampler, ends
            )
        log_probs, filtered = (
            torch.stack([getattr(draw, name) for draw in sampler.draws], dim=1)
            for name in ("log_probs", "filtered_log_probs")
        )
        return rollout(prompts, group_size, tokenizer, response_ids, log_probs, filtered, ends)


def _generated(
    model: Any,
    prompt_ids: Int[Tensor, "rollouts prompt_tokens"],
    prompt_mask: Bool[Tensor, "rollouts prompt_tokens"],
    tokenizer: PreTrainedTokenizerBase,
    sampler: RowSampler,
    ends: ResponseEnds,
) -> Int[Tensor, "rollouts tokens"]:
    settings = GenerationConfig(
        max_new_tokens=sampler.sampler.sampling.max_new_tokens,
        do_sample=False,  # the sampler has drawn: the only token left has the highest score
        num_beams=1,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    sequences: Tensor = model.generate(
        prompt_ids,
        attention_mask=prompt_mask.long(),
        generation_config=settings,
        logits_processor=LogitsProcessorList([sampler]),
        stopping_criteria=StoppingCriteriaList([StopAtEnds(ends, prompt_ids.shape[1])]),
    )
    return sequences[:, prompt_ids.shape[1] :]


@contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    # `generate` fills every setting that it is not given from the model's generation config:
    # penalties, forced and suppressed tokens, lengths, time limits and end ids among them.
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
