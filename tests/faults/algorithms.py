"""Runs each algorithm of configs/algorithm whole, and killed in its third iteration and resumed.

python algorithms.py NAME ... prints as JSON, by name, in what the two differ.
"""

import json
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from soak import Job, Kill, differences

NEVER = Kill("never", 0)


def difference(name: str, folder: Path) -> list[str]:
    whole = Job(folder / name / "whole", iterations=4, algorithm=name)
    attempt = whole.attempt(NEVER)
    assert attempt.finished, attempt.log.read_text()[-4000:]
    parts = Job(folder / name / "parts", iterations=4, algorithm=name)
    assert parts.attempt(Kill("rollout", 3)).killed
    assert parts.checkpoint is not None
    assert torch.load(parts.checkpoint, weights_only=True)["lit_rl"]["iteration"] == 2
    assert parts.attempt(NEVER).finished, parts.folder.joinpath("log.txt").read_text()[-4000:]
    return differences(whole, parts)


def main() -> None:
    mpl.use("Agg")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: difference(name, Path(folder)) for name in sys.argv[1:]}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
