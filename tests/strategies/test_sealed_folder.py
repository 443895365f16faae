"""A folder of shards has its name when it is whole; tests/distributed does it with two ranks."""

import errno
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from lit_rl.checkpoints import MANIFEST, VerifiedCheckpointIO, verify
from lit_rl.strategies.sealed_folder import replacing_folder, verify_together


@pytest.fixture
def alone(tmp_path):
    """A strategy on one rank."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DDPStrategy(
        parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment()
    )
    distributed.destroy_process_group()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints" / "last.ckpt"


def write(path, strategy, text):
    with replacing_folder(path, strategy) as part:
        (part / "inner").mkdir(parents=True)
        (part / "inner" / "weights.pt").write_text(text)


def content(path: Path) -> str:
    return (path / "inner" / "weights.pt").read_text()


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_a_folder_is_written_with_the_hashes_of_its_files(alone, path):
    write(path, alone, "new")
    assert names(path) == ["last.ckpt"]
    assert sorted(file.name for file in path.iterdir()) == ["inner", MANIFEST]
    verify_together(path, alone)
    (path / "inner" / "weights.pt").write_text("old")
    with pytest.raises(ValueError, match=r"damaged: the content of inner/weights\.pt"):
        verify_together(path, alone)


@pytest.mark.parametrize("before", ["folder", "file", "link"])
def test_a_folder_takes_the_place_of_what_had_its_name(alone, path, before):
    if before == "folder":
        write(path, alone, "old")
        (path / "rank2.pt").touch()  # of a run on more ranks
    elif before == "file":
        VerifiedCheckpointIO().save_checkpoint({"old": 1}, path)
    else:
        path.parent.mkdir()
        path.symlink_to("iteration=1.ckpt")
    write(path, alone, "new")
    assert content(path) == "new"
    assert names(path) == ["last.ckpt"]
    assert sorted(file.name for file in path.iterdir()) == ["inner", MANIFEST]
    verify(path)


def test_what_a_killed_run_left_is_removed(alone, path):
    leftover = path.with_name(".iteration=7.ckpt.part")
    leftover.mkdir(parents=True)
    (leftover / "weights.pt").touch()
    write(path, alone, "new")
    assert names(path) == ["last.ckpt"]


def test_the_folder_of_before_stays_when_the_disk_is_full(alone, path):
    write(path, alone, "old")

    def fill() -> None:
        with replacing_folder(path, alone) as part:
            part.mkdir()
            (part / "weights.pt").touch()
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:  # as of a writer of another library
                raise RuntimeError("a thread failed") from error

    with pytest.raises(OSError, match=r"last.ckpt could not be written: No space left") as full:
        fill()
    assert full.value.errno == errno.ENOSPC
    assert content(path) == "old"
    verify(path)
