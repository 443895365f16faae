"""The loop does what its settings say: laws that hold between runs, and numbers by hand."""

from functools import partial
from itertools import combinations

import pytest
import torch

from lit_rl.advantages import GroupCentered
from lit_rl.aggregations import FixedLength, SequenceMean, SequenceSum, TokenMean, TokenSum
from lit_rl.algorithms import (
    DAPO,
    GRPO,
    CurrentLogProbs,
    DrGRPO,
    RecomputedLogProbs,
    ReMax,
    SamplerLogProbs,
)
from lit_rl.callbacks import RLCallback
from lit_rl.evaluation import Evaluation
from lit_rl.generation import CachedGenerator, SamplingSettings
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.policy_losses import ClippedSurrogate, LogProbSurrogate, OffPolicySequenceMask
from lit_rl.rewards import PythonFunction, Reward
from tiny_job import num_fives

AGGREGATIONS = [TokenMean(), SequenceMean(), SequenceSum(), FixedLength(8), TokenSum()]
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "initializer_range": 0.2,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}


def first_missing(responses: list[str]) -> list[float | None]:
    return [None, *num_fives(responses)[1:]]


class Recorder(RLCallback):
    """Keeps what the hooks see, and whether gradients are gone when a rollout begins."""

    def __init__(self):
        self.events, self.experiences, self.updates, self.scored = [], [], [], []
        self.gradients_at_start = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.gradients_at_start.append([p.grad for p in module.policy.parameters()])

    def on_rollout(self, trainer, module, scored, experience):
        self.events.append("rollout")
        self.scored.append(scored)
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.events.append("minibatch")
        self.updates.append(update)

    def on_iteration_end(self, trainer, module):
        self.events.append("end")


def log_ratios(update):
    return torch.cat(
        [
            (output.log_probs - part.old_log_probs)[part.mask]
            for part, output in update.micro_batches
        ]
    )


@pytest.fixture
def signal(algorithm):
    return partial(algorithm, reward=PythonFunction(num_fives))


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 12])
def test_one_optimizer_step_per_minibatch_and_hooks_in_order(signal, fit, micro_batch_tokens):
    """2 iterations x 2 epochs x 3 minibatches = 12 optimizer steps; global_step counts them.

    However many micro-batches a minibatch of 8 rows has: 12 tokens hold two rows of different
    prompts at most, so that they are several; with 10,000 there is one.
    """
    recorder = Recorder()
    settings = {"update_epochs": 2, "num_minibatches": 3, "micro_batch_tokens": micro_batch_tokens}
    trainer = fit(signal(**settings), callbacks=[recorder])
    assert trainer.global_step == 12
    counts = [len(update.micro_batches) for update in recorder.updates]
    assert min(counts) >= 3 if micro_batch_tokens == 12 else set(counts) == {1}
    assert recorder.events == (["rollout"] + ["minibatch"] * 6 + ["end"]) * 2
    assert [update.index for update in recorder.updates] == [*range(6)] * 2


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 24])
def test_later_updates_see_changed_weights(signal, fit, micro_batch_tokens):
    """The first update of an iteration has ratio 1; the second epoch reuses a moved policy."""
    recorder = Recorder()
    module = signal(update_epochs=2, micro_batch_tokens=micro_batch_tokens)
    fit(module, iterations=1, callbacks=[recorder])
    first, second = recorder.updates
    assert log_ratios(first).abs().max() < 1e-6
    assert log_ratios(second).abs().max() > 1e-3


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_no_result(signal, fit, weights, aggregation):
    results = []
    for tokens in (1, 24, 10_000):
        module = signal(
            aggregation=aggregation,
            micro_batch_tokens=tokens,
            entropy_coef=0.01,
            num_minibatches=2,
            optimizer=partial(torch.optim.SGD, lr=0.01),
        )
        fit(module)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(results[1], results[2], rtol=0, atol=1e-6)


class Ahead(Reward):
    """A reward that begins before it is waited for, and notes what happens when."""

    def __init__(self):
        self.events = []

    def begin(self, rollout):
        self.events.append(("begun", len(rollout)))

        def values():
            self.events.append(("waited", len(rollout)))
            return num_fives(rollout.responses)

        return values

    def values(self, rollout):
        return self.begin(rollout)()


