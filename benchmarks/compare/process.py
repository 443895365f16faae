"""Each trainer runs in a fresh process: its memory is its own, and nothing is warm.

python -m compare.process SIDE JOB RESULT    (the names of two JSON files)
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from compare.workloads import Workload

BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process does.

    Attributes:
        workload: the work.
        folder: the model's.
        task: `measure` iterations, or `agree`: the loss of one fixed rollout.
        iterations: iterations that count; those of the warm-up come before them.
        threads: threads of torch.
        seed: seed of the planned lengths.
        micro_batch_tokens: of lit_rl; None: its default.
    """

    workload: Workload
    folder: str
    task: Literal["measure", "agree"] = "measure"
    iterations: int = 1
    threads: int = 2
    seed: int = 0
    micro_batch_tokens: int | None = None

    @property
    def total_iterations(self) -> int:
        return self.workload.warm_up + self.iterations


def run_here(side: str, job: Job) -> dict[str, Any]:
    """Do a job in this process."""
    import torch

    torch.set_num_threads(job.threads)
    result: dict[str, Any] = getattr(importlib.import_module(f"compare.{side}_side"), job.task)(job)
    return result


def run_fresh(side: str, job: Job) -> dict[str, Any]:
    """Do a job in a process of its own and return its result.

    Raises:
        RuntimeError: if it failed, with the end of what it wrote.
    """
    threads = str(job.threads)
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryDirectory() as folder:
        description, result = Path(folder, "job.json"), Path(folder, "result.json")
        description.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "compare.process", side, str(description), str(result)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"the process of {side} failed:\n{run.stdout}\n{run.stderr[-4000:]}")
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def main() -> None:
    side, description, result = sys.argv[1:]
    fields = json.loads(Path(description).read_text())
    job = Job(**{**fields, "workload": Workload(**fields["workload"])})
    Path(result).write_text(json.dumps(run_here(side, job)))


if __name__ == "__main__":
    main()
