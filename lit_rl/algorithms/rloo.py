"""REINFORCE leave-one-out."""

from typing import Any

from lit_rl.advantages import LeaveOneOut
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, SequenceSum
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.kl_penalties import KLInReward, KLPenalty
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.policy_losses.base import PolicyLoss


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (arXiv:2402.14740, section 2.2).

    The baseline of a response is the mean reward of the others of its prompt. A response is one
    action: the losses of its tokens add up and are not divided by its length. The KL to the
    reference is deducted from the reward. The paper takes one update per rollout, where clipping
    changes nothing; with more, the clipped surrogate keeps them close.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number.
        kl: estimator of the KL to the reference and the place where it acts.
        kl_coef: weight of the KL; 0 needs no reference.
        loop: the arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = LeaveOneOut(),
        policy_loss: PolicyLoss = ClippedSurrogate(),
        aggregation: Aggregation = SequenceSum(),
        kl: KLPenalty = KLInReward(),
        kl_coef: float = 0.05,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            **loop,
        )
