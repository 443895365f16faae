"""Where a run keeps its files."""

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run: the log folder of the first logger, or the default root.

    To be called on every rank, since rank 0 tells the others.
    """
    return Path(trainer.log_dir or trainer.default_root_dir)
