"""Proximal policy optimization."""

from typing import Any

from lit_rl.advantages import GAE
from lit_rl.advantages.base import CriticEstimator
from lit_rl.aggregations import Aggregation, TokenMean
from lit_rl.algorithms.actor_critic import ActorCritic
from lit_rl.kl_penalties import KLInReward, KLPenalty
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.policy_losses.base import PolicyLoss


class PPO(ActorCritic):
    """Proximal policy optimization (arXiv:1707.06347), as language models are trained with it.

    GAE over the tokens of a response, whitened over the batch; the clipped surrogate; a clipped
    value loss; the KL to the reference is deducted from the reward of each token
    (arXiv:1909.08593, section 2.1).

    Args:
        advantage: from rewards and values to advantages and to the targets of the values.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, for policy and critic.
        kl: estimator of the KL to the reference and the place where it acts.
        kl_coef: weight of the KL; 0 needs no reference.
        group_size: responses per prompt; they are not compared, so 1 is right, too.
        update_epochs: passes over the rollouts of an iteration.
        loop: the arguments of `ActorCritic`.
    """

    def __init__(
        self,
        advantage: CriticEstimator = GAE(),
        policy_loss: PolicyLoss = ClippedSurrogate(),
        aggregation: Aggregation = TokenMean(),
        kl: KLPenalty = KLInReward(),
        kl_coef: float = 0.05,
        group_size: int = 1,
        update_epochs: int = 4,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            group_size=group_size,
            update_epochs=update_epochs,
            **loop,
        )
