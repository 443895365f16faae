"""A validation that a run was stopped before, made up for by the run that goes on."""

from typing import Any

from lightning.pytorch import Trainer


def is_validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the iteration that is just over.

    To be asked before the run is told to stop, behind which Lightning always validates.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    fetcher: Any = trainer.fit_loop._data_fetcher
    return epoch_loop._should_check_val_fx(fetcher)


def validate_now(trainer: Trainer) -> None:
    """Validate before the first iteration of a run that goes on, as behind the iteration before.

    An epoch counts as completed only behind the validation at its end.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    ended = int(not trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    epochs.completed -= ended
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation.restarting = False
    is_first = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    validation.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = is_first
    epochs.completed += ended
