"""Several rewards as one, with a name and a weight each."""

import math
from collections.abc import Collection

from lit_rl.rewards.base import Reward
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.steps import Scores, summed
from lit_rl.types import Rollout


class WeightedSum(Reward):
    """The sum over named parts of weight times value.

    A part that does not apply to a response adds nothing to it; where no part applies, or one
    failed, the response is missing. The weight of a process reward applies to its steps, and steps
    of several parts that end at the same token add up; the outcomes of the other parts are no
    steps. A part may itself be a `WeightedSum`: its parts become parts of this one, with the
    product of the weights.

    Args:
        parts: the rewards by the name under which they are logged.
        weights: a factor per name; 1 for a name that is not in it.

    Raises:
        ValueError: for no parts, for a weight of an unknown name or one that is not finite, and for
            parts of nested sums that share a name.
    """

    def __init__(self, parts: dict[str, Reward], weights: dict[str, float] | None = None) -> None:
        factors = dict.fromkeys(parts, 1.0) | (weights or {})
        if not parts or factors.keys() != parts.keys():
            raise ValueError(
                f"weights are given for {sorted(weights or {})}, but the parts are "
                f"{sorted(parts)}; an example is parts answer and format, weights answer: 1.0"
            )
        if not all(math.isfinite(factor) for factor in factors.values()):
            raise ValueError(f"weights {factors} must be finite numbers, such as 0.5")
        self.rewards: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
        for name, reward in parts.items():
            if isinstance(reward, WeightedSum):
                for inner, weight in reward.weights.items():
                    self._add(inner, reward.rewards[inner], factors[name] * weight)
            else:
                self._add(name, reward, factors[name])

    def _add(self, name: str, reward: Reward, weight: float) -> None:
        if name in self.rewards:
            raise ValueError(
                f"two parts are called {name!r}; the names of nested sums must differ, "
                f"such as {name}_2"
            )
        self.rewards[name], self.weights[name] = reward, weight

    def setup(self) -> None:
        """Let each part get ready."""
        for reward in self.rewards.values():
            reward.setup()

    def check_columns(self, names: Collection[str]) -> None:
        """Let each part refuse what it cannot read."""
        for reward in self.rewards.values():
            reward.check_columns(names)

    def teardown(self) -> None:
        """Let each part end what it has begun."""
        for reward in self.rewards.values():
            reward.teardown()

    @property
    def models(self) -> dict[str, str]:
        """Those of all parts."""
        return {
            name: weights
            for reward in self.rewards.values()
            for name, weights in reward.models.items()
        }

    @property
    def named_parts(self) -> dict[str, Reward]:
        """The parts."""
        return self.rewards

    def total(self, parts: dict[str, Scores]) -> Scores:
        """Return the weighted sum of the parts that apply."""
        return summed([part.weighted(self.weights[name]) for name, part in parts.items()])

    def values(self, rollout: Rollout) -> list[float | Failed | None]:
        """Return the weighted sum as a number, its steps added up; None where no part applies."""
        total = self.total(self.begin_parts(rollout)())
        failed = {row: Failed(reason) for row, reason in total.failures.items()}
        return [
            failed.get(row, None if math.isnan(value) else value)
            for row, value in enumerate(total.totals.tolist())
        ]
