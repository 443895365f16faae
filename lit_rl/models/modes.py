"""Training and evaluation mode of a module and all its submodules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, and give every submodule its own mode back at the end."""
    training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, flag in training.items():
            submodule.training = flag
