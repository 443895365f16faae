"""What manual optimization leaves to the module: schedules, clipping, ranks, resumed settings."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from lightning.pytorch.strategies import (
    DDPStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

STRATEGIES: dict[str, type[Strategy]] = {"auto": SingleDeviceStrategy, "ddp": DDPStrategy}
"""The strategies with which the loop is right, by their names; ddp_spawn is a kind of ddp.

With each of them every rank holds all weights, whole.
"""

PRECISIONS = {"bf16-mixed": "bf16", "32-true": "32"}
"""The precisions with which it is, and Lightning's short names of them."""


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse the settings of a Trainer with which the loop would be wrong.

    Raises:
        ValueError: for a strategy or precision that is not supported, with one that is.
    """
    check_strategy(trainer.strategy)
    check_precision(trainer.precision)


def check_strategy(strategy: str | Strategy) -> None:
    """Raise a ValueError unless `STRATEGIES` has a strategy, given itself or by its name."""
    if isinstance(strategy, str):
        name, supported = strategy, strategy.startswith(tuple(STRATEGIES))
    else:  # Lightning derives DeepSpeed's strategy from that of DDP
        name, supported = type(strategy).__name__, type(strategy) in STRATEGIES.values()
    if not supported:
        raise ValueError(
            f"trainer.strategy {name} is not supported: gradients and generation need its own "
            "adapter. Use --trainer.strategy auto (one device) or ddp"
        )


def check_precision(precision: str | int | None) -> None:
    """Raise a ValueError unless `PRECISIONS` has a precision; None is Lightning's default."""
    if precision is not None and str(precision) not in {*PRECISIONS, *PRECISIONS.values()}:
        raise ValueError(
            f"trainer.precision {precision} is not supported: float16 needs a loss scale that "
            "clipping would not see, and the format of the weights is that of the source "
            f"(--model.source.dtype). Use --trainer.precision {' or '.join(PRECISIONS)}"
        )


@contextmanager
def accumulate(trainer: L.Trainer, *, last: bool) -> Iterator[None]:
    """Let gradients add up on each rank, and reduce them over ranks only in the last pass."""
    if last or not isinstance(trainer.strategy, ParallelStrategy):
        yield
    else:
        with trainer.strategy.block_backward_sync():
            yield


def left_out(parameters: Iterable[nn.Parameter], trainer: L.Trainer) -> Float[Tensor, ""]:
    """Return a 0 to add to a loss that parameters take no part in.

    Data parallel ranks wait for the gradient of every parameter: there, theirs is 0. On one device
    they have none.
    """
    if not isinstance(trainer.strategy, ParallelStrategy):
        return torch.zeros(())
    return 0.0 * torch.stack([p.sum() for p in parameters if p.requires_grad]).sum()


def clip_grad_norms(optimizer: Optimizer, max_grad_norm: float | None) -> dict[str, float]:
    """Scale the gradient of each parameter group to a norm of at most `max_grad_norm`.

    Groups are clipped apart, so that a critic far from its targets does not shrink the step of the
    actor.

    Args:
        optimizer: its parameters hold the gradient; its groups have a `name`.
        max_grad_norm: the limit; None clips nothing.

    Returns:
        The norm of each group before clipping, by its name; where one is not finite, a step would
        destroy the weights.
    """
    limit = math.inf if max_grad_norm is None else max_grad_norm
    return {
        group["name"]: float(torch.nn.utils.clip_grad_norm_(group["params"], limit))
        for group in optimizer.param_groups
    }


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_hyperparameters(
    optimizer: Optimizer, scheduler: LambdaLR, configured: list[dict[str, Any]]
) -> None:
    """Put the configured settings back over those that a checkpoint brought.

    A checkpoint holds the learning rate and the betas of the run that wrote it. The moments stay;
    the settings are those of the configuration, at the position of `scheduler`.
    """
    scheduler.base_lrs = [group["initial_lr"] for group in configured]
    for group, settings, schedule in zip(
        optimizer.param_groups, configured, scheduler.lr_lambdas, strict=True
    ):
        group.update(settings)
        group["lr"] = settings["initial_lr"] * schedule(scheduler.last_epoch)
