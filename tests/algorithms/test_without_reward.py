"""Iterations in which the reward applies to no response: the first one, and later ones."""

import inspect
import math
from functools import partial

import pytest
import torch

import lit_rl.algorithms
from lit_rl.algorithms import DAPO, GRPO, PPO, PolicyGradient, Reinforce
from lit_rl.algorithms.actor_critic import ActorCritic
from lit_rl.callbacks import (
    AdaptiveKL,
    CriticMetrics,
    EntropyController,
    RatioMetrics,
    RewardMetrics,
    RLCallback,
    StopOnKL,
    Throughput,
)
from lit_rl.rewards import Reward

ALGORITHMS = [
    kind
    for kind in vars(lit_rl.algorithms).values()
    if inspect.isclass(kind)
    and issubclass(kind, PolicyGradient)
    and kind not in (PolicyGradient, ActorCritic)
]


class SilentIn(Reward):
    """Counts the fives of a response, and has nothing to say in some iterations."""

    def __init__(self, *iterations):
        self.iterations, self.module = iterations, None

    def values(self, rollout):
        if self.module.iteration + 1 in self.iterations:
            return [None] * len(rollout)
        return [float(response.count("5")) for response in rollout.responses]


class Recorder(RLCallback):
    """Keeps the weights and the metrics of each iteration."""

    def __init__(self):
        self.weights, self.metrics = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.weights.append(weights.clone())
        self.metrics.append({name: float(v) for name, v in trainer.callback_metrics.items()})


@pytest.fixture
def silent(algorithm):
    """Build an algorithm whose optimizer would move the weights by its momentum and decay alone."""

    def build(*iterations, kind=GRPO, **settings):
        optimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        module = algorithm(kind, reward=SilentIn(*iterations), optimizer=optimizer, **settings)
        module.reward.module = module
        return module

    return build


@pytest.mark.filterwarnings("ignore:no part of the reward")
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_later_iteration_without_reward_moves_no_weight(silent, fit, kind):
    recorder = Recorder()
    settings = {"filter_truncated": False, "max_rounds": 2} if kind is DAPO else {}
    module = silent(2, 3, kind=kind, entropy_coef=0.01, **settings)
    message = "in iteration 2 the reward silent_in applied to no response"
    with pytest.warns(UserWarning, match=message) as caught:
        fit(module, max_steps=-1, max_epochs=1, callbacks=[recorder])
    first, second, third, fourth = recorder.weights
    assert torch.equal(second, first)
    assert torch.equal(third, first)
    assert not torch.equal(fourth, third)
    assert fourth.isfinite().all()
    assert [metrics["skipped_iterations"] for metrics in recorder.metrics] == [0, 1, 2, 2]
    assert len([w for w in caught if "in iteration" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:(no part of the reward|in iteration 2)")
@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_controllers_and_metrics_pass_an_iteration_without_reward(silent, fit, kind):
    recorder = Recorder()
    controllers = [
        AdaptiveKL(initial=0.1, target=0.01, unit="nats_per_token", horizon=1000),
        EntropyController(target=1.0, step=0.01),
        StopOnKL(limit=0.5),
    ]
    logs = [RewardMetrics(), RatioMetrics(), CriticMetrics(), Throughput()]
    module = silent(2, kind=kind, update_epochs=2)
    fit(module, iterations=3, callbacks=[*controllers, *logs, recorder])
    skipped, last = recorder.metrics[1:]
    assert skipped["reward/missing_fraction"] == 1
    assert math.isnan(skipped["reward/mean"])
    assert math.isnan(skipped["ratio/mean"])
    assert skipped["loss"] == 0
    # What is steered by tokens that count is left where it was.
    for name in ("kl_coef", "entropy_coef"):
        assert last[name] == skipped[name]
    assert math.isfinite(last["reward/mean"])
    assert math.isfinite(last["ratio/mean"])


@pytest.mark.filterwarnings("ignore:no part of the reward")
def test_a_first_iteration_without_reward_is_an_error(silent, fit):
    with pytest.raises(ValueError, match="in iteration 1 the reward silent_in applied to no"):
        fit(silent(1))


@pytest.mark.filterwarnings("ignore:no part of the reward")
def test_the_rounds_of_an_iteration_are_judged_together(silent, fit):
    """The first round has no reward, the second has one: no matter for an error."""

    class SilentInFirstRound(SilentIn):
        def values(self, rollout):
            self.iterations = (1,) if not self.calls else ()
            self.calls += 1
            return super().values(rollout)

    module = silent(kind=DAPO, filter_truncated=False, max_rounds=2)
    module.reward = SilentInFirstRound()
    module.reward.module, module.reward.calls = module, 0
    trainer = fit(module, iterations=1)
    assert module.reward.calls == 2
    assert trainer.callback_metrics["skipped_iterations"] == 0
    assert trainer.callback_metrics["dynamic_sampling/trained_groups"] > 0


@pytest.mark.filterwarnings("ignore:(no part of the reward|in iteration 2)")
def test_a_resumed_run_goes_on_counting(silent, fit, tmp_path):
    path = tmp_path / "two.ckpt"
    fit(silent(2, kind=Reinforce), iterations=2).save_checkpoint(path)
    trainer = fit(silent(4, kind=Reinforce), iterations=4, ckpt_path=path)
    assert trainer.callback_metrics["skipped_iterations"] == 2


@pytest.mark.filterwarnings("ignore:no part of the reward")
def test_a_later_validation_without_reward_does_not_end_the_run(silent, fit):
    """The validation after iteration 2 is the one that says nothing."""
    module = silent(3)
    settings = {"val_check_interval": 2, "limit_val_batches": 1.0, "check_val_every_n_epoch": None}
    with pytest.warns(UserWarning, match="in the validation after iteration 2 the reward silent"):
        trainer = fit(module, iterations=2, **settings)
    assert module.iteration == 2
    assert math.isnan(trainer.callback_metrics["val/reward"])
