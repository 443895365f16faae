"""The responses of `predict`, in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lit_rl.callbacks.json_lines import append_json_lines
from lit_rl.callbacks.run_folder import run_folder
from lit_rl.callbacks.terminal import console


class ResponseWriter(BasePredictionWriter):
    """Writes what `predict_step` returns to `predictions.jsonl` in the run folder, batch by batch.

    Each response is one line. With several processes each writes its own file,
    `predictions-rank0.jsonl` and so on. A file of an earlier `predict` in the folder is replaced.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._paths: list[Path]
        self._path: Path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the files of all processes, and that of this one."""
        folder, ranks = run_folder(trainer), range(trainer.world_size)
        names = [f"predictions-rank{rank}" for rank in ranks] if len(ranks) > 1 else ["predictions"]
        self._paths = [folder / f"{name}.jsonl" for name in names]
        self._path = self._paths[trainer.global_rank]

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an empty file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: list[dict[str, Any]],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the responses of one batch."""
        append_json_lines(self._path, prediction)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where the responses are."""
        if trainer.is_global_zero:
            for path in self._paths:
                console().print(f"responses: {path}", soft_wrap=True, markup=False)
