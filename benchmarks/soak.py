"""A tiny run that is killed again and again, against the same run left alone.

    python benchmarks/soak.py --iterations 2000 --minutes 20

Every attempt is a process of its own, forked from this one so that it need not import anything,
ended by SIGKILL at a random moment and followed by one with `--ckpt_path last`. At the end the two
runs are compared: weights, optimizer, rows of metrics, samples and export. Prints a report as JSON
and ends with 1 where they differ.
"""

import argparse
import contextlib
import csv
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import yaml

from lit_rl.callbacks import HuggingFaceExport, RLCallback
from lit_rl.checkpoints import SealedFile, VerifiedCheckpointIO, newest_valid
from lit_rl.cli import RLCLI

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "base.yaml"
ITERATIONS_PER_EPOCH = 4
ATTEMPT_SECONDS = 3600
PHASES = ("start", "rollout", "update", "checkpoint", "between", "validation", "export")
MARKER = mmap.mmap(-1, 1)
"""The phase that the process of an attempt is in, which this process reads."""

JOB: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "val_check_interval": 10,
        "enable_progress_bar": False,
        "callbacks": [
            {"class_path": f"lit_rl.callbacks.{name}", "init_args": settings}
            for name, settings in (
                ("RewardMetrics", {}),
                ("RatioMetrics", {}),
                ("LearningCurve", {}),
                ("SampleLog", {"num_samples": 1, "every_n_iterations": 1}),
                ("IterationCheckpoint", {"every_n_iterations": 1}),
                ("HuggingFaceExport", {}),
            )
        ],
    },
    "model": {
        "init_args": {
            "source": {
                "class_path": "lit_rl.models.RandomCausalLM",
                "init_args": {
                    "alphabet": "0123456789>",
                    "config": {
                        "model_type": "llama",
                        "hidden_size": 16,
                        "intermediate_size": 32,
                        "num_hidden_layers": 1,
                        "num_attention_heads": 2,
                        "num_key_value_heads": 2,
                        "max_position_embeddings": 64,
                        "initializer_range": 0.1,
                    },
                },
            },
        },
    },
    "data": {
        "init_args": {
            "task": {
                "class_path": "lit_rl.tasks.LargestDigit",
                "init_args": {"num_train": 8 * ITERATIONS_PER_EPOCH, "num_held_out": 8},
            },
            "batch_size": 8,
        }
    },
}


@dataclass
class Kill:
    """A moment at which the process of an attempt ends itself: the n-th time in a phase."""

    phase: str
    after: int

    def enter(self, phase: str) -> None:
        """Note the phase; end the process if this is the moment."""
        MARKER[0] = PHASES.index(phase)
        if phase == self.phase:
            self.after -= 1
            if self.after == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Watch(RLCallback):
    """Notes the phase, and the memory after each iteration."""

    def __init__(self, kill: Kill, memory: Path) -> None:
        self.kill, self.memory, self.iterations = kill, memory, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        MARKER[0] = PHASES.index("rollout")

    def on_rollout(self, trainer, module, scored, experience):
        self.kill.enter("rollout")
        MARKER[0] = PHASES.index("update")

    def on_minibatch(self, trainer, module, update):
        self.kill.enter("update")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not trainer.sanity_checking:
            self.kill.enter("validation")

    def on_validation_end(self, trainer, pl_module):
        MARKER[0] = PHASES.index("between")

    def on_iteration_end(self, trainer, module):
        MARKER[0] = PHASES.index("between")
        self.iterations += 1
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with self.memory.open("a") as file:
            file.write(f"{os.getpid()},{self.iterations},{pages * mmap.PAGESIZE}\n")


@dataclass
class Attempt:
    """How the process of an attempt ended."""

    status: int
    phase: str
    log: Path

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def finished(self) -> bool:
        return os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == 0


