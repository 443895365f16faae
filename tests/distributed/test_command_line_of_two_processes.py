"""`python train.py` with two processes: one run folder, each row and each prompt once."""

import csv
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
ARGUMENTS = [
    "--config", ROOT / "configs" / "algorithm" / "grpo.yaml",
    "--trainer.accelerator", "cpu", "--trainer.devices", 2, "--trainer.strategy", "ddp",
    "--data.task.num_train", 16, "--data.task.num_held_out", 9,
    "--data.batch_size", 8, "--data.eval_batch_size", 4,
]  # fmt: skip


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fit_and_predict(run_alone, tmp_path):
    train = [sys.executable, ROOT / "train.py"]
    output = run_alone(*train, "fit", *ARGUMENTS, "--trainer.max_epochs", 1)
    folder = only(tmp_path, "runs/*")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # 16 prompts in batches of 8 are two iterations; the first validation is iteration 0.
    assert [row["iteration"] for row in rows] == ["0.0", "1.0", "2.0"]
    # Three samples, once.
    assert [row["iteration"] for row in lines(folder / "samples.jsonl")] == [1, 1, 1]
    assert output.count("validation after iteration 0") == 1
    assert "sync_dist" not in output
    AutoModelForCausalLM.from_pretrained(only(tmp_path, "runs/*/export"))
    only(tmp_path, "runs/*/checkpoints/last.ckpt")

    output = run_alone(*train, "predict", *ARGUMENTS, "--ckpt_path", "last")
    folder = only(tmp_path, "runs/*-predict")
    files = sorted(folder.glob("*.jsonl"))
    assert [file.name for file in files] == ["predictions-rank0.jsonl", "predictions-rank1.jsonl"]
    assert all(str(file.relative_to(tmp_path)) in output for file in files)
    # Each of the nine held-out prompts once, in both files together.
    prompts = [row["prompt"] for file in files for row in lines(file)]
    assert len(set(prompts)) == len(prompts) == 9
