"""Products of large weights with few rows of states, in the order that CPUs multiply faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from jaxtyping import Float
from torch import Tensor, nn

FEW = range(2, 33)
"""Numbers of rows of states for which the order matters."""
LARGE = 2**16
"""Entries of a weight from which on it matters more than the call in Python."""


def weight_first(
    rows: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "rows outputs"]:
    """Return x @ W.T by way of W @ x.T.

    Args:
        rows: x.
        weight: W.
    """
    # What follows, such as the largest logit of each row, is faster for rows in one piece.
    return (weight @ rows.mT).mT.contiguous()


@contextmanager
def weights_first(model: nn.Module) -> Iterator[None]:
    """Compute W @ x.T in place of x @ W.T in the linear layers of a model meanwhile.

    The result is the same up to rounding. MKL is faster in this order with the few rows of a step
    of sampling, on some processors twice as fast; see `benchmarks/README.md`.

    Args:
        model: the model. Its large float32 weights on a CPU are concerned, with few rows, and
            none under autocast, which computes in another format. For passes without gradient.
    """
    layers = [] if torch.is_autocast_enabled("cpu") else [*filter(_gains, model.modules())]
    for layer in layers:
        vars(layer)["forward"] = MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _gains(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear  # a subclass may compute something else
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= LARGE
    )


def _forward(layer: nn.Linear, states: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
    rows = states.reshape(-1, layer.in_features)
    if len(rows) not in FEW:
        return nn.Linear.forward(layer, states)
    product = weight_first(rows, layer.weight)
    if layer.bias is not None:
        product += layer.bias
    return product.view(*states.shape[:-1], layer.out_features)
