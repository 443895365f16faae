"""The peak of the resident memory of a run, on one process or on one of two.

    python memory_worker.py FOLDER OPTIONS   (of train.py fit)

Each process writes a file of its own into the folder, with the bytes that the run added to what
the libraries take: a tiny run comes first. Three iterations: after two, the peak of PPO under DDP
was a sixth below the estimate.
"""

import ctypes
import gc
import os
import sys
import tempfile
from pathlib import Path

import torch

from lit_rl.cli import RLCLI

BASE = Path(__file__).parents[1] / "configs" / "base.yaml"
QUIET = [
    *("--trainer.callbacks", "[]", "--trainer.logger", "false"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_checkpointing", "false"),
    *("--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"),
    *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "1"),
]


def status(name: str) -> int:
    """Return a number of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def run(options: list[str], iterations: int) -> None:
    cli = RLCLI(BASE, ["fit", *options, "--trainer.limit_train_batches", str(iterations)])
    del cli
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    folder, *options = sys.argv[1:]
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    # Each large tensor on its own pages, which a free gives back at once.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    strategy = [text for text in options if "strategy" in text or "devices" in text]
    run([*QUIET, *strategy, "--data.batch_size", "4"], 1)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run([*options, *QUIET], 3)
    (Path(folder) / str(os.getpid())).write_text(str(status("VmHWM") - before))


if __name__ == "__main__":
    main()
