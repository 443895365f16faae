"""The folder of a run, and the checkpoint that `--ckpt_path last` means."""

import os
import re

import pytest

from lit_rl.checkpoints import replacing
from lit_rl.cli import last_checkpoint, new_folder, outside_of_runs


@pytest.fixture
def checkpoint(tmp_path):
    """Write the last checkpoint of a run at a time, in seconds."""

    def write(run, time):
        path = tmp_path / run / "checkpoints" / "last.ckpt"
        path.parent.mkdir(parents=True)
        with replacing(path) as file:
            file.write(run.encode())
            file.seal()
        os.utime(path, (time, time))
        return path

    return write


def test_a_folder_is_named_by_its_time_and_algorithm_and_counted_where_it_exists(tmp_path):
    first = new_folder(tmp_path, "grpo")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-grpo", first.name)
    # Ten runs that begin within a second or two all have a folder of their own.
    for _ in range(10):
        new_folder(tmp_path, "grpo").mkdir()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 10
    assert all(re.fullmatch(r"[\d_-]{19}-grpo(-\d+)?", name) for name in names)


def test_a_run_of_the_configuration_of_another_lies_beside_it(tmp_path):
    """The `config.yaml` of a run names the folder of that run."""
    run = new_folder(tmp_path, "grpo")
    run.mkdir()
    assert outside_of_runs(run) == run  # a folder of the user's that is called like a run
    (run / "config.yaml").touch()
    assert outside_of_runs(run) == tmp_path
    (tmp_path / "config.yaml").touch()
    assert outside_of_runs(tmp_path) == tmp_path


def test_the_newest_checkpoint_is_meant_whatever_its_folder_is_called(tmp_path, checkpoint):
    checkpoint("3-grpo", time=100)
    newest = checkpoint("1-grpo", time=300)
    checkpoint("2-grpo", time=200)
    checkpoint("4-drgrpo", time=400)
    checkpoint("5-grponext", time=400)  # as REINFORCE++ is of REINFORCE
    assert last_checkpoint(tmp_path, "grpo") == newest


def test_a_folder_that_was_counted_is_one_of_the_algorithm(tmp_path, checkpoint):
    newest = checkpoint("2026-01-01_00-00-00-grpo-2", time=100)
    assert last_checkpoint(tmp_path, "grpo") == newest


def test_without_a_checkpoint_of_the_algorithm_the_error_says_where_it_was_looked_for(
    tmp_path, checkpoint
):
    checkpoint("1-drgrpo", time=100)
    (tmp_path / "2-grpo").mkdir()  # a run that ended before its first checkpoint
    with pytest.raises(
        ValueError, match=rf"no run of grpo below {tmp_path} has a whole checkpoint"
    ):
        last_checkpoint(tmp_path, "grpo")


def test_a_broken_checkpoint_is_skipped_and_named(tmp_path, checkpoint):
    whole, broken = checkpoint("1-grpo", time=100), checkpoint("2-grpo", time=200)
    os.truncate(broken, broken.stat().st_size - 1)
    os.utime(broken, (200, 200))
    with pytest.warns(UserWarning, match=rf"skipped: the checkpoint {broken} does not end with"):
        assert last_checkpoint(tmp_path, "grpo") == whole


def test_a_link_without_a_target_is_passed_over_for_the_file_beside_it(tmp_path, checkpoint):
    last = checkpoint("1-grpo", time=100)
    file = last.with_name("iteration=3.ckpt")
    last.rename(file)
    last.symlink_to("iteration=2.ckpt")
    assert last_checkpoint(tmp_path, "grpo") == file


def test_only_broken_checkpoints_are_an_error(tmp_path, checkpoint):
    checkpoint("1-grpo", time=100).write_bytes(b"")
    with (
        pytest.warns(UserWarning, match=r"last.ckpt is empty"),
        pytest.raises(ValueError, match="no run of grpo"),
    ):
        last_checkpoint(tmp_path, "grpo")
