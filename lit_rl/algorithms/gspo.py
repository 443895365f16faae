"""Group sequence policy optimization."""

from typing import Any

from lit_rl.algorithms.grpo import GRPO
from lit_rl.policy_losses import SequenceClipped
from lit_rl.policy_losses.base import PolicyLoss


class GSPO(GRPO):
    """Group sequence policy optimization (arXiv:2507.18071): one ratio per response.

    It is the geometric mean of the ratios of its tokens, clipped in a range that is much narrower.

    Args:
        policy_loss: from log-probs and advantages to a loss per token.
        kl_coef: weight of the KL; 0 needs no reference.
        loop: the arguments of `GRPO`.
    """

    def __init__(
        self, policy_loss: PolicyLoss = SequenceClipped(), kl_coef: float = 0.0, **loop: Any
    ) -> None:
        super().__init__(policy_loss=policy_loss, kl_coef=kl_coef, **loop)
