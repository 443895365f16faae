"""Numbers that are not finite: they take no optimizer step and reach no checkpoint."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lit_rl.functional import minimum_over_ranks
from lit_rl.types import Experience


def check_finite_weights(module: nn.Module) -> None:
    """Refuse trained weights that are NaN or infinite; every rank has to join.

    Raises:
        FloatingPointError: on every rank, with the name of the weight on the ranks that hold it.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    broken = next((name for name, p in trained.items() if not p.isfinite().all()), None)
    device = next(iter(trained.values())).device
    if not minimum_over_ranks(torch.tensor(float(broken is None), device=device)):
        raise FloatingPointError(
            f"the weights {broken or 'of another rank'} are not finite, so no checkpoint is "
            "written; those before it are whole. Lower the learning rate and go on from the last"
        )


def finite_on_all_ranks(loss: Float[Tensor, ""]) -> bool:
    """Return whether the loss is finite on every rank; every rank has to join."""
    return bool(minimum_over_ranks(loss.isfinite().float()))


def save_minibatch(trainer: L.Trainer, minibatch: Experience, where: str) -> Path:
    """Write the rows of this rank of a minibatch to the run folder; every rank has to join.

    `torch.load(path, weights_only=True)` returns the tensors of the experience by name.

    Args:
        trainer: gives the folder and the rank.
        minibatch: the rows.
        where: names the minibatch, as part of the name of the file.

    Returns:
        The file of this rank.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    path = folder / f"non-finite-{where}-rank{trainer.global_rank}.pt"
    entries: dict[str, Any] = {f.name: getattr(minibatch, f.name) for f in fields(minibatch)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {name: value.cpu() for name, value in entries.items() if isinstance(value, Tensor)}, path
    )
    return path
