"""Callbacks that change what the loop does: weights, reference, number of updates."""

from functools import partial

import pytest
import torch

from acting import StopAfter
from lit_rl.algorithms import PPO
from lit_rl.callbacks import (
    AdaptiveKL,
    CosineKL,
    CriticMetrics,
    EntropyController,
    FixedKL,
    LinearKL,
    ReferenceSync,
    RLCallback,
    StopOnKL,
)
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


class Recorder(RLCallback):
    """Keeps what the hooks see, and the weights with which each iteration ran."""

    def __init__(self):
        self.kl_coefs, self.entropy_coefs = [], []
        self.experiences, self.updates, self.metrics = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.kl_coefs.append(module.kl_coef)
        self.entropy_coefs.append(module.entropy_coef)
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        metrics = trainer.callback_metrics.items()
        self.metrics.append({name: value.item() for name, value in metrics})

    def logged(self, name):
        return [metrics[name] for metrics in self.metrics]


@pytest.fixture
def signal(algorithm):
    """Half of the responses earn something from the first iteration on."""
    return partial(algorithm, reward=PythonFunction(num_fives))


@pytest.fixture
def assert_resumed_is_uninterrupted(signal, fit, weights, tmp_path):
    """Stop a run of five iterations after three, go on, and compare with one that never stopped."""

    def compare(callbacks, **settings):
        whole, whole_recorder = signal(**settings), Recorder()
        fit(whole, iterations=5, callbacks=[*callbacks(), whole_recorder])
        path = tmp_path / "stopped.ckpt"
        stopper = StopAfter(3, path)
        fit(signal(**settings), iterations=5, callbacks=[*callbacks(), stopper])
        resumed, recorder = signal(**settings), Recorder()
        fit(resumed, iterations=5, ckpt_path=path, callbacks=[*callbacks(), recorder])
        assert torch.equal(weights(resumed), weights(whole))
        assert recorder.kl_coefs == whole_recorder.kl_coefs[3:]
        assert recorder.entropy_coefs == whole_recorder.entropy_coefs[3:]
        for mine, its in zip(recorder.experiences, whole_recorder.experiences[3:], strict=True):
            if mine.ref_log_probs is not None:
                assert torch.equal(mine.ref_log_probs, its.ref_log_probs)
        return whole_recorder

    return compare


# ----- the weight of the KL


@pytest.mark.parametrize("kl", [KLInLoss(), KLInReward()], ids=["in the loss", "in the reward"])
def test_a_fixed_controller_is_the_weight_of_the_algorithm(signal, fit, weights, kl):
    """Wherever the KL acts, and only there: the weights of the policy are the same, bit for bit."""
    own, steered, without = signal(kl=kl, kl_coef=0.25), signal(kl=kl), signal(kl=kl)
    fit(own, iterations=3)
    fit(steered, iterations=3, callbacks=[FixedKL(0.25)])
    fit(without, iterations=3)
    assert torch.equal(weights(steered), weights(own))
    assert not torch.equal(weights(steered), weights(without))


def test_a_controller_holds_over_the_weight_of_the_algorithm(signal, fit):
    recorder = Recorder()
    fit(signal(kl_coef=9.0), iterations=2, callbacks=[FixedKL(0.25), recorder])
    assert recorder.kl_coefs == recorder.logged("kl_coef") == [0.25, 0.25]


@pytest.mark.parametrize("kind", [LinearKL, CosineKL])
def test_a_schedule_is_used_and_logged_in_the_iteration_it_is_meant_for(signal, fit, kind):
    """Both are half-way after half of their iterations."""
    recorder = Recorder()
    controller = kind(initial=0.5, final=0.0, num_iterations=2)
    fit(signal(), iterations=3, callbacks=[controller, recorder])
    assert recorder.kl_coefs == pytest.approx([0.5, 0.25, 0.0], abs=1e-12)
    assert recorder.logged("kl_coef") == pytest.approx([0.5, 0.25, 0.0], abs=1e-7)


