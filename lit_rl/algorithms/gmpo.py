"""Geometric-mean policy optimization."""

from typing import Any

from lit_rl.algorithms.grpo import GRPO
from lit_rl.policy_losses import GeometricMeanClipped
from lit_rl.policy_losses.base import PolicyLoss


class GMPO(GRPO):
    """Geometric-mean policy optimization (arXiv:2507.20673): no single token dominates.

    The ratios of a response are clipped one by one and averaged in log space.

    Args:
        policy_loss: from log-probs and advantages to a loss per token.
        kl_coef: weight of the KL; 0 needs no reference.
        loop: the arguments of `GRPO`.
    """

    def __init__(
        self, policy_loss: PolicyLoss = GeometricMeanClipped(), kl_coef: float = 0.0, **loop: Any
    ) -> None:
        super().__init__(policy_loss=policy_loss, kl_coef=kl_coef, **loop)
