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
from lit_rl.callbacks.health_alarms import Alarm
from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.data import PromptDataModule
from lit_rl.evaluation import Evaluation
from lit_rl.generation import SamplingSettings
from lit_rl.models import RandomCausalLM
from lit_rl.rewards import PythonFunction
from lit_rl.tasks import LargestDigit

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
RANK = int(os.environ.get("LOCAL_RANK", "0"))
ITERATIONS = 8


def num_fives(responses: list[str]) -> list[float]:
    return [float(response.count("5") + 2 * response.count("7")) for response in responses]


def equal_on_one_rank(responses: list[str]) -> list[float]:
    """All groups of the second rank are without signal."""
    return num_fives(responses) if RANK == 0 else [0.0] * len(responses)


class SickIn(HealthMonitor):
    """Rings at the second of two iterations in a row."""

    def __init__(self, *iterations: int) -> None:
        super().__init__("roll_back")
        self.alarms = [
            Alarm(
                "sick",
                quantity=lambda reading: reading["iteration"],
                wrong=lambda number, reading: number in iterations,
                patience=2,
                sentence="iteration {value}",
                too_fast=True,
            )
        ]
        self._counts = {"sick": 0}


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
        source=RandomCausalLM(alphabet="0123456789>", config=LLAMA),
        reward=PythonFunction(reward),
        group_size=4,
        sampling=SamplingSettings(max_new_tokens=4),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        update_epochs=2,
        evaluation=Evaluation(num_samples=0),
    )
    task = LargestDigit(num_digits=2, num_train=24, num_held_out=6)
    data = PromptDataModule(task, batch_size=6, eval_batch_size=6, max_prompt_tokens=8)
    recorder = Recorder()
    keeper = IterationCheckpoint(1, save_top_k=-1, dirpath=str(folder))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[VerifiedCheckpointIO()],
        callbacks=[RewardMetrics(), RatioMetrics(), monitor, recorder, keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=2 * ITERATIONS,
        default_root_dir=folder,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
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
        "roll_back": run(folder / "roll_back", SickIn(5, 6)),
        "resumed": run(
            folder / "resumed", SickIn(5, 6), ckpt_path=folder / "roll_back" / "iteration=5.ckpt"
        ),
    }
    torch.save(seen, folder / f"{RANK}.pt")


if __name__ == "__main__":
    main()
