"""A run that rolls back: the weights are those of then, everything else goes on."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from acting import Sick
from lit_rl.advantages import ReturnToGo
from lit_rl.advantages.baselines import MovingAverage
from lit_rl.algorithms import GRPO, PPO, Reinforce
from lit_rl.callbacks import (
    AdaptiveKL,
    CriticMetrics,
    EntropyController,
    IterationCheckpoint,
    RatioMetrics,
    ReferenceSync,
    RewardMetrics,
    RLCallback,
)
from lit_rl.callbacks.held_out_watch import HeldOutWatch
from lit_rl.callbacks.roll_back import check_roll_back
from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.functional import fingerprint
from lit_rl.models import LoRA
from lit_rl.rewards import PythonFunction
from lit_rl.strategies import FSDP2, DeepSpeed
from tiny_job import num_fives


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Recorder(RLCallback):
    """Notes what each iteration begins with."""

    def __init__(self):
        self.weights, self.steps, self.rates, self.prompts = [], [], [], []
        self.kl, self.entropy, self.references = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        optimizer = module.raw_optimizer
        self.weights.append(flat(module.policy))
        self.steps.append({int(state["step"]) for state in optimizer.state.values()})
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.prompts.append(scored.prompts)
        self.kl.append(module.kl_coef)
        self.entropy.append(module.entropy_coef)
        if module.reference is not None:
            self.references.append(flat(module.reference))


@pytest.fixture
def learns(algorithm):
    def build(kind=GRPO, **settings):
        defaults = {
            "reward": PythonFunction(num_fives),
            "optimizer": partial(torch.optim.AdamW, lr=0.01),
            "lr_schedule": "linear",
            "num_minibatches": 2,
        }
        return algorithm(kind, **{**defaults, **settings})

    return build


@pytest.fixture
def run(fit, tmp_path):
    """Train 10 iterations, each with a checkpoint of its own."""

    def train(module, monitor, *callbacks, folder="run", every=1, iterations=10, **settings):
        metrics = [RewardMetrics(), RatioMetrics(), CriticMetrics()]
        keeper = IterationCheckpoint(every, save_top_k=-1)
        return fit(
            module,
            iterations=iterations,
            callbacks=[*metrics, monitor, *callbacks, keeper],
            enable_checkpointing=True,
            plugins=[VerifiedCheckpointIO()],
            default_root_dir=tmp_path / folder,
            **settings,
        )

    return train


def checkpoint(tmp_path, iteration, folder="run"):
    return tmp_path / folder / "checkpoints" / f"iteration={iteration}.ckpt"


def stored(path):
    return torch.load(path, weights_only=True)


def stored_weights(path):
    states = stored(path)["state_dict"].items()
    return torch.cat([t.flatten() for name, t in states if name.startswith("policy.")])


@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_weights_and_moments_go_back_while_everything_else_goes_on(learns, run, tmp_path):
    """Wrong in iterations 6 and 7: those behind 4 are the last that no wrong iteration saw."""
    healthy, recorder = Recorder(), Recorder()
    run(learns(), Sick(), healthy, folder="healthy")
    module, monitor = learns(), Sick(6, 7)
    run(module, monitor, recorder)
    assert monitor.roll_backs == 1
    assert module.iteration == 10
    assert torch.equal(recorder.weights[6], healthy.weights[6])
    assert torch.equal(recorder.weights[7], stored_weights(checkpoint(tmp_path, 4)))
    assert torch.equal(recorder.weights[7], healthy.weights[4])
    assert not torch.equal(recorder.weights[7], healthy.weights[7])
    # Two steps an iteration: 8 behind iteration 4, 10 behind the one that follows it now.
    assert recorder.steps[6:9] == [{12}, {8}, {10}]
    assert recorder.prompts == healthy.prompts
    # The schedule falls over 20 steps; half of it from iteration 8 on.
    expected = [0.01 * (1 - n / 10) * (1 if n < 7 else 0.5) for n in range(10)]
    assert recorder.rates == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_the_checkpoint_of_that_iteration_holds_what_was_restored(learns, run, tmp_path):
    run(learns(), Sick(6, 7))
    then, now = (stored(checkpoint(tmp_path, n)) for n in (4, 7))
    assert now["lit_rl"]["iteration"] == 7
    assert all(torch.equal(now["state_dict"][name], t) for name, t in then["state_dict"].items())


@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_an_alarm_that_is_no_matter_of_steps_leaves_the_learning_rate(learns, run):
    recorder = Recorder()
    run(learns(), Sick(6, 7, too_fast=False), recorder)
    assert recorder.steps[7] == {8}
    assert recorder.rates == pytest.approx([0.01 * (1 - n / 10) for n in range(10)])


@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_what_is_steered_goes_back_too(learns, run):
    """The weights of KL and entropy, a reference that moves, and the average of a baseline."""
    recorder = Recorder()
    module = learns(
        Reinforce, advantage=ReturnToGo(baseline=MovingAverage(0.5)), num_minibatches=1, kl_coef=0.1
    )
    averages = []

    class Averages(RLCallback):
        def on_scored(self, trainer, module, scored):
            averages.append(module.advantage.baseline.average)

    steered = [
        AdaptiveKL(0.1, target=1e-6, unit="nats_per_token", horizon=100),
        EntropyController(target=10.0, step=0.01),
        ReferenceSync(2, weight=0.5),
    ]
    run(module, Sick(6, 7), *steered, recorder, Averages())
    assert averages[7] == averages[4] not in averages[5:7]
    assert recorder.kl[7] == recorder.kl[4] not in recorder.kl[5:7]
    # 0.01 more in each iteration, up to 0.1; the seventh would have had 0.07.
    assert recorder.entropy == pytest.approx(
        [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.04, 0.05, 0.06]
    )
    assert torch.equal(recorder.references[7], recorder.references[4])
    assert not torch.equal(recorder.references[6], recorder.references[4])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_a_critic_and_an_adapter_go_back(learns, run):
    """The base beneath an adapter is in no checkpoint, and stays."""
    recorder, critics, bases = Recorder(), [], []

    class Critics(RLCallback):
        def on_rollout(self, trainer, module, scored, experience):
            critics.append(flat(module.critic))
            bases.append(fingerprint(module.base_weights))

    module = learns(PPO, adapter=LoRA(rank=4, alpha=8), lr_schedule="constant")
    run(module, Sick(6, 7), recorder, Critics())
    assert torch.equal(recorder.weights[7], recorder.weights[4])
    assert torch.equal(critics[7], critics[4])
    assert not torch.equal(critics[6], critics[4])
    assert len(set(bases)) == 1


class SickHeldOut(HeldOutWatch):
    """Says that the held-out accuracy fell in one iteration."""

    def __init__(self, iteration):
        super().__init__(0.1)
        self.iteration = iteration

    def message(self, iteration, metrics, history):
        super().message(iteration, metrics, history)
        return "it fell" if iteration == self.iteration else None


def states(path):
    """What a resumed run has to have in common with the uninterrupted one."""
    read = stored(path)
    monitor = read["callbacks"][Sick.__qualname__]
    return read["state_dict"], read["optimizer_states"], read["lr_schedulers"], monitor


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.filterwarnings("ignore:HealthMonitor")
@pytest.mark.parametrize("held_out", [False, True], ids=["alarm", "held_out"])
@pytest.mark.parametrize("stop", [3, 5, 6, 7, 8])
def test_a_resumed_run_rolls_back_as_the_uninterrupted_one(learns, run, tmp_path, stop, held_out):
    """In a folder of its own; the weights of then lie in that of the run before."""

    def train(folder, **settings):
        monitor = Sick(*([] if held_out else [6, 7]))
        if held_out:
            monitor.held_out = SickHeldOut(6)
        validations = {"val_check_interval": 2, "check_val_every_n_epoch": None}
        recorder = Recorder()
        run(
            learns(),
            monitor,
            recorder,
            folder=folder,
            **({**validations, "limit_val_batches": 1} if held_out else {}),
            **settings,
        )
        return monitor, recorder

    whole, recorder = train("whole")
    assert whole.roll_backs == 1
    _, after = train("resumed", ckpt_path=checkpoint(tmp_path, stop, "whole"))
    for one, other in zip(recorder.weights[stop:], after.weights, strict=True):
        assert torch.equal(one, other)
    assert recorder.prompts[stop:] == after.prompts
    last = [checkpoint(tmp_path, 10, folder) for folder in ("whole", "resumed")]
    assert same(*map(states, last))


@pytest.mark.filterwarnings("ignore:HealthMonitor")
def test_after_a_validation_the_weights_of_the_best_one_come_back(learns, run, tmp_path):
    """After the checkpoint of that iteration, which holds the weights that were measured."""
    monitor, recorder = Sick(), Recorder()
    monitor.held_out = SickHeldOut(6)
    settings = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    run(learns(), monitor, recorder, **settings)
    accuracies = {p["iteration"]: p["accuracy"] for p in monitor.held_out.points[:2]}
    best = max(accuracies, key=accuracies.get)  # of 2 and 4, the first of two equal ones
    assert torch.equal(recorder.weights[6], stored_weights(checkpoint(tmp_path, int(best))))
    assert not torch.equal(stored_weights(checkpoint(tmp_path, 6)), recorder.weights[6])


def test_the_checkpoints_of_the_bad_stretch_are_not_restored_later(learns, run, tmp_path):
    """Wrong again right behind the first time: 4 again, not 5 or 6, whose weights were wrong."""
    module, recorder, monitor = learns(), Recorder(), Sick(6, 7, 8, 9)
    with pytest.warns(UserWarning, match="iteration 7"):
        run(module, monitor, recorder)
    assert monitor.roll_backs == 2
    assert torch.equal(recorder.weights[9], stored_weights(checkpoint(tmp_path, 4)))
    assert recorder.rates[9] == pytest.approx(0.01 * 0.1 / 4)


def test_a_run_that_stays_wrong_ends_with_the_reason(learns, run):
    module, monitor = learns(), Sick(*range(4, 40))
    with pytest.warns(UserWarning, match="sick again, although the run was rolled back 3 times"):
        run(module, monitor, iterations=40)
    assert monitor.roll_backs == 3
    assert module.iteration == 11  # rings at 5, 7, 9 and 11


def test_without_a_checkpoint_of_then_a_run_goes_on_with_a_warning(learns, run):
    """Wrong from the second iteration on: only the initial policy was certainly well."""
    monitor, recorder, healthy = Sick(2, 3), Recorder(), Recorder()
    with pytest.warns(UserWarning, match="no whole checkpoint is old enough to roll back to"):
        run(learns(), monitor, recorder)
    run(learns(), Sick(), healthy, folder="healthy")
    assert monitor.roll_backs == 0
    assert recorder.rates == healthy.rates
    assert all(map(torch.equal, recorder.weights, healthy.weights))


def test_a_damaged_checkpoint_is_skipped_by_name(learns, run, tmp_path):
    class Damage(RLCallback):
        def on_iteration_end(self, trainer, module):
            if module.iteration == 6:
                path = checkpoint(tmp_path, 4)
                path.write_bytes(path.read_bytes()[:-1] + b"?")

    recorder = Recorder()
    with pytest.warns(UserWarning, match=r"skipped: .*iteration=4\.ckpt is damaged"):
        run(learns(), Sick(6, 7), recorder, Damage())
    assert torch.equal(recorder.weights[7], stored_weights(checkpoint(tmp_path, 3)))


class Given(Trainer):
    """A trainer of which nothing but strategy and callbacks is there."""

    strategy = None

    def __init__(self, strategy, *callbacks):
        self.strategy, self.callbacks = strategy, list(callbacks)


def with_strategy(strategy, *callbacks, io=None):
    strategy.checkpoint_io = io or VerifiedCheckpointIO()
    return Given(strategy, *callbacks)


def test_what_could_not_be_restored_is_refused_at_the_start():
    keeper, one = IterationCheckpoint(save_top_k=-1), SingleDeviceStrategy()
    check_roll_back(with_strategy(one, keeper))
    for callbacks in ((), (IterationCheckpoint(),)):
        with pytest.raises(ValueError, match="IterationCheckpoint with save_top_k -1"):
            check_roll_back(with_strategy(one, *callbacks))
    with pytest.raises(ValueError, match="VerifiedCheckpointIO"):
        check_roll_back(with_strategy(one, keeper, io=TorchCheckpointIO()))
    for strategy in (FSDP2, DeepSpeed):
        with pytest.raises(ValueError, match=f"the shards of {strategy.__name__}.*ddp"):
            check_roll_back(Given(strategy(), keeper))


def test_it_is_refused_before_anything_is_trained(learns, fit):
    module = learns()
    with pytest.raises(ValueError, match=r"add lit_rl\.callbacks\.IterationCheckpoint"):
        fit(module, callbacks=[RewardMetrics(), RatioMetrics(), Sick()])
    assert module.iteration == 0
