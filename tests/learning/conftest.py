"""Real learning runs through the command line, from the files in configs/."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def held_out_accuracies(tmp_path):
    """Train as configurations say, and return the held-out accuracy of every validation."""

    def train(*configs, seed, kind="greedy", options=()):
        arguments = [a for config in configs for a in ("--config", str(ROOT / "configs" / config))]
        command = [sys.executable, ROOT / "train.py", "fit", *arguments, *options]
        subprocess.run(
            [*map(str, command), "--seed_everything", str(seed)],
            cwd=tmp_path,
            check=True,
            timeout=800,
        )
        (file,) = tmp_path.glob("runs/*/metrics.csv")
        with file.open() as lines:
            column = [row[f"val/{kind}_accuracy"] for row in csv.DictReader(lines)]
        return [float(value) for value in column if value]

    return train
