"""Clipped importance sampling policy optimization."""

from typing import Any

from lit_rl.aggregations import Aggregation, TokenMean
from lit_rl.algorithms.grpo import GRPO
from lit_rl.policy_losses import ClippedWeight
from lit_rl.policy_losses.base import PolicyLoss


class CISPO(GRPO):
    """CISPO (MiniMax-M1, arXiv:2506.13585): every token keeps its gradient.

    The ratio, clipped and without gradient, weighs the log-prob; all tokens weigh the same.

    Args:
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number.
        kl_coef: weight of the KL; 0 needs no reference.
        loop: the arguments of `GRPO`.
    """

    def __init__(
        self,
        policy_loss: PolicyLoss = ClippedWeight(),
        aggregation: Aggregation = TokenMean(),
        kl_coef: float = 0.0,
        **loop: Any,
    ) -> None:
        super().__init__(policy_loss=policy_loss, aggregation=aggregation, kl_coef=kl_coef, **loop)
