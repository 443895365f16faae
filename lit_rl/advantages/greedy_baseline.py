"""ReMax's estimator: the return to go less the reward of a baseline response."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.return_to_go import return_to_go
from lit_rl.types import BaselinedRollout, ScoredRollout


def greedy_baseline(
    token_rewards: Float[Tensor, "rollouts tokens"],
    baseline_rewards: Float[Tensor, " rollouts"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """A_t = sum of r_s over the tokens s >= t - b.

    ReMax, arXiv:2310.10505: b is the reward of the response to the same prompt that takes the
    likeliest token at every step. It does not depend on the sampled tokens, so it leaves the
    expected gradient as it is. The returns are those of `return_to_go`, undiscounted.

    Args:
        token_rewards: reward of each token.
        baseline_rewards: reward of the baseline response to the prompt of each rollout.
        mask: True where a token counts.

    Returns:
        Advantages in the unit of the rewards; 0 where the mask is False.

    Example:
        >>> rewards, mask = torch.tensor([[0.5, 1.0, 0.0]]), torch.tensor([[True, True, False]])
        >>> greedy_baseline(rewards, torch.tensor([1.0]), mask)
        tensor([[0.5000, 0.0000, 0.0000]])
    """
    returns = return_to_go(token_rewards, mask, gamma=1.0)
    return torch.where(mask, returns - baseline_rewards[:, None], 0.0)


@dataclass(frozen=True)
class GreedyBaseline(AdvantageEstimator):
    """`greedy_baseline` of a rollout beside its baseline responses."""

    reads: ClassVar[type[ScoredRollout]] = BaselinedRollout

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `greedy_baseline`."""
        assert isinstance(scored, BaselinedRollout)
        mask = tokens_that_count(scored)
        return greedy_baseline(scored.token_rewards, scored.baseline_rewards, mask)
