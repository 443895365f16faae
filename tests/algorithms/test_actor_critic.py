"""The critic is trained, read at the right place, clipped and scheduled apart from the actor."""

import math
from functools import partial

import pytest
import torch

from acting import StopAfter
from lit_rl.advantages import GAE, GroupNormalized
from lit_rl.aggregations import SequenceMean, TokenMean
from lit_rl.algorithms import GRPO, PPO, PenalizedTRPO
from lit_rl.callbacks import CriticMetrics, RatioMetrics, RewardMetrics, RLCallback
from lit_rl.generation import SamplingSettings
from lit_rl.models import PolicyBackbone, SharedTrunk
from lit_rl.rewards import PythonFunction
from lit_rl.value_losses import ClippedSquaredError
from tiny_job import num_fives

END_ID = 2
KINDS = pytest.mark.parametrize("critic", [PolicyBackbone(), SharedTrunk()], ids=["own", "shared"])


def nothing(responses: list[str]) -> list[float]:
    return [0.0] * len(responses)


class Recorder(RLCallback):
    """Keeps what the hooks see, and the weights after each update."""

    def __init__(self):
        self.experiences, self.updates, self.weights, self.rates = [], [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)
        self.weights.append((flat(module.policy), flat(module.critic)))
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.fixture
def ppo(algorithm):
    """PPO without whitening, so that a value error of any size shows."""
    settings = {
        "kind": PPO,
        "reward": PythonFunction(num_fives),
        "advantage": GAE(whiten=False),
        "update_epochs": 1,
        "critic_lr": 0.1,
    }
    return partial(algorithm, **settings)


@KINDS
def test_actor_and_critic_both_move(ppo, fit, critic):
    """A value loss without gradient would leave the critic where it was."""
    recorder, module = Recorder(), ppo(critic=critic)
    module.configure_model()
    before = flat(module.policy), flat(module.critic)
    fit(module, iterations=2, callbacks=[recorder])
    for old, new in zip(before, recorder.weights[-1], strict=True):
        assert (new - old).abs().max() > 1e-4
    first, second = recorder.experiences
    assert first.old_values.eq(0).all()  # the head starts at zero
    assert second.old_values[second.mask].ne(0).all()
    # Without a critic that knows anything, the targets are the returns to go.
    torch.testing.assert_close(first.returns, first.advantages)


@KINDS
def test_every_weight_of_the_critic_is_trained(ppo, fit, critic):
    """The head with the first update; what is below it once the head is no longer zero."""
    module = ppo(critic=critic)
    module.configure_model()
    before = {name: p.detach().clone() for name, p in module.critic.named_parameters()}
    assert len(before) == (2 if critic == SharedTrunk() else 13)
    fit(module, iterations=2)
    for name, parameter in module.critic.named_parameters():
        assert (parameter - before[name]).abs().max() > 1e-5, name


def test_the_critic_learns_what_responses_earn(ppo, fit):
    """A constant reward of 3 is what every state is worth, with gamma = 1."""
    module = ppo(
        reward=PythonFunction(lambda responses: [3.0] * len(responses)),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        critic_lr=0.02,
        value_loss=ClippedSquaredError(clip=None),
        update_epochs=4,
    )
    recorder = Recorder()
    fit(module, iterations=8, callbacks=[recorder])
    last = recorder.experiences[-1]
    assert (last.old_values[last.mask] - 3).abs().max() < 0.3


def test_value_loss_moves_the_policy_only_through_a_shared_trunk(ppo, fit):
    """Advantages of 0 leave the value loss alone: here the targets are 0 and the values are not."""
    for critic, moves in ((PolicyBackbone(), False), (SharedTrunk(), True)):
        module = ppo(critic=critic, advantage=NoAdvantage())
        module.configure_model()
        with torch.no_grad():
            module.critic.head.weight.fill_(0.5)
        before = flat(module.policy)
        fit(module, iterations=1)
        assert torch.equal(flat(module.policy), before) != moves


class NoAdvantage(GAE):
    """Nothing for the actor, and a target of 0 for the critic."""

    def __call__(self, scored):
        return torch.zeros_like(scored.values)

    def returns(self, scored):
        return torch.zeros_like(scored.values)


