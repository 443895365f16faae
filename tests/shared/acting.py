"""Callbacks that act at given iterations."""

from lit_rl.callbacks import HealthMonitor, RLCallback
from lit_rl.callbacks.health_alarms import Alarm


class StopAfter(RLCallback):
    """Writes a checkpoint after some iterations and ends the run there."""

    def __init__(self, iterations, path):
        self.iterations, self.path = iterations, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if module.iteration == self.iterations:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class Sick(HealthMonitor):
    """Rolls back at the second of two given iterations in a row."""

    def __init__(self, *iterations, too_fast=True):
        super().__init__("roll_back", max_held_out_drop=None)
        self.alarms = [
            Alarm(
                "sick",
                quantity=lambda reading: reading["iteration"],
                wrong=lambda number, reading: number in iterations,
                patience=2,
                sentence="iteration {value}",
                too_fast=too_fast,
            )
        ]
        self._counts = {"sick": 0}