@dataclass
class Job:
    """A run of a tiny model, by the command line.

    Attributes:
        folder: holds its runs.
        iterations: how long it is, a multiple of `ITERATIONS_PER_EPOCH`.
        algorithm: the name of a file in configs/algorithm.
        options: further arguments of the command line.
    """

    folder: Path
    iterations: int
    algorithm: str = "grpo"
    options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "job.yaml").write_text(yaml.safe_dump(JOB))

    @property
    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        return newest_valid(list(self.folder.glob("runs/*/checkpoints/*.ckpt")))

    def arguments(self) -> list[str]:
        stack = [ROOT / "configs" / "algorithm" / f"{self.algorithm}.yaml", "job.yaml"]
        configs = [part for path in stack for part in ("--config", str(path))]
        epochs = ["--trainer.max_epochs", str(self.iterations // ITERATIONS_PER_EPOCH)]
        resume = ["--ckpt_path", "last"] if self.checkpoint else []
        return ["fit", *configs, *epochs, *resume, *self.options]

    def attempt(self, kill: Kill, seconds: float | None = None) -> Attempt:
        """Run in a process of its own, which ends itself at a moment or is killed after a time."""
        arguments, log = self.arguments(), self.folder / "log.txt"
        MARKER[0] = 0
        child = os.fork()
        if not child:
            run_child(self.folder, log, arguments, Watch(kill, self.folder / "memory.csv"))
        end = time.monotonic() + ATTEMPT_SECONDS
        begun = None
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            now = time.monotonic()
            if begun is None and MARKER[0]:
                begun = now
            if now > end or (begun and seconds is not None and now - begun > seconds):
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.002)
        return Attempt(ended[1], PHASES[MARKER[0]], log)

    def rows(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the rows of metrics of all runs, by iteration and kind.

        Raises:
            AssertionError: if two runs disagree about an iteration that both went through.
        """
        found: dict[tuple[str, str], dict[str, str]] = {}
        for path in sorted(self.folder.glob("runs/*/metrics.csv")):
            with path.open() as file:
                for row in csv.DictReader(file):
                    kind = "validation" if row.get("val/reward") else "training"
                    values = {name: value for name, value in row.items() if value}
                    same = found.setdefault((kind, row["iteration"]), values)
                    assert same == values, f"{path}: {differing(same, values)}"
        return found

    def samples(self) -> dict[int, dict[str, Any]]:
        """Return the samples of all runs, by iteration; two runs have to agree."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("runs/*/samples.jsonl")):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                assert found.setdefault(row["iteration"], row) == row, path
        return found

    def export(self) -> dict[str, bytes]:
        """Return the files of the newest exported model, by name."""
        newest = max(self.folder.glob("runs/*/export"), key=lambda path: path.stat().st_mtime_ns)
        return {path.name: path.read_bytes() for path in newest.iterdir()}


def run_child(folder: Path, log: Path, arguments: list[str], watch: Watch) -> None:
    """Run the command line in this process, which ends here."""
    code = 1
    try:
        os.chdir(folder)
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        watch_checkpoints(watch.kill)
        watch_export(watch.kill)

        class Watched(RLCLI):
            def instantiate_trainer(self, **kwargs):
                self._get(self.config_init, "trainer")["callbacks"].append(watch)
                return super().instantiate_trainer(**kwargs)

        Watched(BASE, arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def watch_checkpoints(kill: Kill) -> None:
    """Count each piece of a checkpoint that is written as once in its phase."""
    save, write = VerifiedCheckpointIO.save_checkpoint, SealedFile.write

    def watched_save(self, *arguments, **settings):
        before = MARKER[0]
        save(self, *arguments, **settings)
        MARKER[0] = before

    def watched_write(self, data):
        size = write(self, data)
        kill.enter("checkpoint")
        return size

    VerifiedCheckpointIO.save_checkpoint = watched_save
    SealedFile.write = watched_write


def watch_export(kill: Kill) -> None:
    """Count the export at the end of a run as its phase."""
    export = HuggingFaceExport.on_train_end

    def watched_export(self, trainer, pl_module):
        kill.enter("export")
        export(self, trainer, pl_module)

    HuggingFaceExport.on_train_end = watched_export


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what two dictionaries say differently, by key."""
    keys = one.keys() | other.keys()
    return {k: (one.get(k), other.get(k)) for k in sorted(keys) if one.get(k) != other.get(k)}


def differences(whole: Job, parts: Job) -> list[str]:
    """Return in what a run that was killed differs from the one left alone, bit for bit."""
    found = []
    states = [torch.load(job.checkpoint, weights_only=True) for job in (whole, parts)]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "lit_rl", "PromptDataModule"):
        if not equal(states[0][key], states[1][key]):
            found.append(f"{key} of the last checkpoint")
    found += [f"{name} of the export" for name in differing(whole.export(), parts.export())]
    try:
        rows = differing(whole.rows(), parts.rows())
        samples = differing(whole.samples(), parts.samples())
    except AssertionError as error:
        return [*found, str(error)]
    found += [f"row {key}: {differing(*(row or {} for row in pair))}" for key, pair in rows.items()]
    return found + [f"sample of iteration {iteration}" for iteration in samples]


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def random_kill(draw: random.Random, seconds: float) -> tuple[Kill, float | None]:
    """Return a moment: of some phase, or any moment after the training has begun."""
    phase = draw.choice([*PHASES[1:4], "any", "any"])
    if phase == "any":
        return Kill("never", 0), draw.uniform(0.0, seconds)
    # A checkpoint of the tiny model is written in some hundred pieces.
    most = {"rollout": 4, "update": 8, "checkpoint": 400}[phase]
    return Kill(phase, draw.randint(1, most)), None


def run_with_kills(
    job: Job, kills: int, seed: int, seconds: float, until: Callable[[], bool] = lambda: False
) -> Counter[str]:
    """Run a job to its end with so many kills; return how many came in which phase."""
    draw, struck = random.Random(seed), Counter[str]()
    while True:
        last = sum(struck.values()) >= kills or until()
        kill, limit = (Kill("never", 0), None) if last else random_kill(draw, seconds)
        attempt = job.attempt(kill, limit)
        if attempt.killed:
            struck[attempt.phase] += 1
        elif attempt.finished:
            return struck
        else:
            raise RuntimeError(attempt.log.read_text()[-4000:])


def memory_slope(job: Job) -> float:
    """Return by which share the memory of a run in one process grows over 1,000 iterations.

    The first half of the run is left out, in which caches of libraries fill.
    """
    rows = [line.split(",") for line in (job.folder / "memory.csv").read_text().splitlines()]
    half = np.array([(float(n), float(size)) for _, n, size in rows[len(rows) // 2 :]])
    steps, sizes = half.T - half.mean(axis=0)[:, None]
    return float(1000 * (steps @ sizes) / (steps @ steps) / half[:, 1].mean())


def main() -> int:
    """Run both and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=20.0, help="with kills; then to the end")
    parser.add_argument("--kills", type=int, default=10**9, help="at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time between kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mpl.use("Agg")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        whole = Job(Path(folder) / "whole", options.iterations)
        attempt = whole.attempt(Kill("never", 0))
        if not attempt.finished:
            raise RuntimeError(attempt.log.read_text()[-4000:])
        parts = Job(Path(folder) / "parts", options.iterations)
        start = time.monotonic()
        struck = run_with_kills(
            parts,
            options.kills,
            options.seed,
            options.seconds,
            until=lambda: time.monotonic() - start > 60 * options.minutes,
        )
        found = differences(whole, parts)
        report = {
            "iterations": options.iterations,
            "restarts": sum(struck.values()),
            "killed in": dict(struck),
            "differences": found,
            "memory growth per 1000 iterations": memory_slope(whole),
        }
    print(json.dumps(report, indent=1))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
