"""1 for a response of a wanted length."""

from dataclasses import dataclass

from lit_rl.rewards.base import Reward
from lit_rl.types import Rollout


@dataclass(frozen=True)
class Length(Reward):
    """1 where a response has `minimum` to `maximum` tokens; outside it falls linearly.

    With n tokens, the end token included: n / minimum below the range, and
    max(0, 2 - n / maximum) above it, which is 0 from twice the maximum on.

    Args:
        maximum: length of the longest response with value 1, in tokens.
        minimum: length of the shortest response with value 1, in tokens.

    Raises:
        ValueError: unless 1 <= minimum <= maximum.
    """

    maximum: int
    minimum: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"minimum is {self.minimum} and maximum is {self.maximum} tokens; "
                "they must satisfy 1 <= minimum <= maximum, such as 1 and 64"
            )

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return a number in [0, 1] per response."""
        return [self._value(length) for length in rollout.mask.sum(dim=1).tolist()]

    def _value(self, length: int) -> float:
        return max(0.0, min(1.0, length / self.minimum, 2 - length / self.maximum))
