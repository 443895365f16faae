"""Where a run keeps its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run: the log folder of the first logger, or the default root.

    To be called on every rank, since rank 0 tells the others.
    """
    return Path(trainer.log_dir or trainer.default_root_dir)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written: {error.strerror}. Checkpoints are whole; make space or "
            "mend the folder, and go on from the last one",
        ) from error
