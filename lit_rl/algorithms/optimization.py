"""The settings of a Trainer that are supported, and those of an optimizer that resumes."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.strategies import check_strategy

PRECISIONS = {"bf16-mixed": "bf16", "32-true": "32"}
"""The precisions with which the loop is right, and Lightning's short names of them."""


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse the settings of a Trainer with which the loop would be wrong.

    Raises:
        ValueError: for a strategy or precision that is not supported, with one that is, and for
            numbers of batches with which nothing is trained or validations are never due.
    """
    check_strategy(trainer.strategy)
    check_precision(trainer.precision)
    check_numbers_of_batches(trainer)


def check_precision(precision: str | int | None) -> None:
    """Raise a ValueError unless `PRECISIONS` has a precision; None is Lightning's default."""
    if precision is not None and str(precision) not in {*PRECISIONS, *PRECISIONS.values()}:
        raise ValueError(
            f"trainer.precision {precision} is not supported: float16 needs a loss scale that "
            "clipping would not see, and the format of the weights is that of the source "
            f"(--model.source.dtype). Use --trainer.precision {' or '.join(PRECISIONS)}"
        )


def check_numbers_of_batches(trainer: L.Trainer) -> None:
    """Refuse validations after every 0 iterations, and training on no batch.

    Raises:
        ValueError: naming the option, with a number that it takes.
    """
    interval = trainer.val_check_interval
    if interval == 0:
        raise ValueError(
            f"trainer.val_check_interval is {interval}, must be above 0, such as 10 for a "
            "validation after every 10 iterations; --trainer.limit_val_batches 0 runs none"
        )
    if trainer.state.fn == TrainerFn.FITTING and trainer.limit_train_batches == 0:
        raise ValueError(
            f"trainer.limit_train_batches is {trainer.limit_train_batches}, with which nothing is "
            "trained; it is the number of iterations of an epoch, such as 25"
        )


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_hyperparameters(
    optimizer: Any, scheduler: LambdaLR, configured: list[dict[str, Any]]
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