def test_a_part_is_judged_while_the_next_one_is_answered(algorithm, fit):
    """6 prompts, 4 at a time, with 4 responses each: all are begun before one is waited for."""
    reward = Ahead()
    fit(algorithm(reward=reward, prompts_at_a_time=4), iterations=1)
    assert reward.events == [("begun", 16), ("begun", 8), ("waited", 16), ("waited", 8)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GRPO, DAPO, ReMax])
def test_how_many_prompts_are_answered_at_a_time_changes_no_result(algorithm, fit, weights, kind):
    """Each response has random numbers of its own, so that only rounding differs."""
    results, seen = [], []
    for number in (None, 1, 4, 6, 100):
        recorder = Recorder()
        module = algorithm(kind, reward=PythonFunction(num_fives), prompts_at_a_time=number)
        fit(module, callbacks=[recorder])
        results.append(weights(module))
        seen.append([scored.responses for scored in recorder.scored])
    for other, responses in zip(results[1:], seen[1:], strict=True):
        assert responses == seen[0]
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-6)


def test_aggregations_train_differently(signal, fit, weights):
    """Each choice reaches the loss."""
    results = []
    for aggregation in AGGREGATIONS:
        module = signal(aggregation=aggregation, max_grad_norm=None)
        fit(module, iterations=1)
        results.append(weights(module))
    for first, second in combinations(results, 2):
        assert (first - second).abs().max() > 1e-4


def test_rows_without_advantage_can_be_skipped_without_changing_the_weights(
    algorithm, fit, weights
):
    """The exact-answer reward leaves most random groups without signal."""
    results, rows = [], []
    for skip in (False, True):
        module = algorithm(skip_zero_advantages=skip, num_minibatches=2)
        recorder = Recorder()
        fit(module, iterations=3, callbacks=[recorder])
        results.append(weights(module))
        rows.append(sum(len(part) for u in recorder.updates for part, _ in u.micro_batches))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)
    assert rows[1] < rows[0] == 3 * 24


def test_sources_of_old_log_probs_agree_for_one_update(signal, fit, weights):
    results = []
    for choice in (RecomputedLogProbs(), SamplerLogProbs(), CurrentLogProbs()):
        module = signal(old_log_probs=choice)
        fit(module)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_in_both_passes(signal, source, fit, checkpointing):
    recorder = Recorder()
    module = signal(source=source(GPT2), gradient_checkpointing=checkpointing)
    fit(module, iterations=1, callbacks=[recorder])
    assert log_ratios(recorder.updates[0]).abs().max() < 1e-5
    assert module.policy.training


def test_dropout_acts_where_it_is_asked_for(signal, source, fit):
    recorder = Recorder()
    fit(signal(source=source(GPT2, dropout=True)), iterations=1, callbacks=[recorder])
    assert log_ratios(recorder.updates[0]).abs().max() > 1e-3


def test_gradient_checkpointing_changes_no_result(signal, fit, weights):
    results = []
    for checkpointing in (False, True):
        module = signal(gradient_checkpointing=checkpointing)
        fit(module)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)


def test_offloading_activations_without_an_accelerator_is_refused(signal, fit):
    with pytest.raises(ValueError, match="activation_offload moves activations"):
        fit(signal(activation_offload=True))


def test_cuda_graphs_without_a_cuda_device_are_refused_at_start(signal, fit):
    with pytest.raises(ValueError, match="cuda_graphs needs a CUDA device"):
        fit(signal(generator=CachedGenerator(cuda_graphs=True)))


def test_gradients_are_gone_when_a_rollout_begins(signal, fit):
    recorder = Recorder()
    fit(signal(), iterations=3, callbacks=[recorder])
    assert all(g is None for gradients in recorder.gradients_at_start for g in gradients)


