"""Reductions over the processes that train together; with one process they change nothing."""

import torch
from torch import Tensor, distributed


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; a collective that every rank has to join.

    Args:
        values: numbers of the same shape on every rank.

    Example:
        >>> sum_over_ranks(torch.tensor([1.0, 2.0]))  # one process
        tensor([1., 2.])
    """
    return _reduced(values, distributed.ReduceOp.SUM)


def minimum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise minimum over all ranks; a collective that every rank has to join.

    Args:
        values: numbers of the same shape on every rank.
    """
    return _reduced(values, distributed.ReduceOp.MIN)


def maximum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise maximum over all ranks; a collective that every rank has to join.

    Args:
        values: numbers of the same shape on every rank.
    """
    return _reduced(values, distributed.ReduceOp.MAX)


def _reduced(values: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
    total = values.detach().clone()
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(total, operation)
    return total


def gather_over_ranks(values: Tensor) -> Tensor:
    """Return the rows of all ranks, those of rank 0 first; every rank has to call it.

    Args:
        values: any number of rows of the same kind on every rank.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    length = torch.tensor(len(values), device=values.device)
    lengths = [torch.zeros_like(length) for _ in range(distributed.get_world_size())]
    distributed.all_gather(lengths, length)
    longest = int(torch.stack(lengths).max())
    padded = values.new_zeros(longest, *values.shape[1:])
    padded[: len(values)] = values
    rows = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(rows, padded)
    return torch.cat([part[:length] for part, length in zip(rows, lengths, strict=True)])
