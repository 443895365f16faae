"""Settings of a loop that are out of range or contradict each other, and what to set instead."""

from typing import Any

from lit_rl.advantages import GAE
from lit_rl.advantages.base import CriticEstimator
from lit_rl.functional.trust_region import check_line_search
from lit_rl.models import Adapter, CausalLMSource
from lit_rl.models.fisher import DIFFERENTIABLE_TWICE
from lit_rl.policy_losses import OffPolicySequenceMask
from lit_rl.reward_shaping import MissingEndPenalty

LEAST = {
    "update_epochs": 1,
    "num_minibatches": 1,
    "group_size": 1,
    "kl_coef": 0,
    "max_skipped_updates": 1,
    "prompts_at_a_time": 1,
}


def check_policy_gradient(loop: Any) -> None:
    """Check what every loop has.

    Args:
        loop: a `PolicyGradient` whose settings are set.

    Raises:
        ValueError: for a setting that is wrong by itself or beside others.
    """
    for name, least in LEAST.items():
        value = getattr(loop, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}, must be at least {least}")
    if not 0 < loop.top_entropy_fraction <= 1:
        raise ValueError(
            f"top_entropy_fraction is {loop.top_entropy_fraction}, must be in (0, 1]: the "
            "share of the tokens that is trained, such as 0.2; 1 for all"
        )
    _check_number_of_updates(loop)
    _check_left_out_rows(loop)
    _check_sampler_correction(loop)
    _check_advantage(loop)


def _check_number_of_updates(loop: Any) -> None:
    updates = (
        f"update_epochs {loop.update_epochs} x num_minibatches {loop.num_minibatches} make "
        f"{loop.steps_per_iteration}"
    )
    if loop.old_log_probs.single_update and loop.steps_per_iteration > 1:
        raise ValueError(
            f"old_log_probs {_name(loop.old_log_probs)} is right for one update per rollout, but "
            f"{updates}; use RecomputedLogProbs"
        )
    if loop.policy_loss.single_update and loop.steps_per_iteration > 1:
        raise ValueError(
            f"policy_loss {_name(loop.policy_loss)} weighs no token by its ratio to the policy "
            f"that sampled, so it is right for one update per rollout, but {updates}; use "
            "ClippedSurrogate, or update_epochs 1 and num_minibatches 1"
        )
    masks = isinstance(loop.policy_loss, OffPolicySequenceMask)
    if masks and loop.steps_per_iteration == 1 and not loop.old_log_probs.from_sampler:
        raise ValueError(
            "policy_loss OffPolicySequenceMask leaves out what the policy has moved away from, but "
            f"{updates} update per rollout, at which it has not moved yet; use update_epochs 2, or "
            "old_log_probs SamplerLogProbs for the difference between sampler and trainer"
        )


def _check_left_out_rows(loop: Any) -> None:
    if loop.skip_zero_advantages and (loop.entropy_coef != 0 or loop.kl_coef > 0):
        raise ValueError(
            "skip_zero_advantages leaves out rows that the entropy bonus and the KL would "
            f"train: entropy_coef {loop.entropy_coef} and kl_coef {loop.kl_coef} must be 0"
        )
    punishes = any(isinstance(shaping, MissingEndPenalty) for shaping in loop.reward_shaping)
    if loop.filter_truncated and punishes:
        raise ValueError(
            "filter_truncated leaves out the very responses that MissingEndPenalty punishes; "
            "use one of the two"
        )


def _check_sampler_correction(loop: Any) -> None:
    if loop.sampler_correction is None:
        return
    if loop.old_log_probs.from_sampler:
        raise ValueError(
            f"sampler_correction {_name(loop.sampler_correction)} weighs the old log-probs "
            f"against those of the sampler, but {_name(loop.old_log_probs)} makes them the same; "
            "use RecomputedLogProbs"
        )
    if loop.deducts_kl and loop.old_log_probs.single_update:
        raise ValueError(
            f"old_log_probs {_name(loop.old_log_probs)} would take the KL in the reward from the "
            "sampler, which sampler_correction says is not the policy; use RecomputedLogProbs"
        )


