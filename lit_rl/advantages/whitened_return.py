"""REINFORCE++'s estimator: the discounted return to go, whitened over the batch."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.return_to_go import check_discount, return_to_go
from lit_rl.advantages.whitening import whitened
from lit_rl.types import ScoredRollout


def whitened_return(
    token_rewards: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    gamma: float,
) -> Float[Tensor, "rollouts tokens"]:
    """A_t = (G_t - mean(G)) / std(G), with G_t = r_t + gamma * G_(t+1).

    REINFORCE++, arXiv:2501.03262 (global advantage normalization). Mean and sample standard
    deviation are over all tokens that count, on all ranks, see `whitened`; the returns are those of
    `return_to_go`. Equal returns give exactly 0.

    Args:
        token_rewards: reward of each token, a KL in the reward already deducted.
        mask: True where a token counts.
        gamma: discount per token, in [0, 1].

    Returns:
        Advantages without a unit, with mean 0 over the tokens of all ranks; 0 where the mask is
        False.

    Example:
        >>> import torch
        >>> rewards, mask = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> whitened_return(rewards, mask.bool(), gamma=1.0)  # returns 3, 3 and 1
        tensor([[ 0.5774,  0.5774],
                [-1.1547,  0.0000]])
    """
    return whitened(return_to_go(token_rewards, mask, gamma=gamma), mask)


@dataclass(frozen=True)
class WhitenedReturn(AdvantageEstimator):
    """`whitened_return` of the token rewards.

    Args:
        gamma: discount per token, in [0, 1].
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_discount("gamma", self.gamma)

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `whitened_return`."""
        return whitened_return(scored.token_rewards, tokens_that_count(scored), gamma=self.gamma)
