"""HealthMonitor upon real runs: silent where they learn, and acting where they are driven off."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from lit_rl.algorithms import GRPO, PPO, TRPO
from lit_rl.callbacks import CriticMetrics, HealthMonitor, RatioMetrics, RewardMetrics, RLCallback
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


class Rates(RLCallback):
    """Notes the learning rate behind each iteration's last update; may end the run."""

    def __init__(self, stop=None, path=None):
        self.rates, self.stop, self.path = [], stop, path

    def on_minibatch(self, trainer, module, update):
        if update.index == module.steps_per_iteration - 1:
            self.rates.append(module.raw_optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.iteration == self.stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.fixture
def learns(algorithm):
    """An algorithm that learns to say 5 and 7."""

    def build(kind=GRPO, lr=0.01, **settings):
        defaults = {
            "reward": PythonFunction(num_fives),
            "optimizer": partial(torch.optim.AdamW, lr=lr),
            "update_epochs": 2,
        }
        return algorithm(kind, **{**defaults, **settings})

    return build


def metrics():
    return [RewardMetrics(), RatioMetrics(), CriticMetrics()]


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_a_run_that_learns_rings_nothing(learns, fit, kind, recwarn):
    module, monitor = learns(kind, lr=0.003), HealthMonitor()
    fit(module, iterations=30, callbacks=[*metrics(), monitor])
    rewards = monitor.history.first["reward/mean"], monitor.history.last["reward/mean"]
    assert sum(rewards[1][-5:]) / 5 > 1.5 * sum(rewards[0]) / 5
    assert monitor.rung == []
    assert not [w for w in recwarn.list if "HealthMonitor" in str(w.message)]


def test_steps_that_are_too_large_stop_the_run(learns, fit):
    module = learns(lr=0.3)
    monitor = HealthMonitor(action="stop", patience=2)
    with pytest.warns(UserWarning, match="HealthMonitor, iteration"):
        fit(module, iterations=30, callbacks=[*metrics(), monitor])
    assert module.iteration < 30
    assert monitor.rung


def test_a_resumed_run_lowers_the_learning_rate_as_the_uninterrupted_one(
    learns, fit, weights, tmp_path
):
    def run(rates, **settings):
        module = learns(lr_schedule="linear")
        # A KL that every iteration exceeds: halved at the ends of iterations 2, 4 and 6.
        monitor = HealthMonitor(action="lower_learning_rate", patience=2, max_update_kl=0.0)
        callbacks = [*metrics(), monitor, rates]
        with pytest.warns(UserWarning, match="HealthMonitor") if not settings else nullcontext():
            fit(module, iterations=6, callbacks=callbacks, **settings)
        return module, monitor

    whole_rates, rates = Rates(), Rates()
    whole, whole_monitor = run(whole_rates)
    run(Rates(3, tmp_path / "three.ckpt"))
    resumed, monitor = run(rates, ckpt_path=tmp_path / "three.ckpt")
    # Behind iteration n of 6 the schedule is at 1 - n / 6.
    expected = [0.01 * (1 - n / 6) * 0.5 ** ((n - 1) // 2) for n in range(1, 7)]
    assert whole_rates.rates == pytest.approx(expected)
    assert rates.rates == whole_rates.rates[3:]
    assert monitor.state_dict() == whole_monitor.state_dict()
    assert torch.equal(weights(resumed), weights(whole))


def test_a_policy_that_the_optimizer_does_not_move_cannot_be_slowed(learns, fit):
    module = learns(TRPO)
    with pytest.raises(ValueError, match="no effect on TRPO, whose policy"):
        fit(module, callbacks=[*metrics(), HealthMonitor(action="lower_learning_rate")])


@pytest.mark.parametrize(("kind", "number"), [(GRPO, 0), (PPO, 1)])
def test_metrics_of_a_critic_are_needed_where_there_is_one(learns, fit, kind, number, recwarn):
    fit(learns(kind), iterations=1, callbacks=[RewardMetrics(), RatioMetrics(), HealthMonitor()])
    messages = [str(warning.message) for warning in recwarn.list]
    assert sum("metrics of CriticMetrics" in message for message in messages) == number
