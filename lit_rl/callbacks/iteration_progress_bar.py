"""How far a run is, in one line."""

import math
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import Tensor

from lit_rl.callbacks.held_out import held_out_metrics, held_out_names, with_standard_error
from lit_rl.callbacks.terminal import console

SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("KL", "kl/reference_k1", ".4f"),
    ("tokens/s", "throughput/tokens_per_second", ",.0f"),
)


class IterationProgressBar(ProgressBar):
    """Shows iteration, reward, KL, tokens per second and the time left, over the whole run.

    On a terminal it is a bar. Elsewhere, as in a log file, it prints plain lines.

    Args:
        seconds_between_lines: least time between two plain lines, in seconds; the first and the
            last iteration always have one.
    """

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        super().__init__()
        self.seconds_between_lines = seconds_between_lines
        self.is_enabled = True
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line = 0.0
        self._first_iteration = 0
        self._start = 0.0
        self._total: int | None = None

    def enable(self) -> None:
        """Show something."""
        self.is_enabled = True

    def disable(self) -> None:
        """Show nothing, as on all ranks but the first."""
        self.is_enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        plain = {"markup": False, "highlight": False, "soft_wrap": True}
        console().print(*args, **{**plain, **kwargs})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the clock of the plain lines."""
        super().setup(trainer, pl_module, stage)
        self._last_line = perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock by which the time left is guessed."""
        self._first_iteration = pl_module.iteration
        self._total = pl_module.num_iterations
        self._start = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the iteration that has just ended."""
        done = pl_module.iteration
        texts = metric_texts(trainer.callback_metrics)
        if self._total is not None:
            per_iteration = (perf_counter() - self._start) / (done - self._first_iteration)
            left = timedelta(seconds=round(per_iteration * (self._total - done)))
            texts.append(f"{left} left")
        at_edge = done in (self._first_iteration + 1, self._total)
        self._show("iteration", done, self._total, ", ".join(texts), always=at_edge)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show how far the validation is."""
        sanity = trainer.sanity_checking
        batches = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
        self._show("validation", batch_idx + 1, _sum(batches))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print what the validation measured."""
        self._hide("validation")
        if self.is_enabled:
            metrics = held_out_metrics(trainer)
            texts = [
                f"{name.removeprefix('val/')} {with_standard_error(metrics, name)}"
                for name in held_out_names(metrics)
            ]
            self.print(f"validation after iteration {pl_module.iteration}: {', '.join(texts)}")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show how far the prediction is."""
        self._show("prediction", batch_idx + 1, _sum(trainer.num_predict_batches))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar as it stands."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Free the terminal."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free the terminal."""
        self._close()

    def _show(
        self, what: str, done: int, total: int | None, text: str = "", always: bool = False
    ) -> None:
        if not self.is_enabled:
            return
        if console().is_interactive:
            self._draw(what, done, total, text)
        elif always or perf_counter() - self._last_line >= self.seconds_between_lines:
            self._last_line = perf_counter()
            of = "" if total is None else f"/{total}"
            self.print(f"{what} {done}{of}" + (f": {text}" if text else ""))

    def _draw(self, what: str, done: int, total: int | None, text: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                console=console(),
                refresh_per_second=4,
            )
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, text=text)
        self._bar.update(self._tasks[what], completed=done, total=total, text=text)

    def _hide(self, what: str) -> None:
        if self._bar is not None and what in self._tasks:
            self._bar.remove_task(self._tasks.pop(what))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks = None, {}


def metric_texts(metrics: Mapping[str, Tensor]) -> list[str]:
    """Return reward, KL and tokens per second as texts, those of them that were logged.

    Example:
        >>> import torch
        >>> metric_texts({"reward/mean": torch.tensor(0.5)})
        ['reward 0.500']
    """
    return [
        f"{label} {metrics[name].item():{form}}" for label, name, form in SHOWN if name in metrics
    ]


def _sum(batches: list[int | float]) -> int | None:
    """Return the number of batches of all loaders, None where one is without end."""
    total = sum(batches)
    return None if math.isinf(total) else int(total)
