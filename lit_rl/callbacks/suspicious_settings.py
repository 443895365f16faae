"""Settings that are allowed, but as a rule not meant: one sentence each, before a run begins.

What is wrong in any case is refused by `lit_rl.algorithms.setting_checks`. Each check here is a
function of the trainer and the algorithm; docs/health.md has them as a table.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from lit_rl.advantages import ReturnToGo
from lit_rl.aggregations import TokenMean, TokenSum
from lit_rl.algorithms import TRPO, ActorCritic, PenalizedTRPO
from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.callbacks.kl_controllers import AdaptiveKL, FixedKL, KLController
from lit_rl.callbacks.stop_on_kl import StopOnKL
from lit_rl.policy_losses import (
    GeometricMeanClipped,
    OffPolicySequenceMask,
    SequenceClipped,
    Surrogate,
)
from lit_rl.policy_losses.base import PolicyLoss

LARGE_KL_PER_TOKEN = 0.5
"""Target of a KL, in nats per token, from which it looks like one per response."""

SMALL_KL_PER_RESPONSE = 0.1
"""Target of a KL, in nats per response, below which it looks like one per token."""


def suspicious_settings(trainer: Trainer, module: Any) -> list[str]:
    """Return a sentence for each combination of settings that is as a rule not meant.

    Args:
        trainer: with its callbacks, and the optimizer if it has one already.
        module: a `PolicyGradient`.
    """
    return [
        sentence
        for check in (
            dual_clip_without_negative_advantages,
            reference_without_weight,
            kl_without_pull,
            sequence_ratios_with_token_weights,
            clip_that_never_acts,
            ratios_without_bound,
            targets_in_another_unit,
            learning_rates_of_zero,
            schedules_longer_than_the_run,
            sampling_from_another_policy,
            greedy_groups,
        )
        for sentence in check(trainer, module)
    ]


def dual_clip_without_negative_advantages(trainer: Trainer, module: Any) -> Iterator[str]:
    """A dual clip acts on negative advantages alone, which returns without baseline seldom are."""
    dual_clip = getattr(_loss(module), "dual_clip", None)
    advantage = module.advantage
    if dual_clip and isinstance(advantage, ReturnToGo) and advantage.baseline is None:
        yield (
            f"dual_clip {dual_clip} acts on negative advantages alone, which ReturnToGo without a "
            "baseline has only where rewards are negative: add a baseline such as BatchMean, or "
            "leave dual_clip out"
        )


def reference_without_weight(trainer: Trainer, module: Any) -> Iterator[str]:
    """A reference costs memory and a pass, also where the weight of its KL is 0."""
    controllers = callbacks_of(trainer, KLController)
    moves = any(not isinstance(c, FixedKL) or c.coef > 0 for c in controllers)
    if module.uses_reference and not module.kl_coef > 0 and not moves:
        needed = [
            type(callback).__name__
            for callback in callbacks_of(trainer, RLCallback)
            if callback.needs_reference
        ]
        yield (
            f"{', '.join(needed)} loads the reference, at the price of its memory and a pass, but "
            "the weight of the KL is 0, so that it is only measured: set a weight above 0, or "
            "leave the callback out"
        )


def kl_without_pull(trainer: Trainer, module: Any) -> Iterator[str]:
    """k2, k3 and abs in the reward hardly pull near the reference."""
    estimator = module.kl.estimator
    if module.uses_reference and module.kl.in_reward and estimator != "k1":
        yield (
            f"the KL in the reward is estimated by {estimator}, whose expected pull towards the "
            "reference vanishes near it: use k1, or kl KLInLoss"
        )


def sequence_ratios_with_token_weights(trainer: Trainer, module: Any) -> Iterator[str]:
    """A loss of the whole response, repeated at each token, weighs long responses more."""
    loss, aggregation = _loss(module), type(module.aggregation)
    of_sequence = isinstance(loss, SequenceClipped | GeometricMeanClipped)
    if of_sequence and issubclass(aggregation, TokenMean | TokenSum):
        yield (
            f"{type(loss).__name__} has one ratio for a whole response, but {aggregation.__name__} "
            "weighs a response by its length: use SequenceMean, as the paper does"
        )


def clip_that_never_acts(trainer: Trainer, module: Any) -> Iterator[str]:
    """With one update per rollout and old log-probs of the trainer every ratio is 1."""
    loss = _loss(module)
    clips = type(loss).clipped is not PolicyLoss.clipped
    if clips and module.steps_per_iteration == 1 and not module.old_log_probs.from_sampler:
        yield (
            f"with one update per rollout every ratio is 1, so that the clip of "
            f"{type(loss).__name__} never acts and its range means nothing: that is the plain "
            "policy gradient; for more updates set update_epochs or num_minibatches above 1"
        )


def ratios_without_bound(trainer: Trainer, module: Any) -> Iterator[str]:
    """Several updates on a surrogate that nothing keeps near the policy that sampled."""
    bounded = isinstance(module, TRPO | PenalizedTRPO) or callbacks_of(trainer, StopOnKL)
    if type(_loss(module)) is Surrogate and module.steps_per_iteration > 1 and not bounded:
        yield (
            f"Surrogate takes {module.steps_per_iteration} updates per rollout without a clip, so "
            "that nothing keeps the policy near the one that sampled: use ClippedSurrogate, add "
            "StopOnKL, or take one update"
        )


def targets_in_another_unit(trainer: Trainer, module: Any) -> Iterator[str]:
    """A KL of a response is that of a token times its length."""
    of_token = {f"limit of {type(c).__name__}": c.limit for c in callbacks_of(trainer, StopOnKL)}
    if isinstance(module, TRPO):
        of_token["max_kl"] = module.max_kl
    if isinstance(module, PenalizedTRPO) and module.target_kl is not None:
        of_token["target_kl"] = module.target_kl
    longest = module.sampling.max_new_tokens
    for controller in callbacks_of(trainer, AdaptiveKL):
        if controller.unit == "nats_per_token":
            of_token["target of AdaptiveKL"] = controller.target
        elif controller.target < SMALL_KL_PER_RESPONSE:
            yield (
                f"target of AdaptiveKL is {controller.target:g} nats per response, of up to "
                f"{longest} tokens, which leaves the policy hardly any room: a response usually "
                "has 1 to 50 nats; if it is meant per token, set unit nats_per_token"
            )
    for name, value in of_token.items():
        if value > LARGE_KL_PER_TOKEN:
            yield (
                f"{name} is {value:g} nats per token, {value * longest:g} in a response of "
                f"{longest} tokens, which is no limit in practice: 0.01 to 0.1 is usual per token; "
                "if it is meant per response, divide by its length"
            )


def learning_rates_of_zero(trainer: Trainer, module: Any) -> Iterator[str]:
    """A parameter group that stays as it is."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            if group.get("initial_lr", group["lr"]) == 0:
                yield (
                    f"the learning rate of the {group.get('name', 'policy')} is 0, so that it is "
                    "never trained: set model.optimizer.lr or critic_lr, for example 1e-6"
                )


