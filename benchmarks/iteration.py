"""Where the time of a GRPO iteration goes, and what callbacks and loggers add to it."""

import argparse
import functools
import io
import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lit_rl.cli import RLCLI

CONFIGS = Path(__file__).parent.parent / "configs"
WARM_UP = 3
"""Iterations that are not counted: memory is allocated, and libraries set themselves up."""

PARTS = {
    "generate": "rollout",
    "score": "reward",
    "prepare": "old log-probs, advantages",
    "update": "update",
}


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()


class PartTimer(Callback):
    """Times whole iterations, and within them the methods of the module that `PARTS` names."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self._start: float | None = None
        self._parts: dict[str, float] = defaultdict(float)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in PARTS:
            setattr(pl_module, name, self._timed(name, getattr(pl_module, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = method(*args, **kwargs)
            self._parts[name] += now() - start
            if name == "generate":
                self._parts["tokens"] = float(result.mask.sum())
            return result

        return timed

    def on_train_batch_start(self, *args: Any) -> None:
        """An iteration lasts until the next begins: loggers and the next batch are part of it."""
        if self._start is not None:
            self.iterations.append({**self._parts, "iteration": now() - self._start})
        self._parts.clear()
        self._start = now()


def run(configs: list[str], iterations: int, *, with_callbacks: bool) -> list[dict[str, float]]:
    """Train for some iterations and return the seconds of each, without the warm-up."""
    args = ["fit"]
    for config in configs:
        args += ["--config", config]
    if not with_callbacks:
        args += ["--trainer.logger", "false", "--trainer.callbacks", "null"]
    args += [f"--trainer.callbacks+={__name__}.PartTimer"]
    args += ["--trainer.limit_train_batches", str(WARM_UP + iterations + 1)]
    args += ["--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0"]
    args += ["--trainer.enable_progress_bar", "false"]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        args += ["--trainer.default_root_dir", folder]
        cli = RLCLI(base_config=CONFIGS / "base.yaml", args=args)
    (timer,) = (c for c in cli.trainer.callbacks if isinstance(c, PartTimer))
    return timer.iterations[WARM_UP:]


def medians(iterations: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(entry[name] for entry in iterations) for name in iterations[0]}


def parts_table(seconds: dict[str, float]) -> Table:
    tokens, whole = seconds["tokens"], seconds["iteration"]
    rows = {title: seconds[name] for name, title in PARTS.items()}
    rows["rest: data, Lightning"] = whole - sum(rows.values())
    table = Table(title=f"One iteration of {tokens:.0f} tokens, without callbacks and loggers")
    for column in ("part", "ms", "share", "tokens / s"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for title, part in (rows | {"iteration": whole}).items():
        rate = "" if title.startswith("rest") else f"{tokens / part:,.0f}"
        table.add_row(title, f"{1000 * part:.1f}", f"{part / whole:.0%}", rate)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], help="read after base and GRPO's")
    parser.add_argument("--iterations", type=int, default=20, help="of each run; an epoch at most")
    parser.add_argument("--rounds", type=int, default=2, help="runs with and without callbacks")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    configs = [str(CONFIGS / "algorithm" / "grpo.yaml"), *arguments.config]
    bare: list[dict[str, float]] = []
    configured: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        bare += run(configs, arguments.iterations, with_callbacks=False)
        configured += run(configs, arguments.iterations, with_callbacks=True)
    console = Console()
    console.print(parts_table(medians(bare)))
    without, with_ = medians(bare)["iteration"], medians(configured)["iteration"]
    console.print(
        f"With the callbacks and loggers of base.yaml an iteration takes {1000 * with_:.1f} ms "
        f"instead of {1000 * without:.1f} ms: ratio {with_ / without:.2f}"
    )


if __name__ == "__main__":
    main()
