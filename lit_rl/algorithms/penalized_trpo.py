"""Trust region policy optimization with a penalty in the place of the constraint."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.advantages import GAE
from lit_rl.advantages.base import CriticEstimator
from lit_rl.aggregations import Aggregation, TokenMean, Totals
from lit_rl.algorithms.actor_critic import ActorCritic
from lit_rl.functional import kl_k3, masked_sum, sum_over_ranks
from lit_rl.policy_losses import Surrogate
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.types import Experience, ModelOutput, PolicyOutput, ScoredRollout, Update

TOLERATED = 1.5
"""How far the measured KL may be from its target, as a factor, without a change of beta."""

LARGEST_CHANGE = 1024.0
"""How far beta may move from where it started, as a factor."""


def adapted_beta(beta: float, kl: float, target_kl: float) -> float:
    """Beta / 2 if kl < target_kl / 1.5; 2 * beta if kl > 1.5 * target_kl; else beta.

    PPO, arXiv:1707.06347, section 4. A KL that is unknown (NaN) leaves beta as it is.

    Args:
        beta: weight of the penalty.
        kl: measured KL(old || new), in nats per token.
        target_kl: the KL that is aimed at, in nats per token, above 0.

    Returns:
        The next beta.

    Example:
        >>> [adapted_beta(1.0, kl, target_kl=0.03) for kl in (0.019, 0.021, 0.044, 0.046)]
        [0.5, 1.0, 1.0, 2.0]
    """
    if kl < target_kl / TOLERATED:
        return beta / 2
    if kl > target_kl * TOLERATED:
        return beta * 2
    return beta


class PenalizedTRPO(ActorCritic):
    """The penalised surrogate (arXiv:1502.05477, section 4; arXiv:1707.06347, section 4, eq. 8).

    beta times KL(old || new) is added to the loss of each token, where old is the policy before the
    updates of the iteration. It is estimated from the sampled tokens with k3, whose value and
    gradient are right in the mean over tokens that the old policy draws.

    At the first update of an iteration the two policies are one and the penalty has no gradient, so
    more than one update is needed.

    Args:
        advantage: from rewards and values to advantages and to the targets of the values.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, for policy, penalty and critic.
        beta: weight of the penalty, in the unit of the advantages per nat; it starts there.
        target_kl: the KL(old || new) of an iteration that beta is steered to, in nats per token:
            after the updates the KL is measured by a pass over the rollout and beta is halved or
            doubled, see `adapted_beta`. It stays within a factor of 1024 of its start, so that a
            spell without any reward does not switch the penalty off, and stays as it is while the
            critic warms up. None: beta stays.
        update_epochs: passes over the rollouts of an iteration.
        loop: the arguments of `ActorCritic`.

    Raises:
        ValueError: for a setting outside its range.
    """

    def __init__(
        self,
        advantage: CriticEstimator = GAE(),
        policy_loss: PolicyLoss = Surrogate(),
        aggregation: Aggregation = TokenMean(),
        beta: float = 1.0,
        target_kl: float | None = None,
        update_epochs: int = 4,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            update_epochs=update_epochs,
            **loop,
        )
        self.beta = self.initial_beta = beta
        self.target_kl = target_kl
        if not 0 < beta < math.inf:
            raise ValueError(f"beta is {beta}, must be above 0, for example 1.0")
        if target_kl is not None and not target_kl > 0:
            raise ValueError(
                f"target_kl is {target_kl}, must be above 0 nats per token, for example 0.01; null "
                "for a beta that stays"
            )
        if self.steps_per_iteration == 1:
            raise ValueError(
                "update_epochs 1 x num_minibatches 1 make one update per rollout, in which the "
                "penalty has no gradient; use update_epochs 4"
            )

    def actor_loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the policy's loss, the penalty included."""
        assert isinstance(output, PolicyOutput)
        penalty = kl_from_old(output.log_probs, experience)
        actor = super().actor_loss(output, experience, totals)
        return actor + self.beta * self.aggregation(penalty, experience.mask, totals)

    def prepare(self, scored: ScoredRollout) -> Experience:
        """Keep the rollout until the KL after the updates is measured."""
        self._rollout = super().prepare(scored)
        return self._rollout

    def finish(self, updates: list[Update]) -> None:
        """Count the iteration, log beta and steer it to the target."""
        values = {"old_policy_kl_coef": self.beta}
        if self.target_kl is not None:
            values["old_policy_kl"] = self.measured_kl(self._rollout)
            if self.trains_policy:
                beta = adapted_beta(self.beta, values["old_policy_kl"], self.target_kl)
                least, most = self.initial_beta / LARGEST_CHANGE, self.initial_beta * LARGEST_CHANGE
                self.beta = min(max(beta, least), most)
        del self._rollout
        self.log_dict(values)
        super().finish(updates)

    def measured_kl(self, experience: Experience) -> float:
        """Return the mean KL(old || policy) per token of a rollout, over all ranks, in nats.

        NaN where no token counts.
        """
        log_probs = self.log_probs_under(self.policy, experience)
        total = masked_sum(kl_from_old(log_probs, experience), experience.mask)
        kl, tokens = sum_over_ranks(torch.stack([total, experience.mask.sum().to(total)]))
        return float(kl / tokens)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store beta."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lit_rl"]["beta"] = self.beta

    def load_memory(self, stored: Mapping[str, Any]) -> None:
        """Give beta its value back where it is steered; a fixed one is the configured one."""
        super().load_memory(stored)
        if self.target_kl is not None:
            self.beta = stored.get("beta", self.beta)


def kl_from_old(
    log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
) -> Float[Tensor, "rollouts tokens"]:
    """The k3 estimate of KL(old || policy) at each token, in nats; 0 where the mask is False."""
    old, mask = experience.old_log_probs, experience.mask
    assert old is not None  # one update per rollout, the only case without them, is refused
    return kl_k3(torch.where(mask, old, 0.0), torch.where(mask, log_probs, 0.0))