def test_old_values_are_those_of_the_rollout_in_every_epoch(ppo, fit):
    recorder = Recorder()
    fit(ppo(update_epochs=3), iterations=2, callbacks=[recorder])
    for number, update in enumerate(recorder.updates):
        experience = recorder.experiences[number // 3]
        for part, output in update.micro_batches:
            rollout = set(experience.old_values[experience.mask].tolist())
            assert set(part.old_values[part.mask].tolist()) <= rollout
            if update.index == 2:  # the critic has moved, the old values have not
                assert (output.values - part.old_values)[part.mask].abs().max() > 1e-3


@KINDS
def test_micro_batches_change_neither_actor_nor_critic(ppo, fit, critic):
    results = []
    for tokens in (1, 24, 10_000):
        module = ppo(critic=critic, micro_batch_tokens=tokens, num_minibatches=2, entropy_coef=0.01)
        fit(module, iterations=2)
        results.append(torch.cat([flat(module.policy), flat(module.critic)]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("aggregation", [TokenMean(), SequenceMean()])
def test_the_loss_of_each_update_by_hand(ppo, fit, aggregation):
    """Of the policy, plus a quarter of the critic's, clipped around the values of the rollout.

    The KL is deducted from the reward, so the loss has none.
    """
    module = ppo(
        aggregation=aggregation,
        value_loss=ClippedSquaredError(clip=0.05),
        value_coef=0.25,
        update_epochs=3,
        kl_coef=0.5,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    module.configure_model()
    move(module.policy)
    recorder = Recorder()
    fit(module, iterations=2, callbacks=[recorder])
    clip_binds = []
    for update in recorder.updates:
        ((part, output),) = update.micro_batches
        ratio, advantage = (output.log_probs - part.old_log_probs).exp(), part.advantages
        actor = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        moved = (output.values - part.old_values).clamp(-0.05, 0.05)
        errors = [(v - part.returns) ** 2 for v in (output.values, part.old_values + moved)]
        clip_binds.append(((errors[1] > errors[0]) & part.mask).any().item())
        per_token = (actor + 0.25 * 0.5 * torch.maximum(*errors)) * part.mask
        lengths = part.mask.sum(1)
        if aggregation == TokenMean():
            expected = per_token.sum() / lengths.sum()
        else:
            expected = (per_token.sum(1) / lengths).mean()
        torch.testing.assert_close(update.loss, expected)
    assert clip_binds == [False, True, True] * 2


def test_groups_have_their_own_rate_decay_and_norm(ppo, fit):
    module = ppo(
        critic_lr=0.03,
        critic_weight_decay=0.2,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        max_grad_norm=1e-3,
    )
    trainer = fit(module, iterations=1)
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    settings = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert settings == {"actor": (0.01, 0.1), "critic": (0.03, 0.2)}
    metrics = trainer.callback_metrics
    assert metrics["learning_rate"] == pytest.approx(0.01)
    assert metrics["critic/learning_rate"] == pytest.approx(0.03)
    assert metrics["grad_norm"] > 1e-3
    assert metrics["critic/grad_norm"] > 1e-3


def test_clipping_the_critic_leaves_the_step_of_the_actor(ppo, fit):
    """A limit between both norms: the actor's step is the one without any limit."""
    free = ppo(max_grad_norm=None, value_coef=1.0)
    recorder = Recorder()
    fit(free, iterations=1, callbacks=[recorder])
    norms = recorder.updates[0].grad_norms
    low, high = sorted(norms.values())
    assert high > 1.2 * low
    limited = ppo(max_grad_norm=(low + high) / 2)
    fit(limited, iterations=1)
    untouched = min(norms, key=norms.get)
    models = {"actor": (free.policy, limited.policy), "critic": (free.critic, limited.critic)}
    for name, (first, second) in models.items():
        assert torch.equal(flat(first), flat(second)) == (name == untouched)


@KINDS
def test_warm_up_trains_the_critic_alone(ppo, fit, critic):
    """Two iterations of one update; AdamW with weight decay would move resting weights."""
    module = ppo(
        critic=critic,
        critic_warmup=2,
        critic_lr=0.01,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    )
    module.configure_model()
    policy, recorder = flat(module.policy), Recorder()
    trainer = fit(module, iterations=3, callbacks=[recorder])
    assert [torch.equal(w, policy) for w, _ in recorder.weights] == [True, True, False]
    critics = [w for _, w in recorder.weights]
    assert not torch.equal(critics[0], critics[1])
    # The moments of the actor begin with its first step.
    optimizer = trainer.optimizers[0]
    steps = [
        {int(optimizer.state[p]["step"]) for p in group["params"]}
        for group in optimizer.param_groups
    ]
    assert steps == [{1}, {3}]


class CountedPasses(RLCallback):
    """Counts the passes of the policy with gradient in each iteration."""

    def __init__(self):
        self.numbers, self.metrics = [], []

    def on_fit_start(self, trainer, module):
        module.policy.base_model.register_forward_hook(self.count)

    def count(self, *_):
        self.numbers[-1] += torch.is_grad_enabled()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.numbers.append(0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.metrics.append({name: float(v) for name, v in trainer.callback_metrics.items()})


@KINDS
def test_a_policy_that_rests_takes_no_part_in_the_warm_up(ppo, fit, critic):
    """Unless the critic reads its hidden states. What is not measured is not logged as a number."""
    passes = CountedPasses()
    module = ppo(critic=critic, critic_warmup=1, update_epochs=3)
    logs = [RewardMetrics(), RatioMetrics(), CriticMetrics()]
    fit(module, iterations=2, callbacks=[*logs, passes])
    rests = critic == PolicyBackbone()
    assert passes.numbers == [0 if rests else 3, 3]
    first, second = passes.metrics
    for name in ("policy/entropy", "ratio/mean", "sampler/abs_difference_mean"):
        assert math.isnan(first[name]) == rests
        assert math.isfinite(second[name])
    assert (first["grad_norm"] == 0) == rests
    assert second["grad_norm"] > 0
    for metrics in passes.metrics:
        assert metrics["critic/grad_norm"] > 0
        assert metrics["critic/value_loss"] > 0


@pytest.mark.parametrize("kind", [PPO, PenalizedTRPO])
def test_the_critic_learns_beside_a_resting_policy_as_beside_any(ppo, fit, kind):
    class NeverRests(kind):
        def moves_policy(self, index):
            return True

    modules = []
    for algorithm_kind in (kind, NeverRests):
        module = ppo(kind=algorithm_kind, critic_warmup=2, update_epochs=2, num_minibatches=2)
        fit(module, iterations=3)
        modules.append(module)
    torch.testing.assert_close(flat(modules[0].critic), flat(modules[1].critic), rtol=0, atol=1e-7)
    torch.testing.assert_close(flat(modules[0].policy), flat(modules[1].policy), rtol=0, atol=1e-7)


def test_the_learning_rate_of_the_critic_rises_over_its_own_steps(ppo, fit):
    """To 0.1 over 4 optimizer steps, then by a straight line to 0 over the other 6; two a rollout.

    The step after update k takes the rate of k + 1 steps.
    """
    recorder = Recorder()
    module = ppo(
        critic_lr=0.1, critic_lr_warmup_steps=4, critic_lr_schedule="linear", num_minibatches=2
    )
    fit(module, iterations=5, callbacks=[recorder])
    actor, critic = zip(*recorder.rates, strict=True)
    rises, falls = [0.025, 0.05, 0.075, 0.1], [0.1 * left / 6 for left in (5, 4, 3, 2, 1, 0)]
    assert critic == pytest.approx([*rises, *falls])
    assert actor == pytest.approx([0.5] * 10)


def test_the_schedule_of_the_actor_begins_behind_the_warm_up(ppo, fit):
    """After 1 of 5 steps the actor's 0.5 falls over 4; the critic's 0.1 over all 5 by a cosine."""
    recorder = Recorder()
    module = ppo(critic_warmup=1, lr_schedule="linear", critic_lr=0.1, critic_lr_schedule="cosine")
    fit(module, iterations=5, callbacks=[recorder])
    actor, critic = zip(*recorder.rates, strict=True)
    assert actor == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0])
    # 0.05 (1 + cos(pi k / 5))
    assert critic == pytest.approx([0.0904508, 0.0654508, 0.0345492, 0.00954915, 0.0], abs=1e-6)


def test_a_reward_is_earned_at_the_last_token_that_was_sampled(ppo, fit):
    """With values of 0 and lambda 1 an advantage is 0.9 to the power of the tokens still to come.

    An end token is the last one where there is one, else the last token before the limit.
    """
    recorder = Recorder()
    module = ppo(
        reward=PythonFunction(lambda responses: [2.0] * len(responses)),
        advantage=GAE(gamma=0.9, lam=1.0, whiten=False),
        group_size=16,
        sampling=SamplingSettings(max_new_tokens=5),
    )
    fit(module, iterations=1, callbacks=[recorder])
    (experience,) = recorder.experiences
    lengths = experience.mask.sum(1)
    ends = experience.response_ids.eq(END_ID).any(1)
    assert len(lengths[ends].unique()) > 2
    assert lengths[~ends].unique().tolist() == [5]
    still_to_come = lengths[:, None] - 1 - torch.arange(5)
    expected = torch.where(still_to_come >= 0, 2.0 * 0.9**still_to_come, 0.0)
    torch.testing.assert_close(experience.advantages, expected)
    torch.testing.assert_close(experience.returns, expected)


def move(policy):
    """Take the policy away from its reference."""
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_kl_in_the_reward_is_deducted_from_the_token_that_has_it(ppo, fit):
    """Without reward and critic, with lambda 1, an advantage is minus the KL from there on."""
    module = ppo(reward=PythonFunction(nothing), advantage=GAE(lam=1.0, whiten=False), kl_coef=0.5)
    module.configure_model()
    move(module.policy)
    recorder = Recorder()
    fit(module, iterations=1, callbacks=[recorder])
    (experience,) = recorder.experiences
    k1 = (experience.old_log_probs - experience.ref_log_probs) * experience.mask
    expected = -0.5 * k1.flip(1).cumsum(1).flip(1) * experience.mask
    torch.testing.assert_close(experience.advantages, expected, rtol=0, atol=1e-6)
    assert expected.abs().max() > 0.01


@KINDS
@pytest.mark.parametrize("stop", [3, 4])
def test_resumed_run_is_the_uninterrupted_one(ppo, fit, tmp_path, critic, stop):
    build = partial(
        ppo,
        critic=critic,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        critic_lr=0.02,
        critic_lr_schedule="linear",
        critic_warmup=1,
        num_minibatches=2,
        update_epochs=2,
        kl_coef=0.05,
    )
    whole = build()
    fit(whole, iterations=6)
    first = build()
    fit(first, iterations=6, callbacks=[StopAfter(stop, tmp_path / "stopped.ckpt")])
    resumed = build()
    fit(resumed, iterations=6, ckpt_path=tmp_path / "stopped.ckpt")
    for model, other in ((whole.policy, resumed.policy), (whole.critic, resumed.critic)):
        assert torch.equal(flat(model), flat(other))


def test_checkpoint_holds_the_critic_and_not_the_reference(ppo, fit, tmp_path):
    module = ppo(kl_coef=0.1)
    fit(module, iterations=1).save_checkpoint(tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in state} == {"policy", "critic"}
    assert torch.equal(state["critic.head.weight"], module.critic.head.weight.detach())


VALIDATE = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}


def test_held_out_prompts_are_answered_without_critic_and_reference(ppo, fit, data, tmp_path):
    """A checkpoint of the whole is read all the same; what it says is what training said."""
    path = tmp_path / "two.ckpt"
    trainer = fit(ppo(kl_coef=0.1), iterations=2, **VALIDATE)
    trainer.save_checkpoint(path)
    expected = float(trainer.callback_metrics["val/reward"])
    for stage in ("validate", "predict"):
        module = ppo(kl_coef=0.1)
        result = getattr(trainer, stage)(module, datamodule=data(), ckpt_path=path)
        assert module.reference is None
        assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"policy"}
        if stage == "validate":
            assert result[0]["val/reward"] == expected


def test_a_module_that_has_answered_is_trained_as_a_new_one(ppo, fit, data):
    """Its critic starts from its policy, its KL is to the policy that the source gives."""
    new, used = ppo(kl_coef=0.1), ppo(kl_coef=0.1)
    trainer = fit(new, iterations=2, **VALIDATE)
    trainer.validate(used, datamodule=data())
    fit(used, iterations=2)
    for model in ("policy", "critic", "reference"):
        assert torch.equal(flat(getattr(used, model)), flat(getattr(new, model)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_lr": 0.0}, "critic_lr is 0.0, must be above 0"),
        ({"value_coef": -1.0}, "value_coef is -1.0, must be above 0"),
        ({"critic_lr_warmup_steps": -1}, "critic_lr_warmup_steps is -1, must be at least 0"),
        ({"critic_warmup": -1}, "critic_warmup is -1, must be at least 0"),
        ({"skip_zero_advantages": True}, "for algorithms without a critic"),
        (
            {"advantage": GAE(bootstrap_truncated=True), "filter_truncated": True},
            "leaves out the very responses that bootstrap_truncated of GAE goes on with",
        ),
    ],
)
def test_wrong_settings_are_refused(ppo, settings, message):
    with pytest.raises(ValueError, match=message):
        ppo(**settings)


@pytest.mark.usefixtures("without_type_checks")
def test_an_estimator_without_targets_for_the_critic_is_refused(ppo):
    message = "GroupNormalized gives the critic of PPO no targets; use .*GAE, or .* such as GRPO"
    with pytest.raises(ValueError, match=message):
        ppo(advantage=GroupNormalized())


def test_an_estimator_that_reads_values_is_refused_without_a_critic(algorithm):
    with pytest.raises(ValueError, match="GAE reads a ValuedRollout, which GRPO does not make"):
        algorithm(kind=GRPO, advantage=GAE())
