"""Signals that end a run lose nothing."""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_rl.algorithms.due_validation import is_validation_due

EXIT_CODE = 75
"""With which the command line ends when a signal stopped the run with everything saved.

The "temporary failure, try again" of sysexits.h: `--ckpt_path last` goes on.
"""


class StopOnInterrupt(Callback):
    """Ends the run after the iteration in which a signal comes, as at the end of training.

    The signals are Ctrl-C (SIGINT), SIGTERM, and SIGUSR1 or what else SLURM sends before its limit
    of time. One that comes to any rank stops all of them. The last checkpoint, the curve and the
    export are written; a validation that is due is left to the run that goes on. A second Ctrl-C
    stops at once.

    Lightning's own handling of these signals is replaced: it would save in the middle of an
    iteration, and leave without a checkpoint, or wait for other ranks for ever.

    Attributes:
        stopped: whether a signal ended the run.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals, which only the main thread may."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self.stopped = self._interrupted = False
        for number in signals(trainer):
            self._previous[number] = signal.signal(number, self._interrupt)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals where there was no validation before."""
        self.on_sanity_check_start(trainer, pl_module)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        hint = ""
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
            hint = ". Press Ctrl-C again to stop at once"
        if not self._interrupted:
            name = signal.Signals(number).name
            rank_zero_info(f"{name}: the run stops after this iteration{hint}")
        self._interrupted = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let all ranks stop together."""
        self._stop(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Let all ranks stop together."""
        if not trainer.sanity_checking:
            self._stop(trainer, pl_module)

    def _stop(self, trainer: Trainer, module: Any) -> None:
        stop = trainer.strategy.reduce_boolean_decision(self._interrupted, all=False)
        if stop and not self.stopped:
            if not trainer.validating:
                module.validation_due = is_validation_due(trainer)
            self.stopped = trainer.should_stop = True
            # Lightning would validate at the end of a run, which can take longer than a scheduler
            # waits.
            trainer.fit_loop.epoch_loop._skip_next_val = not trainer.validating
            rank_zero_info(f"Stopped after iteration {module.iteration}; --ckpt_path last goes on")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the signals back."""
        self.on_train_end(trainer, pl_module)


def signals(trainer: Trainer) -> set[int]:
    """Return the signals that end a run, where the system has them."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1")
    found = {int(getattr(signal, name)) for name in names if hasattr(signal, name)}
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
        found.add(int(environment.requeue_signal))
    return found
