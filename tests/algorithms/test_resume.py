"""A resumed run is the uninterrupted one, except for what its configuration changes."""

from functools import partial

import numpy as np
import pytest
import torch

from acting import StopAfter
from lit_rl.callbacks import RLCallback
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


class Recorder(RLCallback):
    def __init__(self):
        self.prompts, self.learning_rates = [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.prompts.append(scored.prompts)

    def on_iteration_end(self, trainer, module):
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.fixture
def signal(algorithm):
    settings = {
        "reward": PythonFunction(num_fives),
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "lr_schedule": "linear",
        "warmup_steps": 3,
        "num_minibatches": 2,
        "kl_coef": 0.05,
    }
    return partial(algorithm, **settings)


# 24 prompts in batches of 6 are 4 iterations an epoch: 3 lies within an epoch, 4 on its boundary.
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resumed_run_is_the_uninterrupted_one(signal, fit, weights, tmp_path, stop):
    whole, whole_recorder = signal(), Recorder()
    fit(whole, iterations=6, callbacks=[whole_recorder])

    first, path = signal(), tmp_path / "stopped.ckpt"
    # The schedule falls over 6 iterations, the first process is stopped before.
    trainer = fit(first, iterations=6, callbacks=[StopAfter(stop, path)])
    assert trainer.global_step == 2 * stop

    resumed, recorder = signal(), Recorder()
    trainer = fit(resumed, iterations=6, ckpt_path=path, callbacks=[recorder])
    assert resumed.iteration == 6
    assert recorder.prompts == whole_recorder.prompts[stop:]
    assert recorder.learning_rates == whole_recorder.learning_rates[stop:]
    assert torch.equal(weights(resumed), weights(whole))


def by_chance(responses: list[str]) -> list[float]:
    """A reward that draws from global generators; from Python's the type checks of tests do too."""
    return [np.random.random() + torch.rand(()).item() for _ in responses]


def test_a_reward_that_draws_random_numbers_draws_the_same(signal, fit, weights, tmp_path):
    for generator in (np.random.seed, torch.manual_seed):
        generator(7)
    path = tmp_path / "stopped.ckpt"
    whole = signal(reward=PythonFunction(by_chance))
    fit(whole, iterations=4)
    for generator in (np.random.seed, torch.manual_seed):
        generator(7)
    fit(signal(reward=PythonFunction(by_chance)), iterations=4, callbacks=[StopAfter(2, path)])
    torch.rand(3)  # whatever the process that goes on has drawn before
    np.random.seed(1)
    resumed = signal(reward=PythonFunction(by_chance))
    fit(resumed, iterations=4, ckpt_path=path)
    assert torch.equal(weights(resumed), weights(whole))


def test_run_resumed_twice_trains_the_iterations_of_its_epochs(signal, fit, weights, tmp_path):
    """max_epochs counts passes over the data, 4 iterations each, however often a run stops.

    The checkpoints are written at the end of a run that was stopped within an epoch, and at the
    end of an epoch, where Lightning's own counters would skip or repeat one.
    """
    whole = signal()
    fit(whole, max_epochs=3, max_steps=-1)
    assert whole.iteration == 12
    path, module = None, None
    for stop in (3, 8, 12):
        module = signal()
        stopper = StopAfter(stop, tmp_path / f"{stop}.ckpt")
        fit(module, max_epochs=3, max_steps=-1, ckpt_path=path, callbacks=[stopper])
        path = stopper.path
    assert module.iteration == 12
    assert torch.equal(weights(module), weights(whole))


def test_checkpoint_holds_no_reference_and_no_settings(signal, fit, tmp_path):
    module = signal()
    fit(module, iterations=1).save_checkpoint(tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(module.state_dict())
    assert all(name.startswith("policy.") for name in checkpoint["state_dict"])
    assert "hyper_parameters" not in checkpoint
    identity = checkpoint["lit_rl"].pop("identity")
    assert len(checkpoint["lit_rl"].pop("random")) == 1  # one rank
    assert set(identity) == {"algorithm", "model", "tokenizer", "reference"}  # of which a hash
    assert checkpoint["lit_rl"] == {
        "iteration": 1,
        "reference_moved": False,
        "validation_due": False,
        "skipped_iterations": 0,
        "skipped_updates": 0,
        "skipped_in_a_row": 0,
        "advantage": {},
    }


def test_reference_of_a_resumed_run_is_the_initial_policy(signal, fit, tmp_path):
    module = signal()
    fit(module, iterations=2).save_checkpoint(tmp_path / "two.ckpt")
    resumed = signal()
    fit(resumed, iterations=3, ckpt_path=tmp_path / "two.ckpt")
    initial = dict(module.source.model(module.seed).named_parameters())
    (reference,) = resumed._reference
    for name, parameter in reference.model.named_parameters():
        assert torch.equal(parameter, initial[name])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_other_updates_per_iteration_do_not_move_a_run_along_its_schedule(
    signal, fit, tmp_path, before, after
):
    """Half of 8 iterations are done: the next begins with half of the learning rate of 0.01."""

    rates: list[float] = []

    class Rates(RLCallback):
        def on_rollout(self, trainer, module, scored, experience):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    stopper = StopAfter(4, tmp_path / "four.ckpt")
    build = partial(signal, warmup_steps=0)
    plan = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4}
    fit(build(num_minibatches=before), callbacks=[stopper], **plan)
    fit(build(num_minibatches=after), callbacks=[Rates()], ckpt_path=stopper.path, **plan)
    assert rates == pytest.approx([0.01 * (8 - done) / 8 for done in (4, 5, 6, 7)])


def test_configured_learning_rate_holds_over_the_checkpoint(algorithm, fit, tmp_path):
    """Adam's moments come from the checkpoint, the learning rate and the betas from the config."""
    path = tmp_path / "two.ckpt"
    build = partial(algorithm, reward=PythonFunction(num_fives), warmup_steps=4)
    first = fit(build(optimizer=partial(torch.optim.AdamW, lr=0.01)), iterations=2)
    first.save_checkpoint(path)
    resumed = build(optimizer=partial(torch.optim.AdamW, lr=0.03, betas=(0.8, 0.9)))
    recorder = Recorder()
    trainer = fit(resumed, iterations=3, ckpt_path=path, callbacks=[recorder])
    (group,) = trainer.optimizers[0].param_groups
    # After 3 of 4 steps of warm-up to 0.03.
    assert recorder.learning_rates == [pytest.approx(0.03 * 3 / 4)]
    assert group["betas"] == (0.8, 0.9)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {3}
