"""Passes that need more memory than there is."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

MESSAGES = ("out of memory", "can't allocate memory")
"""What accelerators and the allocator of the CPU say."""

Result = TypeVar("Result")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"))
        True
        >>> is_out_of_memory(RuntimeError("shapes differ"))
        False
    """
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(part in text for part in MESSAGES)


def with_less_memory(
    passes: Callable[[Sequence[Tensor]], Result],
    groups: Callable[[], Sequence[Tensor]],
    split: Callable[[int], None],
    *,
    alone: bool,
) -> Result:
    """Return what the passes over groups of rows give; from the start with less where memory ends.

    Args:
        passes: goes over the groups.
        groups: returns the groups, by the budget of now.
        split: lowers the budget until there are more than so many groups, and forgets what the
            passes that failed have left.
        alone: whether there are no other ranks, which would wait for the passes that failed, and no
            gradient in parts, which such passes leave behind.

    Raises:
        RuntimeError: if every group is a single row, or it is not `alone`.
    """
    while True:
        current = groups()
        try:
            return passes(current)
        except RuntimeError as error:
            if not is_out_of_memory(error) or all(len(group) == 1 for group in current):
                raise
            if not alone:
                raise RuntimeError(
                    "memory ran out in a micro-batch, which cannot be repeated under a strategy "
                    "for several devices: go on from the last checkpoint with half of "
                    "micro_batch_tokens, which changes no result"
                ) from error
        split(len(current))  # not in the handler, which holds the memory of the passes
