"""PPO's estimator: exponentially weighted sums of what a critic did not expect."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import CriticEstimator, tokens_that_count
from lit_rl.advantages.return_to_go import check_discount, return_to_go
from lit_rl.advantages.whitening import whitened
from lit_rl.types import ScoredRollout, ValuedRollout


def gae(
    token_rewards: Float[Tensor, "rollouts tokens"],
    values: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " rollouts"],
    end_values: Float[Tensor, " rollouts"] | None = None,
) -> Float[Tensor, "rollouts tokens"]:
    """A_t = delta_t + gamma * lam * A_(t+1), with delta_t = r_t + gamma * V_(t+1) - V_t.

    Generalized advantage estimation, arXiv:1506.02438, equation 16, as a recursion from the last
    token that counts, behind which the advantage is 0 and the value `end_values`. A token that does
    not count, inside a response too, is not there: t + 1 is the next token that counts, and neither
    reward nor value at the others is read. Linear in the number of tokens.

    lam = 0 gives the error of each value against the next one, delta_t; lam = 1 the return to go
    less the value.

    Args:
        token_rewards: reward of each token.
        values: value of the state before each token, in the unit of the rewards.
        mask: True where a token counts.
        gamma: discount per token, in [0, 1].
        lam: how much later errors count, in [0, 1]; one number, or one per rollout.
        end_values: value of the state behind the last token of each rollout that counts; None: 0,
            every rollout ended there.

    Returns:
        Advantages in the unit of the rewards; 0 where the mask is False.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]])
        >>> gae(rewards, values, torch.tensor([[True, True, False]]), gamma=1.0, lam=0.95)
        tensor([[0.9500, 1.0000, 0.0000]])
    """
    if end_values is None:
        end_values = values.new_zeros(len(values))
    errors = token_rewards + gamma * _next_values(values, end_values, mask) - values
    return return_to_go(errors, mask, gamma=gamma * lam)


def _next_values(
    values: Float[Tensor, "rollouts tokens"],
    end_values: Float[Tensor, " rollouts"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """Return the value at the next token that counts, and the end value where there is none."""
    width = mask.shape[1]
    columns = torch.arange(width, device=mask.device).where(mask, width)
    here_or_later = columns.flip(1).cummin(1).values.flip(1)
    end = torch.full_like(columns[:, :1], width)
    later = torch.cat([here_or_later[:, 1:], end], dim=1)
    return torch.cat([values, end_values[:, None]], dim=1).gather(1, later)


@dataclass(frozen=True)
class GAE(CriticEstimator):
    """`gae`, whitened for the policy; for the critic, the advantages plus the values.

    A response has ended where it is `finished`. One that was cut off has not: with
    `bootstrap_truncated` the value behind its last token stands for what it would still have
    earned; without, it is taken to have ended there, too. The padded width says nothing about
    either.

    Args:
        gamma: discount per token, in [0, 1].
        lam: how much later errors count in the policy's advantages, in [0, 1].
        critic_lam: the same for the targets of the critic (decoupled GAE, arXiv:2504.05118; 1.0
            there, which makes them returns to go); None: as for the policy.
        length_adaptive: alpha of arXiv:2504.05118 (Length-Adaptive GAE; 0.05 there), above 0. The
            policy's lambda is then 1 - 1 / (alpha * length), or 0 where that is negative, with the
            length in tokens that count, and `lam` is not read; None: `lam` for every length.
        bootstrap_truncated: whether a response that was cut off goes on with its end value.
        whiten: whether the policy's advantages are whitened over all tokens of all ranks.
    """

    gamma: float = 1.0
    lam: float = 0.95
    critic_lam: float | None = None
    length_adaptive: float | None = None
    bootstrap_truncated: bool = False
    whiten: bool = True

    def __post_init__(self) -> None:
        check_discount("gamma", self.gamma)
        check_discount("lam", self.lam)
        if self.critic_lam is not None:
            check_discount("critic_lam", self.critic_lam)
        if self.length_adaptive is not None and not self.length_adaptive > 0:
            raise ValueError(
                f"length_adaptive must be above 0, for example 0.05, not {self.length_adaptive}; "
                "null for the same lambda at every length"
            )

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `gae`, whitened unless that is switched off: then in the unit of the rewards."""
        assert isinstance(scored, ValuedRollout)
        advantages = self._gae(scored, self._policy_lam(scored))
        return whitened(advantages, tokens_that_count(scored)) if self.whiten else advantages

    def returns(self, scored: ValuedRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `gae` with the critic's lambda plus the values, in the unit of the rewards."""
        lam = self._policy_lam(scored) if self.critic_lam is None else self.critic_lam
        targets = self._gae(scored, lam) + scored.values
        return torch.where(tokens_that_count(scored), targets, 0.0)

    def _policy_lam(self, scored: ValuedRollout) -> float | Tensor:
        if self.length_adaptive is None:
            return self.lam
        lengths = tokens_that_count(scored).sum(1).clamp(min=1).to(scored.token_rewards)
        return (1 - 1 / (self.length_adaptive * lengths)).clamp(min=0)

    def _gae(self, scored: ValuedRollout, lam: float | Tensor) -> Tensor:
        goes_on = ~scored.finished & self.bootstrap_truncated
        return gae(
            scored.token_rewards,
            scored.values,
            tokens_that_count(scored),
            gamma=self.gamma,
            lam=lam,
            end_values=torch.where(goes_on, scored.end_values, 0.0),
        )
