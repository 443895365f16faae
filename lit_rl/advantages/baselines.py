"""Baselines of REINFORCE: one number that is deducted from every return of an iteration."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import masked_sum, sum_over_ranks


class Baseline(ABC):
    """From the returns of an iteration, or of those before it, to one number.

    It is taken over all ranks, so every rank calls it, with tokens or without. Only `observe` and
    `load_state_dict` change what it remembers.
    """

    @abstractmethod
    def __call__(
        self, returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> Float[Tensor, ""]:
        """Return the baseline, in the unit of the returns.

        Args:
            returns: return to go of each token of this iteration; zero where the mask is False.
            mask: True where a token counts.
        """

    def observe(
        self, returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> None:
        """Take in the returns of an iteration after its advantages are known; default: nothing."""
        return

    def state_dict(self) -> dict[str, float]:
        """Return what `observe` has remembered, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put back what `state_dict` returned."""
        return


def sum_and_count(
    returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
) -> Float[Tensor, "2"]:
    """Return the sum of the returns of all tokens that count on all ranks, and their number.

    Args:
        returns: return to go of each token.
        mask: True where a token counts.
    """
    return sum_over_ranks(torch.stack([masked_sum(returns, mask), mask.sum().to(returns)]))


@dataclass(frozen=True)
class BatchMean(Baseline):
    """The mean return of all tokens of this iteration, on all ranks.

    Every token counts alike, as it does in a token mean of the loss, so the advantages of an
    iteration sum to 0. A return is part of its own baseline: with one token in each of n responses
    the expected gradient is (n - 1) / n of that without a baseline. Without tokens it is 0.
    """

    def __call__(
        self, returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> Float[Tensor, ""]:
        """Return the mean over the tokens that count."""
        total, count = sum_and_count(returns, mask).unbind()
        return total / count.clamp(min=1)


@dataclass(eq=False)
class MovingAverage(Baseline):
    """An average of the mean returns of earlier iterations, whose weights fall exponentially.

    average = decay * average + (1 - decay) * mean return of the iteration's tokens

    The first mean is the first average. The baseline of an iteration comes from those before it
    alone, so it leaves the expected gradient as it is; in the first iteration it is 0. An iteration
    in which no token counts leaves the average as it is.

    It remembers, so every algorithm needs one of its own.

    Args:
        decay: share of the average that an iteration leaves, in [0, 1).

    Raises:
        ValueError: if `decay` is outside [0, 1).

    Example:
        >>> baseline, mask = MovingAverage(decay=0.75), torch.tensor([[True]])
        >>> for reward in (2.0, 4.0):
        ...     baseline.observe(torch.tensor([[reward]]), mask)
        >>> baseline(torch.tensor([[100.0]]), mask)
        tensor(2.5000)
    """

    decay: float = 0.9
    average: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), for example 0.9, not {self.decay}")

    def __call__(
        self, returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> Float[Tensor, ""]:
        """Return the average over earlier iterations, whatever the returns of this one."""
        return returns.new_tensor(0.0 if self.average is None else self.average)

    def observe(
        self, returns: Float[Tensor, "rollouts tokens"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> None:
        """Take the mean return of this iteration into the average."""
        total, count = sum_and_count(returns, mask).tolist()
        if count:
            mean = total / count
            old = mean if self.average is None else self.average
            self.average = self.decay * old + (1 - self.decay) * mean

    def state_dict(self) -> dict[str, float]:
        """Return the average; nothing before the first iteration."""
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put the average back."""
        self.average = state.get("average")
