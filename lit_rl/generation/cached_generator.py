"""Generation of our own: each prompt is read once for all its responses."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rl.generation.base import Generator, rollout, sampler_and_ends
from lit_rl.generation.captured_step import CapturedStep, weights_cast_once
from lit_rl.generation.fixed_width_cache import FixedWidthCache
from lit_rl.generation.group_cache import GroupCache, PromptCache
from lit_rl.generation.sampling import SamplingSettings
from lit_rl.generation.transformers_generator import TransformersGenerator
from lit_rl.generation.weights_first import weights_first
from lit_rl.models import Policy, evaluation_mode
from lit_rl.models.packing import packed
from lit_rl.models.response_states import flat_states
from lit_rl.types import Prompts, Rollout, Sequences

STEPS_PER_LOOK = {"cpu": 1}
"""Tokens after which the ends of responses are looked at, by device: a look waits for a GPU."""
STEPS_PER_LOOK_ELSEWHERE = 8


@dataclass(frozen=True)
class CachedGenerator(Generator):
    """Samples token by token with keys and values of its own.

    The keys and values of a prompt stand once for all its responses, those of the responses in
    memory that is allocated once; a response that has ended takes part in no further pass. The
    distribution is that of `TransformersGenerator`, and with the same seed so are the tokens, up to
    rounding of the logits.

    The log-probs of the first rollout of a policy are compared with those of a plain pass. A policy
    whose architecture they do not fit is sampled by `TransformersGenerator` instead, as are those
    that cannot be told positions and attention: a warning says so, once.

    Args:
        cuda_graphs: let a CUDA graph repeat the pass of a step: one launch in place of hundreds,
            which take longer than the work of a small model. Needs a CUDA device. A capture, at the
            second token and whenever half of the responses have ended, costs about four passes;
            until then ended responses go on unread, and keys not yet written are read as zeros.
    """

    cuda_graphs: bool = False

    def refusal(self, device: torch.device) -> str | None:
        """Return why this generator cannot sample on a device; None: it can."""
        if self.cuda_graphs and device.type != "cuda":
            return (
                f"generator.cuda_graphs needs a CUDA device, and this is a run on {device.type}: "
                "use cuda_graphs: false, or --trainer.accelerator gpu"
            )
        return None

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
        if refusal := self.refusal(prompts.ids.device):
            raise ValueError(refusal)
        if policy.fits_group_cache is None and not policy.can_pack:
            self._fall_back(policy)
        if policy.fits_group_cache is not False:
            with evaluation_mode(policy):
                request = (policy, tokenizer, prompts, sampling, group_size, seed)
                with (
                    weights_cast_once(prompts.ids.device)
                    if self.cuda_graphs
                    else weights_first(policy)
                ):
                    result = _sampled(*request, cuda_graphs=self.cuda_graphs)
                if policy.fits_group_cache or _fits(policy, result, sampling):
                    policy.fits_group_cache = True
                    return result
            self._fall_back(policy)
        return TransformersGenerator()(
            policy, tokenizer, prompts, sampling, group_size=group_size, seed=seed
        )

    def _fall_back(self, policy: Policy) -> None:
        policy.fits_group_cache = False
        warnings.warn(
            f"{type(policy.model).__name__} has an attention that CachedGenerator does not know: "
            "it is sampled by transformers' generate from here on, which takes longer. "
            "generator: lit_rl.generation.TransformersGenerator says so from the start",
            stacklevel=3,
        )


def _sampled(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    sampling: SamplingSettings,
    group_size: int,
    seed: tuple[int, ...],
    *,
    cuda_graphs: bool,
) -> Rollout:
    sampler, ends = sampler_and_ends(policy, tokenizer, prompts, sampling, group_size, seed)
    device, num_rollouts = prompts.ids.device, len(prompts) * group_size
    steps_per_look = STEPS_PER_LOOK.get(device.type, STEPS_PER_LOOK_ELSEWHERE)
    shape = (num_rollouts, sampling.max_new_tokens)
    response_ids = torch.zeros(shape, dtype=torch.long, device=device)

    prompt_cache, states = _read_prompts(policy, prompts)
    prompt_of_row = prompt_cache.rows.prompt_of_row.repeat_interleave(group_size)
    cache, next_logits = _decoder(
        policy, prompt_cache, prompt_of_row, sampling.max_new_tokens, cuda_graphs
    )
    logits = policy.head(states).repeat_interleave(group_size, dim=0)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs, filtered = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    rows = torch.arange(num_rollouts, device=device)
    for step in range(sampling.max_new_tokens):
        if step:
            logits = next_logits(response_ids[rows, step - 1])
        draw = sampler(logits, rows=rows, step=step)
        response_ids[rows, step] = draw.tokens
        log_probs[rows, step] = draw.log_probs
        filtered[rows, step] = draw.filtered_log_probs
        if (step + 1) % steps_per_look == 0 or step + 1 == sampling.max_new_tokens:
            running = ~ends.read(response_ids[:, : step + 1])[rows]
            if not running.any():
                break
            if cache.drops(running):
                rows = rows[cache.keep(running.nonzero()[:, 0])]
    width = int(ends.lengths.max())
    return rollout(
        prompts,
        group_size,
        tokenizer,
        response_ids[:, :width],
        log_probs[:, :width],
        filtered[:, :width],
        ends,
    )


def _read_prompts(
    policy: Policy, prompts: Prompts
) -> tuple[PromptCache, Float[Tensor, "prompts hidden"]]:
    """Return keys and values of the prompts, and for each prompt the state behind it."""
    any_token = prompts.ids[:, -1:]
    rows = packed(
        Sequences(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=any_token,
            mask=torch.ones_like(any_token, dtype=torch.bool),
        ),
        with_end=False,
    )
    cache = PromptCache(rows)
    hidden = flat_states(policy.base_model, rows.ids, rows.positions, cache)
    return cache, rows.states(hidden, 1)[:, 0]


def _decoder(
    policy: Policy,
    prompts: PromptCache,
    prompt_of_row: Int[Tensor, " rollouts"],
    max_new_tokens: int,
    cuda_graphs: bool,
) -> tuple[GroupCache, Callable[[Tensor], Tensor]]:
    """Return the cache of all responses, and what gives the logits behind their newest tokens."""
    if cuda_graphs:
        fixed = FixedWidthCache(prompts, prompt_of_row, max_new_tokens)
        return fixed, CapturedStep(policy, fixed)
    cache = GroupCache(prompts, prompt_of_row, max_new_tokens)

    def next_logits(newest: Int[Tensor, " running"]) -> Float[Tensor, "running vocab"]:
        cache.step()
        return policy.head(flat_states(policy.base_model, newest, cache.positions, cache))

    return cache, next_logits


def _fits(policy: Policy, result: Rollout, sampling: SamplingSettings) -> bool:
    """Return whether log-probs of the sampler are those of a plain pass, on two of the rows."""
    rows = torch.tensor([0, len(result) - 1], device=result.mask.device)
    sequences = Sequences(
        prompt_ids=result.prompt_ids[rows],
        prompt_mask=result.prompt_mask[rows],
        response_ids=result.response_ids[rows],
        mask=result.mask[rows],
    )
    with policy.passes("padded"):
        plain = policy(sequences, temperature=sampling.temperature).log_probs
    difference = (plain - result.sampler_log_probs[rows]).abs()
    return bool((difference <= policy.tolerance * plain.abs().clamp(min=1)).all())
