"""Each row is in the file at once, and no kill or full disk takes those of before."""

import csv
import errno
from pathlib import Path

import pytest

from lit_rl.callbacks.metrics_file import MetricsFile


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_row_is_written_when_it_is_logged(tmp_path):
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5}, step=1)
    assert rows(tmp_path) == [{"loss": "0.5", "step": "1"}]
    logger.log_metrics({"loss": 0.25}, step=2)
    assert [row["loss"] for row in rows(tmp_path)] == ["0.5", "0.25"]


def test_a_new_column_keeps_the_rows_of_before(tmp_path):
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"val/reward": 0.75}, step=1)
    assert rows(tmp_path) == [
        {"loss": "0.5", "step": "1", "val/reward": ""},
        {"loss": "", "step": "1", "val/reward": "0.75"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_run_killed_while_a_column_is_added_leaves_the_file_of_before(tmp_path, monkeypatch):
    """The last step is the only one that touches the file."""
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5}, step=1)

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"val/reward": 0.75}, step=1)
    assert rows(tmp_path) == [{"loss": "0.5", "step": "1"}]


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    logger = MetricsFile(str(tmp_path))
    logger.log_metrics({"loss": 0.5}, step=1)

    def full(self, *arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"metrics\.csv could not be written: No space") as error:
        logger.log_metrics({"val/reward": 0.75}, step=1)
    assert error.value.errno == errno.ENOSPC
