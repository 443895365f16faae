"""A tiny run, whole, and killed at one moment and resumed; for scripts that compare the two."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from soak import Job, Kill, differences

NEVER = Kill("never", 0)


def finish(job: Job) -> None:
    """Run a job to its end."""
    attempt = job.attempt(NEVER)
    assert attempt.finished, attempt.log.read_text()[-4000:]


def difference(folder: Path, kill: Kill, stored: dict[str, Any], **settings: Any) -> list[str]:
    """Return in what two runs differ, of which one is killed and resumed.

    Args:
        folder: takes the files of both.
        kill: the moment.
        stored: what the last checkpoint before that moment has to say of the module.
        settings: of the job.
    """
    whole, parts = (Job(folder / name, **settings) for name in ("whole", "parts"))
    finish(whole)
    assert parts.attempt(kill).killed
    assert parts.checkpoint is not None
    said = torch.load(parts.checkpoint, weights_only=True)["lit_rl"]
    assert {name: said[name] for name in stored} == stored, said
    finish(parts)
    return differences(whole, parts)


def main(difference_of: Callable[[str, Path], list[str]]) -> None:
    """Print as JSON, by argument of the command line, in what the two runs differ.

    Args:
        difference_of: from an argument and an empty folder to that.
    """
    mpl.use("Agg")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: Path(folder) / str(n) for n, name in enumerate(sys.argv[1:])}
        results = {name: difference_of(name, path) for name, path in cases.items()}
    print(json.dumps(results, indent=1))