def schedules_longer_than_the_run(trainer: Trainer, module: Any) -> Iterator[str]:
    """A warm-up that the run does not outlast."""
    iterations = module.num_iterations
    if iterations is None:
        return
    steps = iterations * module.steps_per_iteration
    if 0 < steps <= module.warmup_steps:
        yield (
            f"warmup_steps {module.warmup_steps} is not less than the {steps} optimizer steps of "
            f"the run, so that the learning rate never reaches its value: set it to {steps // 10}, "
            "a tenth of them, or train longer"
        )
    if isinstance(module, ActorCritic) and 0 < iterations <= module.critic_warmup:
        yield (
            f"critic_warmup {module.critic_warmup} is not less than the {iterations} iterations of "
            "the run, so that the policy is never trained: set it lower, or train longer"
        )


def sampling_from_another_policy(trainer: Trainer, module: Any) -> Iterator[str]:
    """Filters leave out tokens that the log-probs of the update know nothing of."""
    sampling = module.sampling
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}
    on = [
        f"{name} {getattr(sampling, name):g}"
        for name, value in off.items()
        if getattr(sampling, name) != value
    ]
    if on and not sampling.greedy:
        tempered = (
            f" at temperature {sampling.temperature:g}" if sampling.temperature != 1.0 else ""
        )
        yield (
            f"responses are drawn with {' and '.join(on)}{tempered}, but ratios, KL and gradient "
            "are those of the policy without these filters, so that the policy that is trained is "
            "not the one that sampled: leave the filters off in training"
        )


def greedy_groups(trainer: Trainer, module: Any) -> Iterator[str]:
    """Greedy responses to one prompt are all the same."""
    if module.sampling.greedy:
        yield (
            "sampling is greedy, so that the responses to a prompt are all the same and nothing "
            "new is ever tried: set sampling.greedy to false"
        )


def _loss(module: Any) -> PolicyLoss:
    """Return the policy loss, without the mask around it."""
    loss: PolicyLoss = module.policy_loss
    return loss.loss if isinstance(loss, OffPolicySequenceMask) else loss
