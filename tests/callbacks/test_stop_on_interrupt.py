"""Ctrl-C ends a run at an iteration, with its checkpoint."""

import signal

import pytest

from lit_rl.callbacks import IterationCheckpoint, RLCallback, StopOnInterrupt


class PressCtrlC(RLCallback):
    """Sends the signal in the middle of an iteration."""

    def __init__(self, iteration, times=1):
        self.iteration, self.times = iteration, times

    def on_iteration_end(self, trainer, module):
        if module.iteration == self.iteration:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)  # handled before it returns: two stay two


def test_run_stops_after_the_iteration_and_writes_its_checkpoint(fit, tiny_module, tmp_path):
    module, before = tiny_module(), signal.getsignal(signal.SIGINT)
    fit(module, StopOnInterrupt(), PressCtrlC(2), IterationCheckpoint(100), iterations=4)
    assert module.iteration == 2
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_second_signal_stops_at_once(fit, tiny_module):
    module = tiny_module()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(module, StopOnInterrupt(), PressCtrlC(2, times=2), iterations=4)


def test_run_without_a_signal_is_left_alone(fit, tiny_module):
    module, before = tiny_module(), signal.getsignal(signal.SIGINT)
    fit(module, StopOnInterrupt(), iterations=3)
    assert module.iteration == 3
    assert signal.getsignal(signal.SIGINT) is before
