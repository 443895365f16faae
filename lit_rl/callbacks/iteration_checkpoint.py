"""Checkpoints by the number of iterations."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_rl.checkpoints import PART_SUFFIX


class IterationCheckpoint(ModelCheckpoint):
    """Writes a checkpoint every n iterations, and `last.ckpt` at the end of training.

    Lightning's own `every_n_train_steps` counts optimizer steps, of which an iteration has several.

    Without `monitor` a checkpoint is written when the iteration is over and its metrics are logged:
    before the validation or the iteration that follows. With `monitor` it waits for the next
    validation, so the metric that ranks it was measured on the very weights that it
    holds. Monitor metrics of validation: a training metric such as `reward/mean` belongs to the
    weights before the updates of its iteration.

    Args:
        every_n_iterations: iterations from one checkpoint to the next.
        monitor: the validation metric that ranks checkpoints, such as val/greedy_accuracy; null
            ranks by time.
        mode: whether a larger (max) or a smaller (min) metric is better.
        save_top_k: how many of the best checkpoints stay; -1 for all. Without `monitor` only the
            newest (1), all (-1) or none (0).
        save_last: keep `last.ckpt` beside them, which is always the newest; without `monitor` a
            link to it.
        filename: name of the files; {iteration} and the names of metrics are filled in.
        dirpath: folder of the files; null: `checkpoints` in the run folder.

    Attributes:
        kept: the iteration of each file of this run that is there to stay, by its path; also of
            files that the run wrote before it was resumed.
    """

    def __init__(
        self,
        every_n_iterations: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        save_top_k: int = 1,
        save_last: bool = True,
        filename: str = "iteration={iteration:d}",
        dirpath: str | None = None,
    ) -> None:
        if every_n_iterations < 1:
            raise ValueError(
                f"every_n_iterations is {every_n_iterations}, must be at least 1; leave the "
                "callback out for no checkpoints"
            )
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            # With a metric the newest weights may not be among the best, which a link could name.
            save_last="link" if save_last and monitor is None else save_last,
            auto_insert_metric_name=False,
            every_n_epochs=0,
        )
        self.every_n_iterations = every_n_iterations
        self.kept: dict[str, int] = {}
        self._due = False
        self._measured_iteration = -1
        self._saved_iteration = -1

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Let the link point to the new file in one step: it never is without a target."""
        if trainer.is_global_zero:
            link = Path(linkpath)
            new = link.with_name(f".{link.name}{PART_SUFFIX}")
            new.unlink(missing_ok=True)
            try:
                new.symlink_to(os.path.relpath(filepath, link.parent))
            except OSError:  # a file system without links
                shutil.copy(filepath, new)
            new.replace(link)
        trainer.strategy.barrier()

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return self._generate_state_key(
            monitor=self.monitor, mode=self.mode, every_n_iterations=self.every_n_iterations
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ranking, which files there are, and whether another waits for its metric."""
        return {**super().state_dict(), "kept": dict(self.kept), "due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on ranking the checkpoints of the same folder; a new folder begins anew."""
        self.kept = dict(state_dict.get("kept", {}))
        self._due = state_dict.get("due", False)
        if state_dict["dirpath"] == self.dirpath:
            super().load_state_dict(state_dict)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write a file, in which its own path stands, too."""
        if filepath != self.last_model_path:  # which the next one replaces
            module: Any = trainer.lightning_module
            self.kept[os.path.abspath(filepath)] = module.iteration
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.kept.pop(os.path.abspath(filepath), None)
        super()._remove_checkpoint(trainer, filepath)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Take what a run starts from as saved."""
        super().on_train_start(trainer, pl_module)
        self._saved_iteration = pl_module.iteration

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note every n iterations that a checkpoint is due: Lightning logs only after this hook."""
        self._due |= pl_module.iteration % self.every_n_iterations == 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the checkpoint that is due, unless it waits for a metric."""
        if self._due and self.monitor is None:
            self._save(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the checkpoint that is due, unless it waits for a metric."""
        if self._due and self.monitor is None:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the checkpoint that is due, and at the end of a run do so before anything else."""
        if self._due and self.monitor is None:
            self._save(trainer, pl_module)
        elif trainer.should_stop:
            self.on_train_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the checkpoint that waits for a metric."""
        self._measured_iteration = pl_module.iteration
        if self._due:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the weights at the end of training, where they are in no checkpoint yet."""
        if self._saved_iteration != pl_module.iteration:
            self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, module: Any) -> None:
        self._due = False
        # Lightning says nothing of this attribute.
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._saved_iteration = module.iteration
        candidates = self._monitor_candidates(trainer)
        if self.monitor is None or self._measured_iteration == module.iteration:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        module: Any = trainer.lightning_module
        candidates = super()._monitor_candidates(trainer)
        return candidates | {"iteration": torch.tensor(module.iteration)}
