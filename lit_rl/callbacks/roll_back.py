"""The way back, within a run, to what it was before something went wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.callbacks.iteration_checkpoint import IterationCheckpoint
from lit_rl.checkpoints import VerifiedCheckpointIO, verify
from lit_rl.strategies import parallelism_of


def check_roll_back(trainer: Trainer) -> None:
    """Refuse a run of which no earlier state could be restored.

    Raises:
        ValueError: with what is missing, if older checkpoints are not kept or not verified, or if
            the strategy writes them in shards.
    """
    if parallelism_of(trainer.strategy).saves_weights_itself:
        raise ValueError(
            f"action roll_back of HealthMonitor cannot restore the shards of "
            f"{type(trainer.strategy).__name__} within a run: use --trainer.strategy auto or ddp, "
            "or action stop, and go on from an earlier checkpoint with --ckpt_path"
        )
    if not _keepers(trainer):
        raise ValueError(
            "action roll_back of HealthMonitor needs checkpoints that are older than the newest: "
            "add lit_rl.callbacks.IterationCheckpoint with save_top_k -1, which keeps all of them"
        )
    if not isinstance(trainer.strategy.checkpoint_io, VerifiedCheckpointIO):
        raise ValueError(
            "action roll_back of HealthMonitor needs checkpoints that say whether they are whole: "
            "give the Trainer plugins=[lit_rl.checkpoints.VerifiedCheckpointIO()]"
        )


def roll_back(trainer: Trainer, module: Any, good_until: int) -> int | None:
    """Restore the newest whole checkpoint up to an iteration; on all ranks together.

    Weights, state of the optimizer, what the algorithm remembers and what callbacks with
    `goes_back` do are those of then. Data, number of the iteration, schedule and random numbers go
    on. The checkpoints between then and now are not restored again.

    Args:
        trainer: has a callback that keeps checkpoints.
        module: the algorithm.
        good_until: the last iteration with good weights.

    Returns:
        The iteration of the checkpoint; None, and nothing is changed, if there is none.
    """
    kept = {path: number for keeper in _keepers(trainer) for path, number in keeper.kept.items()}
    early = {path: number for path, number in kept.items() if number <= good_until}
    newest = newest_whole(early) if trainer.is_global_zero else None
    path: str | None = trainer.strategy.broadcast(newest)
    if path is None:
        return None
    checkpoint = trainer.strategy.load_checkpoint(path)
    module.go_back_to(checkpoint)
    for callback in callbacks_of(trainer, RLCallback):
        if callback.goes_back:
            if callback.state_key in checkpoint["callbacks"]:
                callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
            callback.on_load_checkpoint(trainer, module, checkpoint)
            callback.on_train_start(trainer, module)
    for keeper in _keepers(trainer):
        keeper.kept = {name: n for name, n in keeper.kept.items() if n <= early[path]}
    return early[path]


def newest_whole(iterations: Mapping[str, int]) -> str | None:
    """Return the checkpoint of the latest iteration that is whole, with a warning for each skipped.

    Args:
        iterations: of each checkpoint, by its path.
    """
    for path in sorted(iterations, key=lambda path: iterations[path], reverse=True):
        try:
            verify(Path(path))
        except ValueError as error:
            rank_zero_warn(f"skipped: {error}")
        else:
            return path
    return None


def _keepers(trainer: Trainer) -> list[IterationCheckpoint]:
    return [c for c in callbacks_of(trainer, IterationCheckpoint) if c.save_top_k == -1]
