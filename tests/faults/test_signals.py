"""Signals end a real process after its iteration, with everything saved and a code that says so."""

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_rl.callbacks.stop_on_interrupt import EXIT_CODE

ROOT = Path(__file__).parent.parent.parent
ARGUMENTS = [
    "--config", ROOT / "configs" / "algorithm" / "grpo.yaml",
    "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
    "--data.task.num_digits", 4, "--data.task.num_train", 8000,
    "--data.batch_size", 8, "--trainer.max_epochs", 1,
]  # fmt: skip
TWO = ["--trainer.devices", 2, "--trainer.strategy", "ddp"]

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Start a run of 1,000 iterations and wait until it trains."""
    processes = []

    def start(*arguments):
        output = (tmp_path / "output.txt").open("w")
        process = subprocess.Popen(
            [sys.executable, *map(str, [ROOT / "train.py", "fit", *ARGUMENTS, *arguments])],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            # A shell lets what runs in its background, such as these tests, ignore the signal.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        end = time.monotonic() + 90
        while time.monotonic() < end and process.poll() is None and len(rows(tmp_path)) < 3:
            time.sleep(0.05)
        assert len(rows(tmp_path)) >= 3, (tmp_path / "output.txt").read_text()[-4000:]
        return process

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows(folder):
    """Return the logged iterations of training."""
    found = []
    for path in folder.glob("runs/*/metrics.csv"):
        with path.open() as file:
            found += [row["iteration"] for row in csv.DictReader(file) if row.get("loss")]
    return found


def saved_iteration(folder):
    (last,) = folder.glob("runs/*/checkpoints/last.ckpt")
    return torch.load(last, weights_only=True)["lit_rl"]["iteration"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("SIGTERM", []), ("SIGUSR1", []), ("SIGINT", []), ("SIGTERM", TWO)],
    ids=["SIGTERM", "SIGUSR1", "SIGINT", "SIGTERM to one of two"],
)
def test_the_run_is_saved_and_ends_with_the_code(start, tmp_path, name, arguments):
    process = start(*arguments)
    process.send_signal(getattr(signal, name))
    # An iteration takes less than a second; export, curve and the end of Python some more.
    assert process.wait(30) == EXIT_CODE, (tmp_path / "output.txt").read_text()[-4000:]
    assert saved_iteration(tmp_path) == float(rows(tmp_path)[-1]) < 1000
    output = (tmp_path / "output.txt").read_text()
    assert f"{name}: the run stops after this iteration" in output
    assert "--ckpt_path last goes on" in output
    assert "Traceback" not in output


def test_a_second_ctrl_c_ends_it_at_once(start, tmp_path):
    process = start()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    assert process.wait(1) not in (0, EXIT_CODE)
