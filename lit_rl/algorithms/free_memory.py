"""Memory that the process holds but does not use."""

import ctypes
import sys
from functools import cache
from typing import Any


def return_free_memory() -> None:
    """Give the system back what is free on the heap of the process.

    The C library of Linux keeps the memory of freed tensors, in pieces between others: good for
    whoever asks for such pieces again, as each iteration does, but not where memory ran out and the
    next pieces are smaller. Nothing on other systems, and nothing on accelerators.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
