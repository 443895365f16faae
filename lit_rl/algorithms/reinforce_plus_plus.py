"""REINFORCE++: a critic-free PPO with advantages whitened over the batch."""

from typing import Any

from lit_rl.advantages import GroupCenteredWhitened, WhitenedReturn
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, TokenMean
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.kl_penalties import KLInLoss, KLInReward, KLPenalty
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.policy_losses.base import PolicyLoss


class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++ (arXiv:2501.03262): one response per prompt is enough.

    The return to go, with the KL to the reference (k1) deducted at each token, is whitened over all
    tokens of the batch; the surrogate is clipped.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number.
        kl: estimator of the KL to the reference and the place where it acts.
        kl_coef: weight of the KL; 0 needs no reference.
        group_size: responses per prompt; they are not compared, so 1 is right, too.
        loop: the arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = WhitenedReturn(),
        policy_loss: PolicyLoss = ClippedSurrogate(),
        aggregation: Aggregation = TokenMean(),
        kl: KLPenalty = KLInReward(),
        kl_coef: float = 0.01,
        group_size: int = 1,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            group_size=group_size,
            **loop,
        )


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ with the group mean as baseline (arXiv:2501.03262), for verifiable rewards.

    The reward less the mean of its group is whitened over the batch, and not divided by the std of
    the group; the KL to the reference stands in the loss (k2).

    Args:
        advantage: from rewards to advantages.
        kl: estimator of the KL to the reference and the place where it acts.
        group_size: responses per prompt.
        loop: the arguments of `ReinforcePlusPlus`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = GroupCenteredWhitened(),
        kl: KLPenalty = KLInLoss(estimator="k2"),
        group_size: int = 8,
        **loop: Any,
    ) -> None:
        super().__init__(advantage=advantage, kl=kl, group_size=group_size, **loop)
