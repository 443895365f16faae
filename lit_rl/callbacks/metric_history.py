"""The first and the last values of some metrics of a run, to compare the present one with."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


class MetricHistory:
    """Remembers, of each of some metrics, the first and the last values that were numbers.

    Args:
        names: the metrics.
        num_first: how many of the first values are kept.
        num_last: how many of the last values are kept.

    Example:
        >>> history = MetricHistory(("reward/mean",), num_first=2, num_last=2)
        >>> for reward in (0.1, 0.3, float("nan"), 0.2, 0.6):
        ...     history.add({"reward/mean": reward})
        >>> history.first["reward/mean"], history.last["reward/mean"]
        ([0.1, 0.3], [0.2, 0.6])
    """

    def __init__(self, names: Sequence[str], *, num_first: int, num_last: int) -> None:
        self.num_first = num_first
        self.num_last = num_last
        self.first: dict[str, list[float]] = {name: [] for name in names}
        self.last: dict[str, list[float]] = {name: [] for name in names}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of an iteration; one that is missing or not finite is left out."""
        for name in self.first:
            value = metrics.get(name, math.nan)
            if math.isfinite(value):
                self.first[name] = [*self.first[name], value][: self.num_first]
                self.last[name] = [*self.last[name], value][-self.num_last :]

    def start(self, name: str) -> float:
        """Return the median of the first values; NaN until there are `num_first` of them."""
        first = self.first[name]
        return median(first) if len(first) == self.num_first else math.nan

    def usual(self, name: str) -> float:
        """Return the median of the last values; NaN until there are `num_last` of them."""
        last = self.last[name]
        return median(last) if len(last) == self.num_last else math.nan

    def has_risen(self, name: str) -> bool:
        """Return whether the mean of the newest values is above each of the first ones."""
        first, last = self.first[name], self.last[name][-self.num_first :]
        return bool(first) and sum(last) / len(last) > max(first)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, for a checkpoint."""
        return {"first": dict(self.first), "last": dict(self.last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the values of a checkpoint."""
        self.first |= state_dict["first"]
        self.last |= state_dict["last"]
