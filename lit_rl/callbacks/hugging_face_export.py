"""The trained policy as a Hugging Face model."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_rl.callbacks.run_folder import run_folder
from lit_rl.models import save_pretrained


class HuggingFaceExport(Callback):
    """Writes the policy and its tokenizer at the end of training, for `from_pretrained` to load.

    Args:
        folder: where to write it, in the run folder.
        adapter_only: write the adapter alone, as a folder of peft, in the place of a whole model
            with the adapter merged into it.
    """

    def __init__(self, folder: str = "export", adapter_only: bool = False) -> None:
        self.folder = folder
        self.adapter_only = adapter_only
        self.path: Path

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Find the folder.

        Raises:
            ValueError: if the adapter of a policy without one is to be written.
        """
        if self.adapter_only and pl_module.adapter is None:
            raise ValueError(
                "adapter_only of HuggingFaceExport needs an adapter, but the policy is trained in "
                "full: set model.adapter, such as lit_rl.models.LoRA, or adapter_only false"
            )
        self.path = run_folder(trainer) / self.folder

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the model."""
        with pl_module.parallelism.whole(pl_module.policy) as policy:
            if trainer.is_global_zero:
                save_pretrained(
                    policy.model, pl_module.tokenizer, self.path, adapter_only=self.adapter_only
                )
