"""Group relative policy optimization, and the same without its two biases."""

from typing import Any

from lit_rl.advantages import GroupCentered, GroupNormalized
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, FixedLength, SequenceMean
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.generation import SamplingSettings
from lit_rl.kl_penalties import KLInLoss, KLPenalty
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.policy_losses.base import PolicyLoss


class GRPO(PolicyGradient):
    """Group relative policy optimization (DeepSeekMath, arXiv:2402.03300, section 4.1, eq. 3).

    Advantages are standardised within the group of one prompt, the surrogate is clipped per token,
    tokens are averaged per sequence and sequences over the batch, and the k3 estimate of the KL to
    the reference stands in the loss.

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
        advantage: AdvantageEstimator = GroupNormalized(),
        policy_loss: PolicyLoss = ClippedSurrogate(),
        aggregation: Aggregation = SequenceMean(),
        kl: KLPenalty = KLInLoss(),
        kl_coef: float = 0.04,
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


class DrGRPO(GRPO):
    """GRPO done right (arXiv:2503.20783, section 3.2): two choices of GRPO changed.

    Advantages are only centred, since dividing by the std favours prompts that are too easy or too
    hard; the sum over a sequence is divided by a constant, since dividing by its length favours
    short right answers and long wrong ones. The paper uses no KL.

    Args:
        advantage: from rewards to advantages.
        aggregation: from a loss per token to a number; None: `FixedLength` of
            `sampling.max_new_tokens`, the configured maximum.
        kl_coef: weight of the KL; 0 needs no reference.
        sampling: how responses are drawn.
        loop: the arguments of `GRPO`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = GroupCentered(),
        aggregation: Aggregation | None = None,
        kl_coef: float = 0.0,
        sampling: SamplingSettings = SamplingSettings(),
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            aggregation=aggregation or FixedLength(sampling.max_new_tokens),
            kl_coef=kl_coef,
            sampling=sampling,
            **loop,
        )
