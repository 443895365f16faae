"""Checkpoints that are whole or not there, and that say so themselves."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
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
MANIFEST = "sha256.json"
"""The file that makes a folder of shards a checkpoint: the hashes of all others, by their names."""

CHUNK_BYTES = 1 << 22


class VerifiedCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically, with a hash that is verified when they are loaded.

    A checkpoint is written under a hidden temporary name in its own folder, flushed to the disk and
    renamed, so at every moment its name stands for the old file or for the whole new one. The file
    is that of `torch.save`, which `torch.load` reads as ever, and ends with the hash of all before
    it. It is loaded with `weights_only`: a file can hold numbers and text, never code.

    Only rank 0 writes, as Lightning sees to. Temporary files that a killed run left in the folder
    are removed before the next is written, so only one run may write to a folder at a time. A
    folder of shards is written and read by its strategy (see `lit_rl.strategies.sealed_folder`),
    and removed here.

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
            # It writes and nothing else, which is all that is asked of a file here.
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
        """Remove a checkpoint, a file or a folder."""
        remove(Path(path))


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
    remove_parts(path.parent)
    part = part_of(path)
    with naming(path):
        try:
            with part.open("wb") as file:
                yield SealedFile(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def part_of(path: Path) -> Path:
    """Return the temporary name of what is to be called `path`."""
    return path.with_name(f".{path.name}{PART_SUFFIX}")


def remove_parts(folder: Path) -> None:
    """Make a folder, or remove from it what a killed run left under a temporary name."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f".*{PART_SUFFIX}"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder; half a folder is no checkpoint any more."""
    if path.is_dir() and not path.is_symlink():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the checkpoint that was to be written."""
    try:
        yield
    except Exception as error:
        if cause := _system_error(error):
            raise OSError(
                cause.errno,
                f"{path} could not be written: {cause.strerror}. The checkpoints before it are "
                "whole; make space or mend the folder, and go on from the last one",
            ) from error
        raise


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system that another one, as of torch's writer, came from."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def verify(path: Path, rank: int = 0, world_size: int = 1) -> None:
    """Read a checkpoint and compare its content with its hash, that of a folder with its hashes.

    Args:
        path: the checkpoint.
        rank: this one of the ranks that share the files of a folder out among themselves.
        world_size: their number.

    Raises:
        ValueError: if a file is missing, empty, cut short, changed or not of lit_rl.
    """
    if path.is_dir():
        _verify_folder(path, rank, world_size)
    elif not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    else:
        _verify_file(path)


def _verify_file(path: Path) -> None:
    size = path.stat().st_size
    if not size:
        raise ValueError(f"the checkpoint {path} is empty")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        _add(digest, file, size - SEAL_BYTES)
        seal = file.read()
    if not seal.startswith(SEAL) or len(seal) != SEAL_BYTES:
        raise ValueError(
            f"the checkpoint {path} does not end with a hash: it is cut short, or was not written "
            "by lit_rl with lit_rl.checkpoints.VerifiedCheckpointIO"
        )
    if seal != SEAL + digest.hexdigest().encode():
        raise ValueError(f"the checkpoint {path} is damaged: its content does not match its hash")


def _verify_folder(path: Path, rank: int, world_size: int) -> None:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ValueError(
            f"the checkpoint {path} has no file {MANIFEST}, which is written last: writing it was "
            "interrupted, or it is not of lit_rl"
        )
    _verify_file(manifest)
    hashes: dict[str, str] = json.loads(manifest.read_bytes()[:-SEAL_BYTES])
    if missing := [name for name in hashes if not (path / name).is_file()]:
        raise ValueError(f"the checkpoint {path} is damaged: {', '.join(missing)} is missing")
    for name in sorted(hashes)[rank::world_size]:
        if file_hash(path / name) != hashes[name]:
            raise ValueError(
                f"the checkpoint {path} is damaged: the content of {name} does not match its hash"
            )


def file_hash(path: Path) -> str:
    """Return the hash of the content of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        _add(digest, file, path.stat().st_size)
    return digest.hexdigest()


def _add(digest: Any, file: BinaryIO, remaining: int) -> None:
    """Read so many bytes of a file into a hash."""
    while remaining > 0 and (chunk := file.read(min(CHUNK_BYTES, remaining))):
        digest.update(chunk)
        remaining -= len(chunk)


def seal_folder(folder: Path, hashes: Mapping[str, str]) -> None:
    """Make a folder of shards a checkpoint.

    Args:
        folder: the folder, with all its files.
        hashes: by name relative to the folder, the hash of each file.
    """
    with (folder / MANIFEST).open("wb") as file:
        sealed = SealedFile(file)
        sealed.write(json.dumps(dict(hashes), indent=1, sort_keys=True).encode())
        sealed.seal()
        file.flush()
        os.fsync(file.fileno())
    for inner in {(folder / name).parent for name in [MANIFEST, *hashes]}:
        sync_folder(inner)


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