def _check_advantage(loop: Any) -> None:
    advantage, name = loop.advantage, _name(loop.advantage)
    if not issubclass(loop.provides, advantage.reads):
        raise ValueError(
            f"{name} reads a {advantage.reads.__name__}, which {_name(loop)} does not make; PPO "
            "gives values to GAE, ReMax a baseline response to GreedyBaseline"
        )
    if loop.group_size < advantage.min_group_size:
        raise ValueError(
            f"group_size is {loop.group_size}, but {name} compares the responses of one prompt: "
            f"it needs at least {advantage.min_group_size}, usually 8"
        )
    if advantage.sees_final_reward:
        return
    if loop.deducts_kl:
        raise ValueError(
            f"{name} does not see a KL that is deducted from the reward; use kl KLInLoss, or "
            "kl_coef 0"
        )
    if loop.reward_shaping:
        raise ValueError(
            f"{name} does not see what reward_shaping does, "
            f"{[_name(shaping) for shaping in loop.reward_shaping]}; leave it out, or make it a "
            "part of the reward"
        )


def check_actor_critic(loop: Any) -> None:
    """Check what a loop with a critic adds.

    Args:
        loop: an `ActorCritic` whose settings are set.

    Raises:
        ValueError: for a setting that is wrong by itself or beside others.
    """
    if not isinstance(loop.advantage, CriticEstimator):
        raise ValueError(
            f"{_name(loop.advantage)} gives the critic of {_name(loop)} no targets; use "
            "lit_rl.advantages.GAE, or an algorithm without a critic, such as GRPO"
        )
    for name in ("value_coef", "critic_lr"):
        if getattr(loop, name) is not None and not getattr(loop, name) > 0:
            raise ValueError(f"{name} is {getattr(loop, name)}, must be above 0")
    for name in ("critic_weight_decay", "critic_lr_warmup_steps", "critic_warmup"):
        if getattr(loop, name) < 0:
            raise ValueError(f"{name} is {getattr(loop, name)}, must be at least 0")
    if loop.skip_zero_advantages:
        raise ValueError(
            "skip_zero_advantages leaves out rows that the critic learns from; it is for "
            "algorithms without a critic"
        )
    bootstraps = isinstance(loop.advantage, GAE) and loop.advantage.bootstrap_truncated
    if loop.filter_truncated and bootstraps:
        raise ValueError(
            "filter_truncated leaves out the very responses that bootstrap_truncated of GAE "
            "goes on with; use one of the two"
        )


def check_trpo(loop: Any) -> None:
    """Check what the step in a trust region adds.

    Args:
        loop: a `TRPO` whose settings are set.

    Raises:
        ValueError: for a setting that is wrong by itself, and for a model of which the step would
            be wrong.
    """
    check_line_search(loop.max_kl, loop.accept_ratio, loop.backtrack_coef, loop.line_search_steps)
    if not loop.damping >= 0:
        raise ValueError(f"damping is {loop.damping}, must be at least 0, for example 0.1")
    for name in ("cg_iterations", "fisher_one_in"):
        if getattr(loop, name) < 1:
            raise ValueError(f"{name} is {getattr(loop, name)}, must be at least 1, usually 10")
    if loop.old_log_probs.single_update:
        raise ValueError(
            f"old_log_probs {_name(loop.old_log_probs)} makes every ratio 1, so that the line "
            "search sees no improvement; use RecomputedLogProbs"
        )
    _check_second_derivative(loop.source, loop.adapter)


def _check_second_derivative(source: CausalLMSource, adapter: Adapter | None) -> None:
    if source.dtype != "float32":
        raise ValueError(
            f"source.dtype {source.dtype} is too coarse for the second derivatives of the KL; "
            "TRPO needs float32, which PPO does not"
        )
    if source.attn_implementation not in DIFFERENTIABLE_TWICE:
        raise ValueError(
            f"source.attn_implementation {source.attn_implementation} has no second "
            "derivative, of which the step of TRPO is made; use sdpa or eager"
        )
    if source.dropout:
        raise ValueError(
            "source.dropout true gives old and new policy different random numbers, so that "
            "their KL says nothing of the step; TRPO needs source.dropout false"
        )
    if source.quantized:
        raise ValueError(
            "source.load_in_4bit has no second derivative, of which the step of TRPO is made; "
            "TRPO needs load_in_4bit false"
        )
    if adapter is not None and adapter.dropout:
        raise ValueError(
            f"adapter.dropout {adapter.dropout} gives old and new policy different random "
            "numbers, so that their KL says nothing of the step; TRPO needs adapter.dropout 0"
        )


def _name(value: Any) -> str:
    return type(value).__name__
