"""Runs a job whole, and killed in its first validation and resumed.

python validations.py INTERVAL ... prints as JSON, by iterations between validations, in what the
two differ.
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


def difference(interval: str, folder: Path) -> list[str]:
    options = ["--trainer.val_check_interval", interval]
    whole = Job(folder / interval / "whole", iterations=8, options=options)
    attempt = whole.attempt(NEVER)
    assert attempt.finished, attempt.log.read_text()[-4000:]
    parts = Job(folder / interval / "parts", iterations=8, options=options)
    assert parts.attempt(Kill("validation", 1)).killed
    assert parts.checkpoint is not None
    stored = torch.load(parts.checkpoint, weights_only=True)["lit_rl"]
    assert (stored["iteration"], stored["validation_due"]) == (int(interval), True)
    assert parts.attempt(NEVER).finished, parts.folder.joinpath("log.txt").read_text()[-4000:]
    assert len([kind for kind, _ in whole.rows() if kind == "validation"]) >= 2
    return differences(whole, parts)


def main() -> None:
    mpl.use("Agg")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {interval: difference(interval, Path(folder)) for interval in sys.argv[1:]}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
