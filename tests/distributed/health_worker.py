"""Runs HealthMonitor in two processes, and writes what each of them saw.

    python health_worker.py FOLDER

writes `FOLDER/0.pt` and `FOLDER/1.pt`: by scenario weights, learning rates and what rang.
"""

import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import (
    HealthMonitor,
    IterationCheckpoint,
    RatioMetrics,
    RewardMetrics,
    RLCallback,
)
from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.evaluation import Evaluation
from lit_rl.generation import SamplingSettings
from lit_rl.rewards import PythonFunction

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

from acting import Sick
from tiny_job import TRAINER, build_data, build_source, num_fives

RANK = int(os.environ.get("LOCAL_RANK", "0"))
ITERATIONS = 8


def equal_on_one_rank(responses: list[str]) -> list[float]:
    """All groups of the second rank are without signal."""
    return num_fives(responses) if RANK == 0 else [0.0] * len(responses)


class Recorder(RLCallback):
    """Notes what each iteration begins with."""

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.rates: list[float] = []

    def on_rollout(self, trainer, module, scored, experience):
        weights = [parameter.detach().flatten() for parameter in module.policy.parameters()]
        self.weights.append(torch.cat(weights))
        self.rates.append(module.raw_optimizer.param_groups[0]["lr"])


def run(folder: Path, monitor: HealthMonitor, reward=num_fives, ckpt_path=None) -> dict[str, Any]:
    """Train with two processes and return what this one saw."""
    module = GRPO(
        source=build_source(),
        reward=PythonFunction(reward),
        group_size=4,
        sampling=SamplingSettings(max_new_tokens=4),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        update_epochs=2,
        evaluation=Evaluation(num_samples=0),
    )
    recorder = Recorder()
    keeper = IterationCheckpoint(1, save_top_k=-1, dirpath=str(folder))
    trainer = L.Trainer(
        **{**TRAINER, "enable_checkpointing": True},
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[VerifiedCheckpointIO()],
        callbacks=[RewardMetrics(), RatioMetrics(), monitor, recorder, keeper],
        limit_val_batches=0,
        max_steps=2 * ITERATIONS,
        default_root_dir=folder,
    )
    trainer.fit(module, build_data(), ckpt_path=ckpt_path)
    return {
        "weights": recorder.weights,
        "rates": recorder.rates,
        "iterations": module.iteration,
        "monitor": monitor.state_dict(),
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    names = inspect.signature(HealthMonitor).parameters
    off = {name: None for name in names if name.startswith(("min_", "max_"))}
    # Finite numbers and a signal are all that is asked for.
    quiet = partial(HealthMonitor, patience=2, **off)
    # A KL that every iteration exceeds, so that an alarm rings after each second one.
    moves = partial(HealthMonitor, patience=2, **{**off, "max_update_kl": 0.0})
    seen = {
        "stop": run(folder / "stop", moves("stop")),
        "lower": run(folder / "lower", moves("lower_learning_rate")),
        "one_rank": run(folder / "one_rank", quiet("stop"), equal_on_one_rank),
        "roll_back": run(folder / "roll_back", Sick(5, 6)),
        "resumed": run(
            folder / "resumed", Sick(5, 6), ckpt_path=folder / "roll_back" / "iteration=5.ckpt"
        ),
    }
    torch.save(seen, folder / f"{RANK}.pt")


if __name__ == "__main__":
    main()
