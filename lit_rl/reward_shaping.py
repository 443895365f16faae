"""What is done to the reward of a response before its advantage is estimated, in training only.

Held-out measures and the metrics `reward/` are of the reward as it was given.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rl.types import ScoredRollout


class RewardShaping(ABC):
    """From a scored rollout to the same rollout with other rewards.

    A subclass is a frozen dataclass of its hyper-parameters.
    """

    @abstractmethod
    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with its new rewards: `rewards` and `token_rewards` agree.

        A row that is `missing` keeps its reward of 0.
        """


@dataclass(frozen=True)
class ScaleReward(RewardShaping):
    """reward = factor * reward, of every token and every step alike.

    An estimator that divides by the standard deviation of the rewards undoes it.

    Args:
        factor: above 0.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}, must be above 0 and finite, such as 0.1")

    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with `rewards`, `token_rewards` and `step_rewards` scaled."""
        return replace(
            scored,
            rewards=self.factor * scored.rewards,
            token_rewards=self.factor * scored.token_rewards,
            step_rewards=self.factor * scored.step_rewards,
        )


@dataclass(frozen=True)
class ClipReward(RewardShaping):
    """reward = min(max(reward, minimum), maximum), of the response as a whole.

    Values of steps stay; the last token earns the difference.

    Args:
        minimum: lowest reward, in reward units; -inf for no limit.
        maximum: highest reward, in reward units, above the lowest; inf for no limit.
    """

    minimum: float
    maximum: float

    def __post_init__(self) -> None:
        if not self.minimum < self.maximum:
            raise ValueError(
                f"minimum is {self.minimum} and maximum is {self.maximum}; the minimum must be "
                "below the maximum, such as -5.0 and 5.0"
            )

    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with clipped `rewards`."""
        return scored.with_rewards(scored.rewards.clamp(self.minimum, self.maximum))


@dataclass(frozen=True)
class MissingEndPenalty(RewardShaping):
    """reward = reward - penalty where nothing ended the response before the limit of tokens.

    An end token and a stop string of the run end a response alike. The penalty is subtracted from
    the reward and does not replace it. The last token earns it.

    Args:
        penalty: above 0, in reward units.
    """

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ValueError(f"penalty is {self.penalty}, must be above 0 and finite, such as 1.0")

    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with lower `rewards` of its truncated responses."""
        lower = scored.rewards - self.penalty
        return scored.with_rewards(torch.where(scored.finished, scored.rewards, lower))


def soft_overlong_punishment(
    lengths: Int[Tensor, " rollouts"], *, max_tokens: int, cache_tokens: int
) -> Float[Tensor, " rollouts"]:
    """soft_overlong_punishment = clip((max_tokens - cache_tokens - length) / cache_tokens, -1, 0).

    0 up to max_tokens - cache_tokens, then falling linearly to -1 at max_tokens, and -1 beyond it.
    DAPO, arXiv:2503.14476, equation 13, with L_max and L_cache.

    Args:
        lengths: of the responses, in tokens.
        max_tokens: the length from which the punishment is whole, in tokens.
        cache_tokens: over how many tokens before it the punishment grows, in 1 to max_tokens.

    Returns:
        What is added to the reward of each response, in [-1, 0], in reward units.

    Example:
        >>> lengths = torch.tensor([80, 85, 90, 100, 120])
        >>> soft_overlong_punishment(lengths, max_tokens=100, cache_tokens=20)
        tensor([ 0.0000, -0.2500, -0.5000, -1.0000, -1.0000])
    """
    return ((max_tokens - cache_tokens - lengths) / cache_tokens).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class SoftOverlongPunishment(RewardShaping):
    """Adds `soft_overlong_punishment` to the rewards; the last token earns it.

    The length of a response is the number of its tokens that count, the end token included.

    Args:
        max_tokens: the length from which the punishment is whole, in tokens; usually the largest
            number of new tokens that is sampled.
        cache_tokens: over how many tokens before it the punishment grows, in 1 to max_tokens.
    """

    max_tokens: int
    cache_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.cache_tokens <= self.max_tokens:
            raise ValueError(
                f"cache_tokens is {self.cache_tokens} and max_tokens is {self.max_tokens}; they "
                "must satisfy 1 <= cache_tokens <= max_tokens, such as 4096 and 20480"
            )

    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with lower `rewards` of its long responses."""
        punishment = soft_overlong_punishment(
            scored.mask.sum(1), max_tokens=self.max_tokens, cache_tokens=self.cache_tokens
        )
        return scored.with_rewards(scored.rewards + punishment)
