"""Sums, means and variances over the positions that count.

A mask is True where a position counts. What stands elsewhere, NaN and infinity included, changes no
result and gets a gradient of exactly zero: `torch.where` takes it out before any arithmetic,
because a product with zero would keep a NaN.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional.ranks import gather_over_ranks, minimum_over_ranks, sum_over_ranks


def masked_sum(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    dim: int | None = None,
    *,
    keepdim: bool = False,
) -> Float[Tensor, "..."]:
    """sum_i mask_i * values_i.

    An empty mask gives 0.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        dim: the axis to sum over; None: all of them.
        keepdim: keep the summed axes with length 1.

    Returns:
        The sum, in the unit of `values`.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(3.)
    """
    return torch.where(mask, values, 0.0).sum(dim=dim, keepdim=keepdim)


def masked_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    dim: int | None = None,
    *,
    keepdim: bool = False,
) -> Float[Tensor, "..."]:
    """sum_i mask_i * values_i / sum_i mask_i.

    An empty mask gives 0.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        dim: the axis to average over; None: all of them.
        keepdim: keep the averaged axes with length 1.

    Returns:
        The mean, in the unit of `values`.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    count = mask.sum(dim=dim, keepdim=keepdim).clamp(min=1)
    return masked_sum(values, mask, dim, keepdim=keepdim) / count


def masked_centered(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "*shape"]:
    """values_i - mean(values), over the positions that count.

    Values that are all equal give exactly 0. The floating-point mean of [0.1, 0.1, 0.1] is not 0.1,
    so the values are first measured from the smallest of them, which the mean cancels again.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        dim: the axis to average over; None: all of them.

    Returns:
        Distances from the mean, in the unit of `values`; they sum to 0; 0 where the mask is False.

    Example:
        >>> masked_centered(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False]))
        tensor([-0.5000,  0.5000,  0.0000])
    """
    axes = () if dim is None else (dim,)
    smallest = torch.where(mask, values.detach(), torch.inf).amin(dim=axes, keepdim=True)
    shifted = torch.where(mask, values - smallest, 0.0)
    return torch.where(mask, shifted - masked_mean(shifted, mask, dim, keepdim=True), 0.0)


def masked_variance(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    unbiased: bool,
    dim: int | None = None,
) -> Float[Tensor, "..."]:
    """sum_i mask_i * (values_i - mean(values))^2 / (n - 1 if unbiased else n), n = sum_i mask_i.

    Zero or one value has variance 0, whichever the divisor.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        unbiased: True divides by n - 1 (sample variance), False by n (population variance).
        dim: the axis to reduce; None: all of them.

    Returns:
        The variance, at least 0, in the squared unit of `values`.

    Example:
        >>> values, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0]).bool()
        >>> masked_variance(values, mask, unbiased=True)
        tensor(1.)
        >>> masked_variance(values, mask, unbiased=False)
        tensor(0.6667)
    """
    squares = masked_centered(values, mask, dim).square()
    count = mask.sum(dim=dim)
    return squares.sum(dim=dim) / (count - int(unbiased)).clamp(min=1)


def masked_whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    unbiased: bool,
    epsilon: float,
    epsilon_inside_sqrt: bool,
) -> Float[Tensor, "*shape"]:
    """(values_i - mean(values)) / std(values), over all positions that count, on all ranks.

    std = sqrt(variance + epsilon) if epsilon_inside_sqrt else sqrt(variance) + epsilon. The mean is
    always taken away and not added back. Zero or one value, and equal values, give exactly 0. The
    statistics carry no gradient. Every rank has to call it, with values or without.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        unbiased: True divides the variance by n - 1, False by n.
        epsilon: keeps the quotient finite; in the unit of the variance if it stands inside the
            root, in that of `values` otherwise.
        epsilon_inside_sqrt: where `epsilon` is added.

    Returns:
        Numbers without a unit, with mean 0 over all ranks; 0 where the mask is False.

    Raises:
        ValueError: if `epsilon` is not above 0.

    Example:
        >>> values, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0]).bool()
        >>> masked_whiten(values, mask, unbiased=False, epsilon=1e-8, epsilon_inside_sqrt=True)
        tensor([-1.2247,  0.0000,  1.2247,  0.0000])
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, for example 1e-8, not {epsilon}")
    # Measured from the smallest value of all ranks, so that equal values give exactly 0.
    smallest = minimum_over_ranks(torch.where(mask, values, torch.inf).min())
    shifted = torch.where(mask, values - smallest, 0.0)
    count, total = sum_over_ranks(torch.stack([mask.sum().to(values), shifted.sum()])).unbind()
    centered = torch.where(mask, shifted - total / count.clamp(min=1), 0.0)
    squares = sum_over_ranks(centered.square().sum())
    variance = squares / (count - int(unbiased)).clamp(min=1)
    std = (variance + epsilon).sqrt() if epsilon_inside_sqrt else variance.sqrt() + epsilon
    return centered / std


def top_fraction(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], fraction: float
) -> Bool[Tensor, "*shape"]:
    """Return which of the positions that count hold the highest values, over all ranks.

    With n positions on all ranks, those at least as high as the ceil(fraction * n)-th highest: a
    few more where values are equal. Every rank has to call it, with values or without.

    Args:
        values: any numbers, in any unit.
        mask: True where a value counts.
        fraction: the share that is chosen, in (0, 1].

    Returns:
        True where a value is chosen; False where the mask is False.

    Example:
        >>> values, mask = torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.tensor([1, 1, 1, 0]).bool()
        >>> top_fraction(values, mask, fraction=0.5)
        tensor([ True, False,  True, False])
    """
    highest = gather_over_ranks(values[mask]).sort(descending=True).values
    if not len(highest):
        return mask
    lowest_chosen = highest[math.ceil(fraction * len(highest)) - 1]
    return mask.logical_and(values >= lowest_chosen)
