"""What a run has learnt, in a few lines at its end."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.table import Table

from lit_rl.algorithms.hooks import callbacks_of
from lit_rl.callbacks.held_out import held_out_metrics, held_out_names, with_standard_error
from lit_rl.callbacks.hugging_face_export import HuggingFaceExport
from lit_rl.callbacks.learning_curve import LearningCurve
from lit_rl.callbacks.sample_log import sample_table
from lit_rl.callbacks.terminal import console


class RunSummary(Callback):
    """Prints held-out metrics before and after training, some responses, and where everything is.

    "Before" is the first validation of the run and "after" the last, also of one that was resumed;
    where there was no other there is one column. A line says so where the last was not of the end.

    Args:
        num_samples: responses to held-out prompts that are shown.
    """

    def __init__(self, num_samples: int = 3) -> None:
        self.num_samples = num_samples
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self._start = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start = perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Note the first and the last held-out metrics."""
        self.after = {"iteration": float(pl_module.iteration), **held_out_metrics(trainer)}
        self.before = self.before or self.after

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the summary."""
        if not trainer.is_global_zero:
            return
        seconds = perf_counter() - self._start
        samples = pl_module.validation_samples[: self.num_samples]
        if self.after:
            console().print(metrics_table(self.before, self.after))
        if samples:
            console().print(sample_table("greedy responses to held-out prompts", samples))
        lines = {"iterations": str(pl_module.iteration), "seconds": f"{seconds:.1f}"}
        if self.after and self.after["iteration"] != pl_module.iteration:
            last = f"iteration {self.after['iteration']:.0f}"
            lines["last validation"] = f"{last}; the weights of the end were not validated"
        for name, value in (lines | _paths(trainer)).items():
            console().print(f"{name}: {value}", soft_wrap=True, markup=False, highlight=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the first and the last held-out metrics."""
        return {"before": dict(self.before), "after": dict(self.after)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the metrics of the runs before."""
        self.before = dict(state_dict["before"])
        self.after = dict(state_dict.get("after", self.before))


def metrics_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Return held-out metrics before and after training, with standard errors where known.

    Args:
        before: metrics by name, and the `iteration` after which they were measured; a standard
            error has the name of its metric and a suffix.
        after: the same later; of the same iteration, they are one column.
    """
    table = Table(title="held-out prompts", title_justify="left")
    table.add_column("metric")
    columns = {f"iteration {column['iteration']:.0f}": column for column in (before, after)}
    for title in columns:
        table.add_column(title, justify="right")
    for name in held_out_names(after):
        table.add_row(name, *(with_standard_error(column, name) for column in columns.values()))
    return table


def _paths(trainer: Trainer) -> dict[str, str]:
    paths = {}
    for callback in callbacks_of(trainer, Callback):
        if isinstance(callback, LearningCurve):
            paths["curve"] = str(callback.path)
        if isinstance(callback, HuggingFaceExport):
            paths["export"] = str(callback.path)
        if isinstance(callback, ModelCheckpoint):
            paths["checkpoint"] = callback.last_model_path or callback.best_model_path
    return {name: path for name, path in paths.items() if path}