def test_the_policy_starts_at_the_reference_and_the_adaptive_weight_falls(signal, fit):
    """A KL of 0 is an error of -1, cut off at -0.2; 6 prompts with 4 responses each."""
    recorder = Recorder()
    controller = AdaptiveKL(initial=0.2, target=1.0, unit="nats_per_response", horizon=1000)
    fit(signal(), iterations=2, callbacks=[controller, recorder])
    experience = recorder.experiences[0]
    kl = (experience.old_log_probs - experience.ref_log_probs)[experience.mask]
    assert kl.abs().max() < 1e-4
    assert recorder.kl_coefs == [0.2, pytest.approx(0.2 * (1 - 0.2 * 24 / 1000), rel=1e-12)]


def test_the_adaptive_weight_is_that_of_the_measured_kl(signal, fit):
    """A target that one large step overshoots: the weight then rises by 0.2 * 24 / 1000."""
    recorder = Recorder()
    controller = AdaptiveKL(initial=0.2, target=1e-3, unit="nats_per_token", horizon=1000)
    fit(signal(), iterations=3, callbacks=[controller, recorder])
    experience = recorder.experiences[1]
    kl = (experience.old_log_probs - experience.ref_log_probs)[experience.mask].mean()
    assert kl > 2e-3
    ratio = recorder.kl_coefs[2] / recorder.kl_coefs[1]
    assert ratio == pytest.approx(1 + 0.2 * 24 / 1000, rel=1e-9)


def test_a_resumed_run_goes_on_with_the_adaptive_weight(assert_resumed_is_uninterrupted):
    def callbacks():
        return [AdaptiveKL(initial=0.2, target=1e-3, unit="nats_per_token", horizon=100)]

    recorder = assert_resumed_is_uninterrupted(callbacks, kl=KLInReward())
    # It has moved before the stop, so a restart from 0.2 would differ.
    assert len(set(recorder.kl_coefs)) == 5


@pytest.mark.parametrize(
    "controller",
    [
        EntropyController(10.0, 0.125, maximum=0.5),
        AdaptiveKL(initial=0.2, target=1.0, unit="nats_per_response", horizon=1000),
    ],
)
def test_a_weight_waits_for_the_warm_up_of_the_critic(signal, fit, controller):
    """The policy rests in two iterations, and cannot follow whatever the weight is."""
    recorder = Recorder()
    fit(signal(PPO, critic_warmup=2), iterations=4, callbacks=[controller, recorder])
    coefs = recorder.kl_coefs if isinstance(controller, AdaptiveKL) else recorder.entropy_coefs
    assert coefs[0] == coefs[1] == coefs[2] != coefs[3]


def test_a_horizon_within_an_iteration_is_refused_before_any_work(signal, fit):
    """6 prompts with 4 responses each: 0.2 * 24 / 4 would take more than all of the weight."""
    module = signal()
    with pytest.raises(ValueError, match="horizon is 4 responses, but an iteration has 24"):
        fit(module, callbacks=[AdaptiveKL(0.2, target=1.0, unit="nats_per_token", horizon=4)])
    assert not hasattr(module, "policy")


def test_two_controllers_are_refused_before_any_work(signal, fit):
    with pytest.raises(ValueError, match="one of FixedKL and LinearKL can set kl_coef"):
        fit(signal(), callbacks=[FixedKL(0.1), LinearKL(0.1, 0.0, num_iterations=2)])


def test_models_that_were_built_without_a_reference_are_refused(signal, fit):
    """The KL would be nothing, whatever its weight."""
    module = signal()
    fit(module, iterations=1)
    with pytest.raises(ValueError, match="a callback needs the reference, but the models were"):
        fit(module, iterations=2, callbacks=[FixedKL(0.1)])


@pytest.mark.parametrize("callback", [FixedKL(0.1), EntropyController(1.0, 0.01)])
def test_rows_that_a_controller_would_train_are_not_left_out(signal, fit, callback):
    with pytest.raises(ValueError, match="skip_zero_advantages leaves out rows that the"):
        fit(signal(skip_zero_advantages=True), callbacks=[callback])


# ----- the weight of the entropy bonus


def test_the_entropy_bonus_grows_while_the_entropy_is_below_the_target(signal, fit, weights):
    """No policy over 14 tokens has 10 nats: up by a step each time, to the maximum."""
    recorder, controller = Recorder(), EntropyController(10.0, 0.125, maximum=0.5)
    module = signal(entropy_coef=0.25)
    fit(module, iterations=4, callbacks=[controller, recorder])
    assert recorder.entropy_coefs == [0.25, 0.375, 0.5, 0.5]
    assert recorder.logged("entropy_coef") == [0.25, 0.375, 0.5, 0.5]
    without = signal(entropy_coef=0.25)
    fit(without, iterations=4)
    assert not torch.equal(weights(module), weights(without))


