"""A checkpoint is whole or refused, and the one before it stays until it is written."""

import errno
import os
import pickle
import shutil

import pytest
import torch

from lit_rl.checkpoints import (
    MANIFEST,
    SEAL_BYTES,
    SealedFile,
    VerifiedCheckpointIO,
    file_hash,
    newest_valid,
    replacing,
    seal_folder,
    verify,
)

CONTENT = {"state_dict": {"weight": torch.arange(1000.0)}, "lit_rl": {"iteration": 3}}


@pytest.fixture
def io():
    return VerifiedCheckpointIO()


@pytest.fixture
def path(io, tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    io.save_checkpoint(CONTENT, path)
    return path


@pytest.mark.parametrize("load", [VerifiedCheckpointIO().load_checkpoint, torch.load])
def test_what_was_saved_is_loaded_here_and_by_torch(path, load):
    loaded = load(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(1000.0))
    assert loaded["lit_rl"] == {"iteration": 3}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("kept", [1, SEAL_BYTES, 0.5, -1])
def test_a_file_that_is_cut_short_is_refused(io, path, kept):
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else kept])
    with pytest.raises(ValueError, match=r"last.ckpt does not end with a hash: it is cut short"):
        io.load_checkpoint(path)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9])
def test_one_flipped_bit_is_refused(io, path, place):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - SEAL_BYTES))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"last.ckpt is damaged"):
        io.load_checkpoint(path)


def test_a_flipped_bit_of_the_hash_is_refused(io, path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"last.ckpt is damaged"):
        io.load_checkpoint(path)


def test_an_empty_and_a_missing_file_are_refused(io, path):
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"last.ckpt is empty"):
        io.load_checkpoint(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no checkpoint .*last.ckpt"):
        io.load_checkpoint(path)


def test_a_file_of_something_else_is_refused(io, tmp_path):
    torch.save(CONTENT, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"foreign.ckpt .* was not written by lit_rl"):
        io.load_checkpoint(tmp_path / "foreign.ckpt")


class Malicious:
    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


@pytest.mark.parametrize("write", ["torch", "pickle"])
def test_a_sealed_file_that_holds_code_is_refused_and_nothing_runs(io, tmp_path, capsys, write):
    path = tmp_path / "malicious.ckpt"
    with replacing(path) as file:
        if write == "torch":
            torch.save({"state_dict": Malicious()}, file)
        else:
            file.write(pickle.dumps(Malicious()))
        file.seal()
    with pytest.raises(ValueError, match=r"malicious.ckpt holds more than numbers and text"):
        io.load_checkpoint(path)
    with pytest.raises(ValueError, match="weights_only false would run code"):
        io.load_checkpoint(path, weights_only=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("written", [0, 1, 3])
def test_the_file_of_before_stays_when_the_disk_is_full(io, path, monkeypatch, written):
    """After some pieces of the file the system has no space left for the next."""
    before = path.read_bytes()
    pieces = []

    write = SealedFile.write

    def full(self, data):
        if len(pieces) == written:
            raise OSError(errno.ENOSPC, "No space left on device")
        pieces.append(data)
        return write(self, data)

    monkeypatch.setattr(SealedFile, "write", full)
    with pytest.raises(OSError, match=r"last.ckpt could not be written: No space left") as full:
        io.save_checkpoint({**CONTENT, "new": 1}, path)
    assert full.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_what_a_killed_run_left_is_removed_by_the_next_save(io, path):
    leftover = path.with_name(".iteration=7.ckpt.part")
    leftover.write_bytes(b"half a checkpoint")
    io.save_checkpoint(CONTENT, path)
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_the_newest_whole_file_is_found_and_the_broken_ones_named(io, tmp_path):
    paths = [tmp_path / f"iteration={n}.ckpt" for n in (1, 2, 3)]
    for path in paths:
        io.save_checkpoint(CONTENT, path)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"skipped: the checkpoint .*iteration=3.ckpt"):
        assert newest_valid(paths) == paths[1]
    assert newest_valid([]) is None


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two shards, one of them in a folder of its own."""
    folder = tmp_path / "checkpoints" / "iteration=1.ckpt"
    (folder / "inner").mkdir(parents=True)
    (folder / "first.pt").write_bytes(b"weights of rank 0")
    (folder / "inner" / "second.pt").write_bytes(b"weights of rank 1")
    hashes = {name: file_hash(folder / name) for name in ("first.pt", "inner/second.pt")}
    seal_folder(folder, hashes)
    return folder


def test_a_hash_is_that_of_sha256(folder):
    """Golden: `printf 'weights of rank 0' | sha256sum`."""
    golden = "3355ac71012feedb3355080ec90960718f879dfe6830f314057a1f111c24831a"
    assert file_hash(folder / "first.pt") == golden
    assert f'"first.pt": "{golden}"' in (folder / MANIFEST).read_text()


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"1"),
    "changed by a bit": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["first.pt", "inner/second.pt"])
def test_a_folder_with_a_damaged_shard_is_refused_by_its_name(folder, name, damage):
    verify(folder)
    damage(folder / name)
    with pytest.raises(ValueError, match=rf"iteration=1.ckpt is damaged: .*{name}"):
        verify(folder)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_folder_whose_manifest_is_damaged_is_refused(folder, damage):
    damage(folder / MANIFEST)
    with pytest.raises(ValueError, match=rf"iteration=1.ckpt.*{MANIFEST}"):
        verify(folder)


def test_a_folder_without_its_manifest_was_not_finished(folder):
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="which is written last: writing it was interrupted"):
        verify(folder)


def test_ranks_read_the_files_of_a_folder_once_between_them(folder):
    """By hand: of first.pt and inner/second.pt, in this order, rank 1 of 2 reads the second."""
    DAMAGES["changed by a bit"](folder / "inner" / "second.pt")
    verify(folder, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"the content of inner/second\.pt"):
        verify(folder, rank=1, world_size=2)


def test_the_newest_whole_folder_is_found_and_an_unfinished_one_named(io, folder):
    unfinished = folder.with_name("iteration=2.ckpt")
    shutil.copytree(folder, unfinished)
    (unfinished / MANIFEST).unlink()
    os.utime(unfinished, ns=(2**62, 2**62))
    with pytest.warns(UserWarning, match=r"skipped: the checkpoint .*iteration=2.ckpt has no"):
        assert newest_valid([folder, unfinished]) == folder


def test_a_folder_is_removed(io, folder):
    io.remove_checkpoint(folder)
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_is_removed_by_half_is_no_checkpoint(io, folder, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        io.remove_checkpoint(folder)
    with pytest.raises(ValueError, match="has no file"):
        verify(folder)


def test_half_a_folder_that_a_killed_run_left_is_removed_by_the_next_save(io, folder):
    folder.rename(folder.with_name(".iteration=1.ckpt.part"))
    io.save_checkpoint(CONTENT, folder.with_name("last.ckpt"))
    assert [file.name for file in folder.parent.iterdir()] == ["last.ckpt"]


def test_storage_options_are_refused(io, tmp_path):
    with pytest.raises(TypeError, match="remote storage"):
        io.save_checkpoint(CONTENT, tmp_path / "x.ckpt", storage_options={"a": 1})
