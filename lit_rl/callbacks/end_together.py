"""An error on one process that ends all of them."""

import os
import sys
import threading
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

KEY = "lit_rl/error"
SECONDS = 1.0
"""Time from one look at the others to the next."""


class EndTogether(Callback):
    """Ends the run on all processes, with its message, when one of them meets an error.

    Without it the others wait for the one that is gone until their time is up. A thread of each
    process looks at a store that all of them share; it works while the process itself waits.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to look at the others."""
        if trainer.world_size > 1 and distributed.is_initialized() and self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._watch, args=[trainer], daemon=True)
            self._thread.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look no more."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell the others of an error, and leave them the time to see it."""
        if self._thread is None or not isinstance(exception, Exception):
            return
        self._stop()
        store = _get_default_store()
        if not store.check([KEY]):
            store.set(KEY, f"{type(exception).__name__} on rank {trainer.global_rank}: {exception}")
        time.sleep(3 * SECONDS)

    def _stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, trainer: Trainer) -> None:
        store: Any = _get_default_store()
        while not self._ended.wait(SECONDS):
            try:
                failed = store.check([KEY])
            except distributed.DistError:  # rank 0, which keeps the store, has ended
                return
            if failed:
                message = store.get(KEY).decode()
                for logger in trainer.loggers:
                    logger.save()
                sys.stderr.write(f"error: {message}\n")
                sys.stderr.flush()
                os._exit(1)  # the process itself may wait for one that is gone