def test_a_resumed_run_goes_on_with_the_entropy_bonus(assert_resumed_is_uninterrupted):
    recorder = assert_resumed_is_uninterrupted(lambda: [EntropyController(10.0, 0.01)])
    assert recorder.entropy_coefs == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])


# ----- the reference


def vector(policy):
    """All parameters of a model."""
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def assert_frozen_and_apart(module, trainer):
    """The reference shares nothing with the policy, learns nothing and is in evaluation mode."""
    pointers = {tensor.data_ptr() for tensor in module.policy.state_dict().values()}
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    for parameter in module.reference.parameters():
        assert parameter.data_ptr() not in pointers
        assert id(parameter) not in trained
        assert not parameter.requires_grad
        assert parameter.grad is None
    assert not any(part.training for part in module.reference.modules())
    assert all(name.startswith("policy.") for name in module.state_dict())


def test_the_reference_says_the_same_before_and_after_training(signal, fit, weights):
    """Bit for bit, of the responses of every iteration, also those of a policy that has moved."""
    module, recorder = signal(kl_coef=0.1), Recorder()
    trainer = fit(module, iterations=3, callbacks=[recorder])
    for experience in recorder.experiences:
        after = module.output_under(module.reference, experience).log_probs
        assert torch.equal(after, experience.ref_log_probs)
        moved = module.output_under(module.policy, experience).log_probs
        assert not torch.equal(moved, experience.old_log_probs)
    assert_frozen_and_apart(module, trainer)


def test_a_hard_reset_makes_the_reference_the_policy_of_that_moment(signal, fit):
    """After iterations 2 and 4: the KL of iterations 1, 3 and 5 begins at 0, and grows again."""
    module, recorder = signal(kl_coef=0.1), Recorder()
    trainer = fit(module, iterations=5, callbacks=[ReferenceSync(2), recorder])
    distances = [
        (experience.old_log_probs - experience.ref_log_probs)[experience.mask].abs().max().item()
        for experience in recorder.experiences
    ]
    assert [distance < 1e-5 for distance in distances] == [True, False, True, False, True]
    assert not torch.equal(vector(module.reference), vector(module.policy))
    assert_frozen_and_apart(module, trainer)


def test_a_moving_average_by_hand(signal, fit):
    class Keeper(RLCallback):
        def __init__(self):
            self.policies = []

        def on_iteration_end(self, trainer, module):
            self.policies.append(vector(module.policy).double())

    module, keeper = signal(kl_coef=0.1), Keeper()
    initial = vector(module.source.model(module.seed)).double()
    trainer = fit(module, iterations=2, callbacks=[ReferenceSync(1, weight=0.25), keeper])
    expected = 0.25 * keeper.policies[0] + 0.75 * initial
    expected = 0.25 * keeper.policies[1] + 0.75 * expected
    # Two roundings of float32, of numbers around 1.
    actual = vector(module.reference).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=2.5e-7)
    assert_frozen_and_apart(module, trainer)


@pytest.mark.parametrize(("every", "weight"), [(2, 1.0), (1, 0.25)])
def test_a_resumed_run_goes_on_with_its_reference(assert_resumed_is_uninterrupted, every, weight):
    assert_resumed_is_uninterrupted(lambda: [ReferenceSync(every, weight)], kl_coef=0.1)


def test_a_run_that_begins_to_move_its_reference_starts_from_the_initial_policy(
    signal, fit, tmp_path
):
    """The checkpoint is one of a run that did not move it, so holds none."""
    path, module = tmp_path / "two.ckpt", signal(kl_coef=0.1)
    fit(module, iterations=2).save_checkpoint(path)
    resumed = signal(kl_coef=0.1)
    fit(resumed, iterations=3, ckpt_path=path, callbacks=[ReferenceSync(9)])
    assert torch.equal(vector(resumed.reference), vector(module.reference))


