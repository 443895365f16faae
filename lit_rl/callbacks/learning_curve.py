"""A picture of the run: reward and held-out accuracy over iterations."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_rl.callbacks.held_out import STANDARD_ERROR, held_out_metrics, held_out_names
from lit_rl.callbacks.run_folder import run_folder

Point = dict[str, float]


class LearningCurve(Callback):
    """Draws `curve.png` in the run folder after each validation and at the end of training.

    The upper half is the mean reward of each iteration, the lower half the accuracies on held-out
    prompts with bands of one standard error. A validation before training is iteration 0; this
    callback hands it to the loggers, which Lightning leaves out then. The curve goes on after a
    resume.
    """

    def __init__(self) -> None:
        self.rewards: list[Point] = []
        self.validations: list[Point] = []
        self.path: Path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the file."""
        self.path = run_folder(trainer) / "curve.png"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the reward of an iteration."""
        if (reward := trainer.callback_metrics.get("reward/mean")) is not None:
            self.rewards.append({"iteration": float(pl_module.iteration), "reward": reward.item()})

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Note the held-out metrics and draw."""
        if trainer.state.fn != "fit":
            return
        point = {"iteration": float(pl_module.iteration), **held_out_metrics(trainer)}
        if trainer.sanity_checking:
            for logger in trainer.loggers:
                logger.log_metrics(point, step=0)
        # A second `fit` of one trainer may begin with the validation that ended the first.
        self.validations = [p for p in self.validations if p["iteration"] < point["iteration"]]
        self.validations.append(point)
        self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the whole run."""
        self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the curve so far."""
        return {"rewards": list(self.rewards), "validations": list(self.validations)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the curve of a checkpoint."""
        self.rewards = list(state_dict["rewards"])
        self.validations = list(state_dict["validations"])

    def _draw(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _young_garbage_collected():
                learning_curve(self.rewards, self.validations).savefig(self.path)


@contextmanager
def _young_garbage_collected() -> Iterator[None]:
    """Free at the end what the body leaves in cycles.

    A figure with its pixels, some megabytes, refers to itself, and would wait in memory for a
    collection that comes once in hundreds of iterations. Here it is not old yet, so that it is
    found without a look at everything else.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def learning_curve(rewards: list[Point], validations: list[Point]) -> Figure:
    """Return the figure of a run.

    Args:
        rewards: iteration and mean reward, one point per iteration.
        validations: iteration and held-out metrics, one point per validation.
    """
    figure = Figure(figsize=(7, 6), dpi=120)
    margins = {"left": 0.12, "right": 0.97, "bottom": 0.08, "top": 0.95, "hspace": 0.15}
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw=margins)
    _draw_rewards(upper, rewards)
    _draw_accuracies(lower, validations)
    lower.set_xlabel("iteration (batches of prompts)")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_rewards(axes: Axes, rewards: list[Point]) -> None:
    axes.set_ylabel("reward (task units)")
    axes.set_title("training: mean reward of the sampled responses", loc="left", fontsize="medium")
    if not rewards:
        return
    iterations = np.array([point["iteration"] for point in rewards])
    values = np.array([point["reward"] for point in rewards])
    window = max(1, len(values) // 20)
    axes.plot(iterations, values, color="C0", alpha=1 if window == 1 else 0.3, linewidth=1)
    if window > 1:
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        label = f"mean of {window} iterations"
        axes.plot(iterations[window - 1 :], smooth, color="C0", linewidth=2, label=label)
        axes.legend(frameon=False, fontsize="small", loc="lower right")


def _draw_accuracies(axes: Axes, validations: list[Point]) -> None:
    axes.set_ylabel("fraction of held-out prompts")
    axes.set_ylim(-0.02, 1.02)
    axes.set_title("held-out prompts: accuracy ± standard error", loc="left", fontsize="medium")
    names = dict.fromkeys(name for point in validations for name in held_out_names(point))
    accuracies = [n for n in names if n.endswith("_accuracy") or n.startswith("val/pass@")]
    for name in accuracies:
        points = [point for point in validations if name in point]
        iterations = [point["iteration"] for point in points]
        values = np.array([point[name] for point in points])
        errors = np.array([point.get(name + STANDARD_ERROR, 0.0) for point in points])
        label = name.removeprefix("val/").replace("_", " ")
        (line,) = axes.plot(iterations, values, marker="o", markersize=3, label=label)
        low, high = values - errors, values + errors
        axes.fill_between(iterations, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    if accuracies:
        axes.legend(frameon=False, fontsize="small", loc="lower right")