def test_reference_is_the_initial_policy_and_nobody_trains_it(signal, fit):
    module = signal(kl_coef=0.1)
    recorder = Recorder()
    trainer = fit(module, iterations=3, callbacks=[recorder])
    (reference,) = module._reference
    initial = dict(module.source.model(module.seed).named_parameters())
    for name, parameter in reference.model.named_parameters():
        assert torch.equal(parameter, initial[name])
        assert not parameter.requires_grad
    assert not any(torch.equal(p, initial[n]) for n, p in module.policy.model.named_parameters())
    assert not any("reference" in name for name in module.state_dict())
    in_optimizer = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert in_optimizer == {id(p) for p in module.policy.parameters()}
    # At the first iteration policy and reference are the same: KL is 0, ratio is 1.
    first = recorder.experiences[0]
    assert (first.ref_log_probs - first.old_log_probs).abs().max() < 1e-6


def test_no_kl_term_needs_no_reference(signal, fit):
    module, recorder = signal(kl_coef=0.0), Recorder()
    fit(module, callbacks=[recorder])
    assert module._reference == []
    assert all(experience.ref_log_probs is None for experience in recorder.experiences)


def kl_to_reference(module, experience):
    log_probs = module.output_under(module.policy, experience).log_probs
    return (log_probs - experience.ref_log_probs)[experience.mask].mean()


def test_kl_in_the_loss_holds_the_policy_at_the_reference(signal, fit):
    """A strong penalty leaves the policy nearer to the reference than none that is felt."""
    distances = []
    for coefficient in (1e-6, 3.0):
        module, recorder = signal(kl_coef=coefficient, kl=KLInLoss()), Recorder()
        fit(module, iterations=6, callbacks=[recorder])
        distances.append(kl_to_reference(module, recorder.experiences[-1]))
    assert distances[1] < 0.5 * distances[0]


def test_kl_acts_in_one_place(signal, fit):
    """In the reward it changes advantages and not the loss; in the loss the reverse."""
    for kl in (KLInReward(), KLInLoss()):
        module, recorder = signal(kl=kl, kl_coef=0.5, advantage=GroupCentered()), Recorder()
        fit(module, iterations=2, callbacks=[recorder])
        experience, scored = recorder.experiences[1], recorder.scored[1]
        plain = GroupCentered()(scored)
        in_reward = (experience.advantages - plain).abs().max() > 1e-6
        per_token = kl.loss(experience.old_log_probs, experience.ref_log_probs, experience.mask)
        assert in_reward == isinstance(kl, KLInReward)
        assert (per_token.abs().max() > 0) == isinstance(kl, KLInLoss)


def test_missing_rewards_leave_the_group_and_the_loss(algorithm, fit):
    recorder = Recorder()
    module = algorithm(reward=PythonFunction(first_missing))
    with pytest.warns(UserWarning, match="1 of 24"):
        fit(module, iterations=1, callbacks=[recorder])
    experience, scored = recorder.experiences[0], recorder.scored[0]
    assert scored.missing.tolist() == [True] + [False] * 23
    assert not experience.mask[0].any()
    assert experience.mask[1:].any(1).all()
    assert experience.advantages[0].abs().sum() == 0
    # The rest of the group is centred without the missing row: its advantages sum to 0.
    assert experience.advantages[1:4, 0].sum().abs() < 1e-5


def never(responses: list[str]) -> list[None]:
    return [None] * len(responses)


def test_missing_rewards_are_warned_of_once_in_a_run(algorithm, fit):
    """Their number changes from iteration to iteration; the metrics count them."""
    numbers = iter([1, 2, 3])

    def some_missing(responses: list[str]) -> list[float | None]:
        number = next(numbers)
        return [None] * number + [0.0] * (len(responses) - number)

    with pytest.warns(UserWarning, match="applies to 1 of 24") as caught:
        fit(algorithm(reward=PythonFunction(some_missing)), iterations=3)
    assert len([w for w in caught if "no part of the reward" in str(w.message)]) == 1


@pytest.mark.parametrize("validation", [False, True])
def test_reward_that_applies_to_no_response_is_an_error(algorithm, fit, validation):
    settings = {"num_sanity_val_steps": -1, "limit_val_batches": 1.0} if validation else {}
    recorder = Recorder()
    with (
        pytest.raises(ValueError, match="the reward never applied to no response"),
        pytest.warns(UserWarning, match="no part of the reward never"),
    ):
        fit(algorithm(reward=PythonFunction(never)), callbacks=[recorder], **settings)
    assert recorder.events == []


