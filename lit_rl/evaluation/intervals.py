"""How far a mean over prompts may be from the mean over all prompts of its kind."""

from jaxtyping import Num
from torch import Tensor

from lit_rl.evaluation.statistics import widest_float


def standard_error(values: Num[Tensor, " prompts"]) -> Tensor:
    """std(values) / sqrt(n), with the sample standard deviation (divides by n - 1).

    The prompts are taken as independent draws from the prompts of the task; the mean lies within
    two standard errors of the mean over all of them in about 95 of 100 cases. A single value tells
    nothing of the spread, and n equal values little: both give 0.

    Args:
        values: one number per prompt, in any unit.

    Returns:
        The standard error of their mean, in the unit of `values`, in float64; at least 0.

    Raises:
        ValueError: if there is no value.

    Example:
        >>> import torch
        >>> standard_error(torch.tensor([0.0, 0.0, 1.0, 1.0]))
        tensor(0.2887, dtype=torch.float64)
    """
    if not len(values):
        raise ValueError("no values: the standard error of a mean needs at least one prompt")
    values = values.to(widest_float(values.device))
    return values.var(correction=min(1, len(values) - 1)).div(len(values)).sqrt()
