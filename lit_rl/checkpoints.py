"""Checkpoints that are whole or not there, and that say so themselves."""

import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

SEAL = b"\nlit_rl sha256 "
"""What stands between the content of a checkpoint and its hash, at the end of the file."""

SEAL_BYTES = len(SEAL) + 64
PART_SUFFIX = ".part"
CHUNK_BYTES = 1 << 22


class VerifiedCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically, with a hash that is verified when they are loaded.

    A checkpoint is written under a hidden temporary name in its own folder, flushed to the disk and
    renamed, so at every moment its name stands for the old file or for the whole new one. The file
    is that of `torch.save`, which `torch.load` reads as ever, and ends with the hash of all before
    it. It is loaded with `weights_only`: a file can hold numbers and text, never code.

    Only rank 0 writes, as Lightning sees to. Temporary files that a killed run left in the folder
    are removed before the next is written, so only one run may write to a folder at a time. A
    folder of shards is written and read by its strategy, not here.

    Example:
        In a script; the command line adds it by itself::

            trainer = Trainer(plugins=[VerifiedCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; where that fails the file that had its name is as it was.

        Raises:
            OSError: if the disk is full or cannot be written.
        """
        if storage_options is not None:
            raise TypeError("storage_options are for remote storage, which is not supported")
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)  # type: ignore[arg-type]
            file.seal()

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint, once its hash is that of its content.

        Raises:
            ValueError: if it is no whole checkpoint of lit_rl, or to be loaded with code in it.
        """
        if weights_only is False:
            raise ValueError(
                "weights_only false would run code that a checkpoint holds, which those of lit_rl "
                "never need; leave it out"
            )
        verify(Path(path))
        try:
            loaded: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path} holds more than numbers and text: {error}") from error
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint."""
        Path(path).unlink(missing_ok=True)


class SealedFile:
    """A file to write to, which keeps the hash of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Append some bytes."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Hand to the system what was written."""
        self._file.flush()

    def seal(self) -> None:
        """Append the hash of all that was written."""
        self._file.write(SEAL + self._digest.hexdigest().encode())


@contextmanager
def replacing(path: Path) -> Iterator[SealedFile]:
    """Write a file that takes the place of `path` when it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".*{PART_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    part = path.with_name(f".{path.name}{PART_SUFFIX}")
    try:
        with part.open("wb") as file:
            yield SealedFile(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if cause := _system_error(error):
            raise OSError(
                cause.errno,
                f"{path} could not be written: {cause.strerror}. The checkpoints before it are "
                "whole; make space or mend the folder, and go on from the last one",
            ) from error
        raise
    _sync_folder(path.parent)


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that another one, as of torch's writer, came from."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def verify(path: Path) -> None:
    """Read a checkpoint and compare its content with its hash; a folder is left to its strategy.

    Raises:
        ValueError: if the file is missing, empty, cut short, changed or not of lit_rl.
    """
    if path.is_dir():
        return
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    size = path.stat().st_size
    if not size:
        raise ValueError(f"the checkpoint {path} is empty")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        remaining = size - SEAL_BYTES
        while remaining > 0:
            chunk = file.read(min(CHUNK_BYTES, remaining))
            digest.update(chunk)
            remaining -= len(chunk)
        seal = file.read()
    if not seal.startswith(SEAL) or len(seal) != SEAL_BYTES:
        raise ValueError(
            f"the checkpoint {path} does not end with a hash: it is cut short, or was not written "
            "by lit_rl with lit_rl.checkpoints.VerifiedCheckpointIO"
        )
    if seal != SEAL + digest.hexdigest().encode():
        raise ValueError(f"the checkpoint {path} is damaged: its content does not match its hash")


def newest_valid(paths: list[Path]) -> Path | None:
    """Return the newest of some checkpoints that is whole, with a warning for each skipped one.

    Of a file and a link to it, written as one, the link is returned if it is called last.
    """

    def age(path: Path) -> tuple[int, bool]:
        return path.stat().st_mtime_ns, path.stem == "last"

    there = [path for path in paths if path.exists()]  # a link may point to what was removed
    for path in sorted(there, key=age, reverse=True):
        try:
            verify(path)
        except ValueError as error:
            rank_zero_warn(f"skipped: {error}")
        else:
            return path
    return None
