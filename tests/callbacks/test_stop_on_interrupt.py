"""A signal ends a run at an iteration, with its checkpoint."""

import signal

import pytest

from lit_rl.callbacks import IterationCheckpoint, RLCallback, StopOnInterrupt


class Send(RLCallback):
    """Sends a signal in the middle of an iteration."""

    def __init__(self, iteration, times=1, number=signal.SIGINT):
        self.iteration, self.times, self.number = iteration, times, number

    def on_iteration_end(self, trainer, module):
        if module.iteration == self.iteration:
            for _ in range(self.times):
                signal.raise_signal(self.number)  # handled before it returns: two stay two


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_run_stops_after_the_iteration_and_writes_its_checkpoint(
    fit, tiny_module, tmp_path, number
):
    module, stop = tiny_module(), StopOnInterrupt()
    before = [signal.getsignal(n) for n in SIGNALS]
    fit(module, stop, Send(2, number=number), IterationCheckpoint(100), iterations=4)
    assert module.iteration == 2
    assert stop.stopped
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_no_validation_delays_the_checkpoint(fit, tiny_module, tmp_path):
    """One is due after iteration 2; the checkpoint is written before all else that ends a run."""
    seen = []

    class Order(RLCallback):
        def on_validation_start(self, trainer, module):
            seen.append("validation")

        def on_train_end(self, trainer, module):
            seen.append((tmp_path / "checkpoints" / "last.ckpt").exists())

    fit(tiny_module(), Order(), StopOnInterrupt(), Send(2), IterationCheckpoint(100), iterations=4)
    assert seen == [True]


def test_a_second_sigterm_changes_nothing(fit, tiny_module):
    """Schedulers may send it to a process and to its group."""
    module = tiny_module()
    fit(module, StopOnInterrupt(), Send(2, times=2, number=signal.SIGTERM), iterations=4)
    assert module.iteration == 2


def test_a_signal_during_a_validation_ends_the_run_behind_it(fit, tiny_module):
    class SendInValidation(RLCallback):
        def on_validation_batch_start(self, trainer, module, batch, batch_idx):
            signal.raise_signal(signal.SIGTERM)

    module = tiny_module()
    fit(module, StopOnInterrupt(), SendInValidation(), iterations=6)
    assert module.iteration == 2


def test_second_signal_stops_at_once(fit, tiny_module):
    module = tiny_module()
    # A shell lets what runs in its background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(module, StopOnInterrupt(), Send(2, times=2), iterations=4)
    finally:
        signal.signal(signal.SIGINT, before)


def test_run_without_a_signal_is_left_alone(fit, tiny_module):
    module, stop, before = tiny_module(), StopOnInterrupt(), signal.getsignal(signal.SIGINT)
    fit(module, stop, iterations=3)
    assert module.iteration == 3
    assert not stop.stopped
    assert signal.getsignal(signal.SIGINT) is before
