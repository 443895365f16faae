"""Soft adaptive policy optimization."""

from typing import Any

from lit_rl.algorithms.grpo import GRPO
from lit_rl.policy_losses import SoftGate
from lit_rl.policy_losses.base import PolicyLoss


class SAPO(GRPO):
    """Soft adaptive policy optimization (arXiv:2511.20347): a smooth gate in place of the clip.

    The gate closes faster for tokens with a negative advantage.

    Args:
        policy_loss: from log-probs and advantages to a loss per token.
        kl_coef: weight of the KL; 0 needs no reference.
        loop: the arguments of `GRPO`.
    """

    def __init__(
        self, policy_loss: PolicyLoss = SoftGate(), kl_coef: float = 0.0, **loop: Any
    ) -> None:
        super().__init__(policy_loss=policy_loss, kl_coef=kl_coef, **loop)