def test_value_of_the_loss_at_ratio_one_is_minus_the_mean_advantage(signal, fit):
    """Advantages of a group sum to 0, so the sequence mean is 0 while the gradient is not."""
    recorder = Recorder()
    fit(signal(aggregation=SequenceMean()), iterations=1, callbacks=[recorder])
    assert recorder.updates[0].loss.abs() < 1e-6
    assert recorder.updates[0].grad_norms["actor"] > 1e-3


def test_gradient_norm_is_reported_before_and_limited_by_clipping(signal, fit, weights):
    """SGD at lr 1 with a limit of 0.01 moves the weights by 0.01 per step, by no more."""
    module = signal(max_grad_norm=0.01, optimizer=partial(torch.optim.SGD, lr=1.0))
    recorder = Recorder()
    module.configure_model()
    before = weights(module)
    fit(module, iterations=1, callbacks=[recorder])
    assert recorder.updates[0].grad_norms["actor"] > 0.01
    assert (weights(module) - before).norm() == pytest.approx(0.01, rel=1e-3)


class NaNLoss(ClippedSurrogate):
    """A loss whose gradient is not a number."""

    def __call__(self, log_probs, experience):
        return super().__call__(log_probs, experience) * float("nan")


def test_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(signal, fit, weights):
    module = signal(policy_loss=NaNLoss(), max_skipped_updates=1)
    module.configure_model()
    before = weights(module)
    with pytest.raises(FloatingPointError, match="update 1 of iteration 1"):
        fit(module, iterations=1)
    assert torch.equal(weights(module), before)


def test_learning_rate_warms_up_per_optimizer_step(signal, fit):
    """Warm-up over 10 steps to 0.5: after 4 steps 0.2, after 12 steps 0.5."""
    for iterations, expected in ((1, 0.2), (3, 0.5)):
        trainer = fit(signal(warmup_steps=10, num_minibatches=4), iterations=iterations)
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)


def test_linear_schedule_ends_at_zero_with_the_run(signal, fit):
    """3 iterations of 2 steps: the horizon is 6 optimizer steps, not 3 training steps."""
    trainer = fit(signal(lr_schedule="linear", num_minibatches=2), iterations=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    trainer = fit(signal(lr_schedule="linear", num_minibatches=2), iterations=3, max_steps=4)
    assert trainer.global_step == 4


def test_schedule_that_falls_needs_an_end(signal, fit):
    with pytest.raises(ValueError, match=r"no end\. Set trainer\.max_epochs to a number such as 4"):
        fit(signal(lr_schedule="cosine"), max_steps=-1)


def test_validation_changes_nothing_of_the_training(signal, fit, weights):
    results = []
    for validation in ({}, {"limit_val_batches": 1.0, "val_check_interval": 1}):
        module = signal(num_minibatches=2)
        fit(module, iterations=3, check_val_every_n_epoch=None, **validation)
        results.append(weights(module))
    assert torch.equal(*results)


def test_iterations_draw_different_responses_and_runs_repeat(signal, fit):
    """A learning rate of 0 leaves the policy as it is: only the random numbers differ."""
    runs = []
    for seed in (0, 0, 1):
        recorder = Recorder()
        module = signal(seed=seed, optimizer=partial(torch.optim.SGD, lr=0.0))
        fit(module, iterations=5, callbacks=[recorder])
        runs.append([scored.responses for scored in recorder.scored])
    # 24 prompts in batches of 6: iteration 5 sees prompts of iteration 1 to 4 again.
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(runs[0])) == 5