def test_a_moved_reference_is_not_exchanged_for_the_initial_policy(signal, fit, tmp_path):
    path = tmp_path / "two.ckpt"
    fit(signal(kl_coef=0.1), iterations=2, callbacks=[ReferenceSync(1)]).save_checkpoint(path)
    with pytest.raises(ValueError, match="no callback of this run takes that reference over"):
        fit(signal(kl_coef=0.1), iterations=3, ckpt_path=path)
    # Through further checkpoints, whether or not it moves again.
    onward = tmp_path / "three.ckpt"
    trainer = fit(signal(kl_coef=0.1), iterations=3, ckpt_path=path, callbacks=[ReferenceSync(99)])
    trainer.save_checkpoint(onward)
    with pytest.raises(ValueError, match="no callback of this run takes that reference over"):
        fit(signal(kl_coef=0.1), iterations=4, ckpt_path=onward)
    # Without a KL there is no reference to take over.
    fit(signal(kl_coef=0.0), iterations=3, ckpt_path=path)


def test_a_reference_that_has_not_moved_needs_no_callback(signal, fit, tmp_path):
    path = tmp_path / "two.ckpt"
    fit(signal(kl_coef=0.1), iterations=2, callbacks=[ReferenceSync(3)]).save_checkpoint(path)
    resumed = signal(kl_coef=0.1)
    fit(resumed, iterations=3, ckpt_path=path)
    assert torch.equal(vector(resumed.reference), vector(resumed.source.model(resumed.seed)))


def test_a_reference_that_nothing_reads_is_not_moved(signal, fit):
    with pytest.raises(ValueError, match="ReferenceSync moves a reference that nothing reads"):
        fit(signal(), callbacks=[ReferenceSync(1)])


# ----- the number of updates


def test_the_updates_end_when_the_policy_is_too_far_and_begin_again(signal, fit):
    """A step of this size moves the policy further than 1e-4 nats at once: two of six updates."""
    recorder = Recorder()
    module = signal(num_minibatches=2, update_epochs=3)
    fit(module, 2, callbacks=[StopOnKL(1e-4), recorder])
    assert [update.index for update in recorder.updates] == [0, 1, 0, 1]
    assert recorder.logged("num_updates") == [2.0, 2.0]
    assert recorder.logged("update/stopped_early") == [1.0, 1.0]


def test_a_limit_that_is_not_reached_changes_nothing(signal, fit, weights):
    free, limited, recorder = signal(num_minibatches=2), signal(num_minibatches=2), Recorder()
    fit(free, 2)
    fit(limited, 2, callbacks=[StopOnKL(100.0), recorder])
    assert torch.equal(weights(limited), weights(free))
    assert recorder.logged("num_updates") == [2.0, 2.0]
    assert recorder.logged("update/stopped_early") == [0.0, 0.0]


def test_a_run_that_is_bounded_by_updates_ends_with_its_planned_iterations(signal, fit):
    """max_steps 6 x 3 plans three iterations; left-out updates make no room for a fourth."""
    module = signal(num_minibatches=2, update_epochs=3)
    trainer = fit(module, iterations=3, callbacks=[StopOnKL(1e-4)])
    assert trainer.global_step < trainer.max_steps == 18
    assert module.iteration == 3


# ----- the critic


def test_metrics_of_the_critic_are_those_of_the_whole_iteration(signal, fit):
    recorder = Recorder()
    module = signal(PPO, num_minibatches=2, update_epochs=2, micro_batch_tokens=64)
    fit(module, iterations=1, callbacks=[CriticMetrics(), recorder])
    (experience,), (metrics,) = recorder.experiences, recorder.metrics
    returns = experience.returns[experience.mask].double()
    values = experience.old_values[experience.mask].double()
    explained = 1 - (returns - values).var() / returns.var()
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), rel=1e-5)
    assert metrics["critic/value_mean"] == pytest.approx(values.mean().item(), abs=1e-6)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean().item(), abs=1e-6)
    parts = [part for update in recorder.updates for part in update.micro_batches]
    assert len(parts) > len(recorder.updates) == 4
    losses = torch.cat([module.value_loss(out.values, part)[part.mask] for part, out in parts])
    assert metrics["critic/value_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)


def test_an_algorithm_without_a_critic_has_no_metrics_of_one(signal, fit):
    recorder = Recorder()
    fit(signal(), iterations=1, callbacks=[CriticMetrics(), recorder])
    assert not [name for name in recorder.metrics[0] if name.startswith("critic/")]
