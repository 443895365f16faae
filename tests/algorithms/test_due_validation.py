"""A validation that a run was stopped before is made up for by the run that goes on."""

import signal

import numpy as np
import pytest

from lit_rl.callbacks import IterationCheckpoint, RLCallback, StopOnInterrupt
from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.rewards import PythonFunction

pytestmark = pytest.mark.filterwarnings("ignore:no iteration is left")


class Validations(RLCallback):
    """Notes the iteration and the reward of each validation."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append((pl_module.iteration, trainer.callback_metrics["val/reward"].item()))


@pytest.fixture
def run(algorithm, fit, tmp_path):
    """Train 6 iterations with a validation behind each second one."""

    def train(folder, *callbacks, reward=None, keepers=None, **settings):
        recorder = Validations()
        keepers = keepers or [IterationCheckpoint(1, save_top_k=-1)]
        fit(
            algorithm(**({"reward": reward} if reward else {})),
            iterations=6,
            callbacks=[recorder, *callbacks, *keepers],
            enable_checkpointing=True,
            plugins=[VerifiedCheckpointIO()],
            default_root_dir=tmp_path / folder,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
            **settings,
        )
        return recorder.seen

    return train


def checkpoint(tmp_path, iteration):
    return tmp_path / "whole" / "checkpoints" / f"iteration={iteration}.ckpt"


def by_chance(responses: list[str]) -> list[float]:
    return [np.random.random() for _ in responses]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_checkpoint_from_before_a_validation_is_followed_by_it(run, tmp_path, stop):
    """Those of 2, 4 and 6 were written when the validation began; 4 is also the end of an epoch,
    6 that of the run.

    The reward draws from global random numbers, in training as in validations.
    """
    reward = PythonFunction(by_chance)
    whole = run("whole", reward=reward)
    assert [iteration for iteration, _ in whole] == [2, 4, 6]
    resumed = run("resumed", reward=reward, ckpt_path=checkpoint(tmp_path, stop))
    assert resumed == [point for point in whole if point[0] >= stop]


def test_one_from_behind_a_validation_is_not(run, tmp_path):
    keeper = IterationCheckpoint(2, monitor="val/reward", save_top_k=-1)
    whole = run("whole", keepers=[keeper])
    assert run("resumed", ckpt_path=checkpoint(tmp_path, 2)) == whole[1:]


def test_a_checkpoint_that_waits_for_the_validation_is_written_behind_it(run, tmp_path):
    """Two kinds: the resumed run writes the one that the first run was stopped before."""

    def keepers(folder):
        ranked = {"dirpath": str(tmp_path / folder / "ranked"), "monitor": "val/reward"}
        return [
            IterationCheckpoint(1, save_top_k=-1),
            IterationCheckpoint(2, save_top_k=-1, save_last=False, **ranked),
        ]

    run("whole", keepers=keepers("whole"))
    run("resumed", keepers=keepers("resumed"), ckpt_path=checkpoint(tmp_path, 4))
    names = [path.name for path in (tmp_path / "resumed" / "ranked").iterdir()]
    assert sorted(names) == ["iteration=4.ckpt", "iteration=6.ckpt"]


@pytest.mark.parametrize("iteration", [2, 3, 6])
def test_a_signal_leaves_the_validation_to_the_run_that_goes_on(run, tmp_path, iteration):
    """Validations are due behind 2 and 6, the last."""

    class Send(RLCallback):
        def on_iteration_end(self, trainer, module):
            if module.iteration == iteration:
                signal.raise_signal(signal.SIGTERM)

    whole = run("other")
    before = run("whole", StopOnInterrupt(), Send())
    assert before == [point for point in whole if point[0] < iteration]
    resumed = run("resumed", ckpt_path=checkpoint(tmp_path, iteration))
    assert resumed == whole[len(before) :]
