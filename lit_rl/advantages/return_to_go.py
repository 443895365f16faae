"""REINFORCE's estimator: what the tokens from here on earned, less an optional baseline."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.baselines import Baseline
from lit_rl.types import ScoredRollout


def return_to_go(
    token_rewards: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    gamma: float | Float[Tensor, " rollouts"],
) -> Float[Tensor, "rollouts tokens"]:
    """G_t = r_t + gamma * G_(t+1), over the tokens that count.

    The discounted return of Sutton and Barto, Reinforcement Learning, 2nd edition, section 3.3, as
    REINFORCE uses it (section 13.3 there). Behind the last token that counts nothing is earned. A
    token that does not count, inside a response too, is not there: its reward is not read, and no
    discount is taken for it. Linear in the number of tokens.

    Args:
        token_rewards: reward of each token.
        mask: True where a token counts.
        gamma: discount per token, in [0, 1]; one number, or one per rollout.

    Returns:
        Returns in the unit of the rewards; 0 where the mask is False. With gamma = 1 the return of
        the first token is the reward of the response.

    Example:
        >>> rewards, mask = torch.tensor([[0.0, 0.0, 1.0, 7.0]]), torch.tensor([[1, 1, 1, 0]])
        >>> return_to_go(rewards, mask.bool(), gamma=0.9)
        tensor([[0.8100, 0.9000, 1.0000, 0.0000]])
    """
    rewards = torch.where(mask, token_rewards, 0.0)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return torch.where(mask, returns, 0.0)


def check_discount(name: str, value: float) -> None:
    """Refuse a discount, or a share like it, that is outside [0, 1].

    Args:
        name: what the error calls it.
        value: the number.

    Raises:
        ValueError: if the number is outside [0, 1].
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], for example 1.0, not {value}")


@dataclass(frozen=True)
class ReturnToGo(AdvantageEstimator):
    """`return_to_go` less a baseline, which is one number for all tokens of an iteration.

    Args:
        gamma: discount per token, in [0, 1].
        baseline: what is deducted from every return; None: nothing.
    """

    gamma: float = 1.0
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        check_discount("gamma", self.gamma)

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `return_to_go` less the baseline, in the unit of the rewards."""
        mask = tokens_that_count(scored)
        returns = return_to_go(scored.token_rewards, mask, gamma=self.gamma)
        if self.baseline is None:
            return returns
        return torch.where(mask, returns - self.baseline(returns, mask), 0.0)

    def observe(self, scored: ScoredRollout) -> None:
        """Show the returns to the baseline."""
        if self.baseline is not None:
            mask = tokens_that_count(scored)
            self.baseline.observe(return_to_go(scored.token_rewards, mask, gamma=self.gamma), mask)

    def state_dict(self) -> dict[str, float]:
        """Return what the baseline remembers."""
        return {} if self.baseline is None else self.baseline.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Give the baseline its memory back."""
        if self.baseline is not None:
            self.baseline.load_state_dict(state)
