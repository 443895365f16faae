"""`python train.py` with two processes: one run folder, each row and each prompt once, one end."""

import csv
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lit_rl.checkpoints import MANIFEST

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
ARGUMENTS = [
    "--config", ROOT / "configs" / "algorithm" / "grpo.yaml",
    "--data.task.num_train", 16, "--data.task.num_held_out", 9,
    "--data.batch_size", 8, "--data.eval_batch_size", 4,
]  # fmt: skip


CHECKPOINTS = {
    "class_path": "lit_rl.callbacks.IterationCheckpoint",
    "init_args": {"every_n_iterations": 1, "dirpath": "each"},
}
EACH = ["--trainer.callbacks+", json.dumps(CHECKPOINTS)]
FAILING_REWARD = """
import os
import time

def fails(responses):
    with open(f"reward-{os.environ.get('LOCAL_RANK', '0')}", "a") as calls:
        calls.write(f"{time.time()}\\n")
    if os.environ.get("LOCAL_RANK", "0") == "THIS ONE" and len(responses) > 20:
        raise RuntimeError("the reward is broken")
    return [float("5" in response) for response in responses]
"""


def on_two_processes(strategy: str) -> list[object]:
    config = ROOT / "configs" / "strategy" / f"{strategy}.yaml"
    return ["--config", config, "--trainer.accelerator", "cpu", "--trainer.devices", 2]


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_fit_and_what_follows_it_again_and_predict(run_alone, tmp_path, strategy):
    train, arguments = (
        [sys.executable, ROOT / "train.py"],
        [*ARGUMENTS, *on_two_processes(strategy)],
    )
    fit = [*train, "fit", *arguments, "--trainer.max_epochs", 1, "--trainer.val_check_interval", 2]
    output = run_alone(*fit, *EACH)
    folder = only(tmp_path, "runs/*")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # 16 prompts in batches of 8 are two iterations; validations are before and behind them.
    assert [row["iteration"] for row in rows] == ["0.0", "1.0", "2.0", "2.0"]
    # Three samples, once.
    assert [row["iteration"] for row in lines(folder / "samples.jsonl")] == [1, 1, 1]
    assert output.count("validation after iteration 0") == 1
    assert "sync_dist" not in output
    AutoModelForCausalLM.from_pretrained(only(tmp_path, "runs/*/export"))
    only(tmp_path, "runs/*/checkpoints/last.ckpt")
    # The first of two is removed, be it a file or a folder.
    each = sorted(path.name for path in (tmp_path / "each").iterdir())
    assert each == ["iteration=2.ckpt", "last.ckpt"]

    # From a checkpoint that the last validation and the export came after.
    output = run_alone(*fit, "--ckpt_path", "each/last.ckpt")
    assert "no iteration is left" in output
    (again,) = [path for path in tmp_path.glob("runs/*") if path != folder]
    with (again / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row == {name: rows[-1][name] for name in row}
    for file in (folder / "export").iterdir():
        assert (again / "export" / file.name).read_bytes() == file.read_bytes()

    unfinished = folder / "checkpoints" / "iteration=9.ckpt"
    if strategy == "fsdp2":
        shutil.copytree(folder / "checkpoints" / "last.ckpt", unfinished)
        (unfinished / MANIFEST).unlink()
    else:
        unfinished.touch()

    output = run_alone(*train, "predict", *arguments, "--ckpt_path", "last")
    assert f"skipped: the checkpoint {unfinished.relative_to(tmp_path)}" in output
    folder = only(tmp_path, "runs/*-predict")
    files = sorted(folder.glob("*.jsonl"))
    assert [file.name for file in files] == ["predictions-rank0.jsonl", "predictions-rank1.jsonl"]
    assert all(str(file.relative_to(tmp_path)) in output for file in files)
    # Each of the nine held-out prompts once, in both files together.
    prompts = [row["prompt"] for file in files for row in lines(file)]
    assert len(set(prompts)) == len(prompts) == 9


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 1), ("fsdp2", 1), ("fsdp2", 0)])
def test_an_error_on_one_process_ends_both_with_its_message(run_alone, tmp_path, strategy, rank):
    """In training: the sanity check before it has fewer responses than an iteration.

    Within 30 seconds after the reward was called for the last time; all that was started has ended
    by itself then.
    """
    (tmp_path / "broken.py").write_text(FAILING_REWARD.replace("THIS ONE", str(rank)))
    reward = {
        "class_path": "lit_rl.rewards.PythonFunction",
        "init_args": {"function": "broken.fails"},
    }
    output = run_alone(
        sys.executable,
        *(ROOT / "train.py", "fit", *ARGUMENTS, *on_two_processes(strategy)),
        *("--model.reward", json.dumps(reward), "--data.batch_size", 16),
        fails=True,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    ended = time.time()
    calls = [(tmp_path / f"reward-{n}").read_text().splitlines() for n in range(2)]
    assert ended - max(float(call) for lines in calls for call in lines) < 30
    assert f"RuntimeError on rank {rank}" in output
    assert "the reward is broken" in output
