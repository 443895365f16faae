"""Policy gradients on the plain log-prob, without a ratio."""

from typing import Any

from lit_rl.advantages import ReturnToGo
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, TokenMean
from lit_rl.algorithms.old_log_probs import CurrentLogProbs, OldLogProbs
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.policy_losses import LogProbSurrogate
from lit_rl.policy_losses.base import PolicyLoss


class Reinforce(PolicyGradient):
    """REINFORCE with return to go (Williams 1992, doi:10.1007/BF00992696).

    The log-prob of a token times what was earned from it on, less a baseline; one update per
    rollout, since the estimate is right for the policy that sampled.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number.
        old_log_probs: where the old log-probs come from; the loss reads none, so the update's own.
        group_size: responses per prompt; they are not compared, so 1 is right, too.
        loop: the arguments of `PolicyGradient`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = ReturnToGo(),
        policy_loss: PolicyLoss = LogProbSurrogate(),
        aggregation: Aggregation = TokenMean(),
        old_log_probs: OldLogProbs = CurrentLogProbs(),
        group_size: int = 1,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            old_log_probs=old_log_probs,
            group_size=group_size,
            **loop,
        )