def test_dr_grpo_is_grpo_with_two_choices_changed(signal, fit, weights):
    results = []
    dr_grpo = signal(kind=DrGRPO)
    changed = signal(
        kind=GRPO, advantage=dr_grpo.advantage, aggregation=dr_grpo.aggregation, kl_coef=0.0
    )
    for module in (dr_grpo, changed):
        fit(module)
        results.append(weights(module))
    assert torch.equal(*results)
    assert dr_grpo.aggregation.length == dr_grpo.sampling.max_new_tokens == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"update_epochs": 0}, "update_epochs is 0"),
        ({"kl_coef": -0.1}, "kl_coef is -0.1"),
        ({"old_log_probs": CurrentLogProbs(), "update_epochs": 2}, "use RecomputedLogProbs"),
        (
            {"policy_loss": LogProbSurrogate(), "update_epochs": 2, "num_minibatches": 3},
            "LogProbSurrogate .* right for one .* update_epochs 2 x num_minibatches 3 make 6; use",
        ),
        (
            {"policy_loss": OffPolicySequenceMask(LogProbSurrogate(), 0.1), "update_epochs": 2},
            "OffPolicySequenceMask weighs no token by its ratio .* make 2; use ClippedSurrogate",
        ),
        (
            {"policy_loss": OffPolicySequenceMask(ClippedSurrogate(), 0.1)},
            "num_minibatches 1 make 1 update per rollout, at which it has not moved yet",
        ),
        ({"skip_zero_advantages": True, "entropy_coef": 0.1}, "entropy_coef 0.1"),
        ({"skip_zero_advantages": True, "kl_coef": 0.1}, "kl_coef 0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"prompts_at_a_time": 0}, "prompts_at_a_time is 0, must be at least 1"),
    ],
)
def test_contradicting_settings_are_refused(algorithm, settings, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**settings)


def test_an_off_policy_mask_acts_in_one_update_where_the_sampler_tells_the_old_log_probs(algorithm):
    """Then what it measures is the difference between sampler and trainer."""
    loss = OffPolicySequenceMask(LogProbSurrogate(), max_kl=0.1)
    assert algorithm(policy_loss=loss, old_log_probs=SamplerLogProbs()).steps_per_iteration == 1


def test_batch_that_does_not_divide_is_refused_before_the_first_rollout(signal, fit, data):
    recorder = Recorder()
    with pytest.raises(ValueError, match="6 prompts x group_size 4 = 24"):
        fit(signal(num_minibatches=5), callbacks=[recorder])
    assert recorder.events == []


def test_half_precision_is_refused(signal, fit):
    with pytest.raises(ValueError, match="bf16-mixed"):
        fit(signal(), precision="16-true")


def test_bfloat16_mixed_precision_keeps_float32_weights_and_ratio_one(signal, fit):
    module, recorder = signal(), Recorder()
    fit(module, iterations=1, precision="bf16-mixed", callbacks=[recorder])
    assert {p.dtype for p in module.policy.parameters()} == {torch.float32}
    assert log_ratios(recorder.updates[0]).abs().max() < 1e-3


def test_temperature_acts_in_all_log_probs(signal, fit):
    """At temperature 0.6 sampler, old and current log-probs agree."""
    recorder = Recorder()
    sampling = SamplingSettings(max_new_tokens=4, temperature=0.6)
    fit(signal(sampling=sampling), iterations=1, callbacks=[recorder])
    experience = recorder.experiences[0]
    difference = (experience.sampler_log_probs - experience.old_log_probs).abs().max()
    assert difference < 1e-5
    assert log_ratios(recorder.updates[0]).abs().max() < 1e-6


def test_held_out_measures(signal, fit, data):
    """The reward counts 5s and 7s; success is a reward of at least 1, and k = 2 of 2 samples."""
    module = signal(evaluation=Evaluation(num_samples=2, pass_at=(1, 2)))
    trainer = fit(module, iterations=1, limit_val_batches=1.0, val_check_interval=1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    greedy = [sample["reward"] >= 1 for sample in module.validation_samples]
    assert len(greedy) == 6
    assert metrics["val/greedy_accuracy"] == pytest.approx(sum(greedy) / 6)
    assert metrics["val/pass@1"] == pytest.approx(metrics["val/sampled_accuracy"])
    assert metrics["val/pass@2"] >= metrics["val/pass@1"]
    assert metrics["step"] == 1


def test_prepared_experience_does_not_share_the_rewards(signal, fit):
    """A penalty in the reward leaves the logged rewards as the task gave them."""
    recorder = Recorder()
    fit(signal(kl=KLInReward(), kl_coef=1.0), iterations=2, callbacks=[recorder])
    for scored in recorder.scored:
        assert torch.equal(scored.rewards, torch.tensor(num_fives(list(scored.responses))))
