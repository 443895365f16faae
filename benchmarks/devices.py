"""Strong scaling: the same run on one process and on two, with one thread each.

    python benchmarks/devices.py            # a few minutes on two cores

Processes and strategies take turns. The results are written to `benchmarks/results`: a table, and
all numbers as JSON. Two cores are needed that nothing else uses: `two apart` shows whether they are
there, since two runs that share nothing then take half of the seconds of one.
"""

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from compare.report import PACKAGES, environment, table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
STAGES = ("rollout", "update", "iteration")
ALONE = "one process"
APART = "two apart"
"""Two runs at once, each of half the prompts, that know nothing of each other: what there is."""

LAUNCHES = {
    ALONE: [],
    APART: [],
    "ddp": ["--config", "configs/strategy/ddp.yaml", "--trainer.devices", "2"],
    "fsdp2": ["--config", "configs/strategy/fsdp2.yaml", "--trainer.devices", "2"],
    "deepspeed_2": [
        *("--trainer.strategy", "lit_rl.strategies.DeepSpeedOnCPU"),
        *("--trainer.strategy.stage", "2", "--trainer.devices", "2"),
    ],
    "deepspeed_3": [
        *("--trainer.strategy", "lit_rl.strategies.DeepSpeedOnCPU"),
        *("--trainer.strategy.stage", "3", "--trainer.devices", "2"),
    ],
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
}
WORK = {
    "model.source.config": json.dumps(MODEL),
    "model.sampling": json.dumps({"max_new_tokens": 48, "min_new_tokens": 48}),
    "model.group_size": "8",
    "model.update_epochs": "1",
    "model.num_minibatches": "1",
    "data.batch_size": "32",
    "trainer.accelerator": "cpu",
    "trainer.limit_val_batches": "0",
    "trainer.num_sanity_val_steps": "0",
    "trainer.max_epochs": "1",
}


def slower_of_two(iterations: int) -> dict[str, float]:
    """Return the seconds of the slower of two runs at the same time, each of half the prompts."""
    half = str(int(WORK["data.batch_size"]) // 2)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(seconds, ALONE, iterations, half) for _ in range(2)]
    return {stage: max(run.result()[stage] for run in runs) for stage in STAGES}


def seconds(name: str, iterations: int, prompts: str = WORK["data.batch_size"]) -> dict[str, float]:
    """Return the median seconds of each stage, the first iteration left out."""
    with tempfile.TemporaryDirectory() as folder:
        work = {
            **WORK,
            "data.batch_size": prompts,
            "trainer.limit_train_batches": str(iterations + 1),
            "trainer.default_root_dir": folder,
        }
        options = [text for key, value in work.items() for text in (f"--{key}", value)]
        grpo = ["--config", "configs/algorithm/grpo.yaml"]
        run = subprocess.run(
            [sys.executable, "train.py", "fit", *grpo, *options, *LAUNCHES[name]],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"the run of {name} failed:\n{run.stderr[-4000:]}")
        (file,) = Path(folder).glob("*/metrics.csv")
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["time/update_seconds"]][1:]
    return {stage: median(float(row[f"time/{stage}_seconds"]) for row in rows) for stage in STAGES}


def report(measured: dict[str, list[dict[str, float]]]) -> str:
    """Return the table: seconds of the medians, and how many times faster than one process."""
    rows = []
    for name, runs in measured.items():
        row = [name]
        for stage in STAGES:
            here, alone = (median(run[stage] for run in r) for r in (runs, measured[ALONE]))
            row += [f"{here:.3f}", f"{alone / here:.2f}"]
        rows.append(row)
    return table(["", *(text for stage in STAGES for text in (f"{stage} (s)", "ratio"))], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--iterations", type=int, default=3, help="per process, after one more")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", nargs="+", default=list(LAUNCHES), choices=list(LAUNCHES))
    arguments = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
    for _ in range(arguments.rounds):
        for name, runs in measured.items():
            run = slower_of_two if name == APART else partial(seconds, name)
            runs.append(run(arguments.iterations))
            print(name, runs[-1], flush=True)
    where = environment(*PACKAGES)
    command = shlex.join(["python", "benchmarks/devices.py", *sys.argv[1:]])
    everything = {**where, "command": command, "threads": 1, "seconds": measured}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "devices.json").write_text(json.dumps(everything, indent=1) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    text = [
        "# devices",
        f"`{command}`, {where['date']}. {where['machine']}; one thread per process; {versions}. "
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.",
        f"GRPO on a random Llama ({MODEL['hidden_size']} x {MODEL['num_hidden_layers']}), 32 "
        "prompts with 8 responses of 48 tokens. Ratio: seconds of one process over those of two.",
        report(measured),
    ]
    (arguments.out / "devices.md").write_text("\n\n".join(text) + "\n")
    print(text[-1])


if __name__ == "__main__":
    main()
