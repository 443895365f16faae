"""Folders of shards that are whole or not there, written and verified by all ranks together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lightning.pytorch.strategies import ParallelStrategy
from torch import distributed

from lit_rl.checkpoints import (
    PART_SUFFIX,
    file_hash,
    naming,
    part_of,
    remove,
    remove_parts,
    seal_folder,
    sync_folder,
    verify,
)

T = TypeVar("T")


@contextmanager
def replacing_folder(path: Path, strategy: ParallelStrategy) -> Iterator[Path]:
    """Give a temporary name, beneath which all ranks write files, to what then is called `path`.

    The files are flushed to the disk, and the last of them holds the hashes of all others. A folder
    that is there already is moved aside before, and removed behind: killed between these two, a run
    has neither of that name. Every rank has to join, and sees the same disk.

    Raises:
        OSError: if the disk is full or cannot be written.
    """
    part = part_of(path)
    with naming(path):
        if strategy.is_global_zero:
            remove_parts(path.parent)
        strategy.barrier()
        yield part
        strategy.barrier()
        hashes = {}
        files = sorted(file for file in part.rglob("*") if file.is_file())
        for file in files[strategy.global_rank :: strategy.world_size]:
            with file.open("rb+") as content:
                os.fsync(content.fileno())
            hashes[file.relative_to(part).as_posix()] = file_hash(file)
        together = {name: value for share in _gathered(hashes) for name, value in share.items()}
        if strategy.is_global_zero:
            seal_folder(part, together)
            _take_place(part, path)
        strategy.barrier()


def _take_place(part: Path, path: Path) -> None:
    """Give a folder its name, which another one, or a file, may have."""
    old = path.with_name(f".{path.name}.old{PART_SUFFIX}")
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rename(old)
    part.rename(path)
    sync_folder(path.parent)
    remove(old)


def verify_together(path: Path, strategy: ParallelStrategy) -> None:
    """Verify a checkpoint, with the files of a folder shared out among the ranks; all have to join.

    Raises:
        ValueError: on every rank, with what one of them found; see `lit_rl.checkpoints.verify`.
    """
    problem = None
    try:
        verify(path, strategy.global_rank, strategy.world_size)
    except ValueError as error:
        problem = str(error)
    for found in _gathered(problem):
        if found:
            raise ValueError(found)


def _gathered(value: T) -> list[T]:
    """Return what every rank has; a collective."""
    values: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
