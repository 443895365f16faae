"""Count, mean, spread and extremes of named quantities, exact over batches and ranks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most precise floating point type of a device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Summary(NamedTuple):
    """What is known of one quantity. NaN where no value was seen.

    Attributes:
        num_values: number of values: the denominator of the mean.
        total: their sum: the numerator of the mean.
        std: sample standard deviation; 0 for a single value.
        minimum: the smallest value.
        maximum: the largest value.
    """

    num_values: int
    total: float
    std: float
    minimum: float
    maximum: float

    @property
    def mean(self) -> float:
        """`total / num_values`."""
        return self.total / self.num_values if self.num_values else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean of independent values, `std / sqrt(num_values)`."""
        return self.std / math.sqrt(self.num_values) if self.num_values else math.nan


class Statistics(Metric):
    """A torchmetric that summarises several named quantities at once.

    Counts, sums and sums of squares are added over updates and ranks, so how the values are cut
    into batches changes nothing. A synchronisation costs the same however many names there are.

    Args:
        names: the quantities; the same, in the same order, on every rank.
        device: where the values are.

    Example:
        >>> statistics = Statistics(("reward",), torch.device("cpu"))
        >>> statistics.update("reward", torch.tensor([1.0, 3.0]))
        >>> statistics.compute()["reward"].mean
        2.0
    """

    full_state_update = False
    count: Tensor
    total: Tensor
    squares: Tensor
    minimum: Tensor
    maximum: Tensor

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        super().__init__()
        self.names = names
        zeros = torch.zeros(len(names), dtype=widest_float(device))
        self.add_state("count", zeros, dist_reduce_fx="sum")
        self.add_state("total", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("squares", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("minimum", torch.full_like(zeros, math.inf), dist_reduce_fx="min")
        self.add_state("maximum", torch.full_like(zeros, -math.inf), dist_reduce_fx="max")
        self.to(device)

    @property
    def update_called(self) -> bool:
        """True: torchmetrics warns of a metric without values, but that has a summary here."""
        return True

    def update(self, name: str, values: Tensor) -> None:
        """Take in values of one quantity.

        Args:
            name: one of `names`.
            values: any number of them, in any shape. A NaN is kept and shows in the result.
        """
        index = self.names.index(name)
        values = values.detach().flatten().to(self.total)
        if not len(values):
            return
        self.count[index] += len(values)
        self.total[index] += values.sum()
        self.squares[index] += values.square().sum()
        self.minimum[index] = torch.minimum(self.minimum[index], values.min())
        self.maximum[index] = torch.maximum(self.maximum[index], values.max())

    def compute(self) -> dict[str, Summary]:
        """Return the summary of each quantity, over all ranks."""
        states = (self.count, self.total, self.squares, self.minimum, self.maximum)
        columns = torch.stack(states, dim=1).tolist()
        return {name: _summary(*column) for name, column in zip(self.names, columns, strict=True)}


def _summary(count: float, total: float, squares: float, minimum: float, maximum: float) -> Summary:
    if not count:
        return Summary(0, 0.0, math.nan, math.nan, math.nan)
    # Rounding may leave a tiny negative number where all values are equal.
    deviations = max(squares - total * total / count, 0.0) if minimum != maximum else 0.0
    std = math.sqrt(deviations / (count - 1)) if count > 1 else 0.0
    return Summary(int(count), total, std, minimum, maximum)
