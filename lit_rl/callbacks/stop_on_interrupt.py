"""A Ctrl-C that loses nothing."""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class StopOnInterrupt(Callback):
    """Ends the run after the iteration in which Ctrl-C is pressed, as at the end of training.

    The last checkpoint, the curve and the export are written. A second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._previous: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signal, which only the main thread may."""
        self._interrupted = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, self._previous)
        rank_zero_info("The run stops after this iteration. Press Ctrl-C again to stop at once.")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let all ranks stop together."""
        stop = trainer.strategy.reduce_boolean_decision(self._interrupted, all=False)
        if stop and not trainer.should_stop:
            trainer.should_stop = True
            rank_zero_info(
                f"Stopped after iteration {pl_module.iteration}; --ckpt_path last goes on"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signal back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the signal back."""
        self.on_train_end(trainer, pl_module)
