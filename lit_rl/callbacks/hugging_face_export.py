"""The trained policy as a Hugging Face model."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_rl.callbacks.run_folder import run_folder
from lit_rl.models import save_pretrained


class HuggingFaceExport(Callback):
    """Writes the policy and its tokenizer at the end of training, for `from_pretrained` to load.

    Args:
        folder: where to write it, in the run folder.
    """

    def __init__(self, folder: str = "export") -> None:
        self.folder = folder
        self.path: Path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder."""
        self.path = run_folder(trainer) / self.folder

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the model."""
        if trainer.is_global_zero:
            save_pretrained(pl_module.policy.model, pl_module.tokenizer, self.path)
