"""Gradient norms, and their limit, for each parameter group apart."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ROUNDING = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""


def clip_grad_norms(optimizer: Optimizer, max_grad_norm: float | None) -> dict[str, float]:
    """Scale the gradient of each parameter group to a norm of at most `max_grad_norm`.

    Groups are clipped apart, so that a critic far from its targets does not shrink the step of the
    actor. A gradient that is sharded over ranks counts as a whole.

    Args:
        optimizer: its parameters hold the gradient; its groups have a `name`.
        max_grad_norm: the limit; None clips nothing.

    Returns:
        The norm of each group before clipping, by its name; where one is not finite, a step would
        destroy the weights.
    """
    limit = math.inf if max_grad_norm is None else max_grad_norm
    norms = {}
    for group in optimizer.param_groups:
        norm: Tensor = torch.nn.utils.clip_grad_norm_(group["params"], limit)
        norms[group["name"]] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms


def let_rest(optimizer: Optimizer, names: frozenset[str]) -> None:
    """Take the gradient from the groups of the given names: a step then leaves them as they are."""
    for group in optimizer.param_groups:
        if group["name"] in names:
            for parameter in group["params"]:
                parameter.grad = None
