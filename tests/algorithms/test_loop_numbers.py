"""Signs, weights and random numbers of the loop: what a run that merely learns would not show."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lit_rl.advantages import GroupCentered
from lit_rl.algorithms import RecomputedLogProbs, SamplerLogProbs
from lit_rl.callbacks import RLCallback
from lit_rl.evaluation import Evaluation
from lit_rl.generation import TransformersGenerator
from lit_rl.kl_penalties import KLInReward
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives

VALIDATE = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}


def nothing(responses):
    return [0.0] * len(responses)


class Recorder(RLCallback):
    """Keeps what the hooks see."""

    def __init__(self):
        self.experiences, self.updates, self.learning_rates = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)

    def on_iteration_end(self, trainer, module):
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class ImpreciseSampler(TransformersGenerator):
    """Reports log-probs that are 0.5 nats above those of the policy."""

    def __call__(self, *args, **kwargs):
        rollout = super().__call__(*args, **kwargs)
        return replace(rollout, sampler_log_probs=rollout.sampler_log_probs + 0.5 * rollout.mask)


def move(module, distance=0.05):
    """Take the policy away from its reference."""
    module.configure_model()
    with torch.no_grad():
        for number, parameter in enumerate(module.policy.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(distance * torch.randn(parameter.shape, generator=generator))


# ----- terms of reward and loss


def test_kl_in_the_reward_is_subtracted(algorithm, fit):
    """Without any other reward A_i = -coef * (KL_i - mean KL of the group), KL_i a sum of k1."""
    recorder = Recorder()
    module = algorithm(
        reward=PythonFunction(nothing), advantage=GroupCentered(), kl=KLInReward(), kl_coef=0.5
    )
    move(module)
    fit(module, iterations=1, callbacks=[recorder])
    (experience,) = recorder.experiences
    log_ratios = (experience.old_log_probs - experience.ref_log_probs) * experience.mask
    kl = log_ratios.sum(1).view(-1, 4)
    expected = -0.5 * (kl - kl.mean(1, keepdim=True)).flatten()
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(experience.advantages[:, 0], expected, rtol=0, atol=1e-5)


def test_the_entropy_bonus_is_subtracted_from_the_loss_and_raises_the_entropy(algorithm, fit):
    """Without any reward the loss is -coef times the mean over sequences of the mean entropy."""
    recorder = Recorder()
    module = algorithm(
        reward=PythonFunction(nothing),
        entropy_coef=2.0,
        max_grad_norm=None,
        optimizer=partial(torch.optim.SGD, lr=0.01),
    )
    fit(module, iterations=1, callbacks=[recorder])
    (update,), (experience,) = recorder.updates, recorder.experiences
    means = [output.entropy.sum(1) / part.mask.sum(1) for part, output in update.micro_batches]
    torch.testing.assert_close(update.loss, -2.0 * torch.cat(means).mean())
    before = torch.cat([output.entropy[part.mask] for part, output in update.micro_batches]).mean()
    after = module.output_under(module.policy, experience).entropy[experience.mask].mean()
    assert after > before


def test_the_sampler_speaks_where_it_is_asked_and_nowhere_else(algorithm, fit):
    """Policy and reference are the same: the KL is 0, and 0.5 per token in what the sampler says.

    Rows of different lengths then have different penalties, and advantages that are not 0.
    """
    for choice, is_zero in ((RecomputedLogProbs(), True), (SamplerLogProbs(), False)):
        recorder = Recorder()
        module = algorithm(
            generator=ImpreciseSampler(),
            reward=PythonFunction(nothing),
            advantage=GroupCentered(),
            kl=KLInReward(),
            kl_coef=1.0,
            old_log_probs=choice,
        )
        fit(module, iterations=1, callbacks=[recorder])
        (experience,) = recorder.experiences
        difference = (experience.old_log_probs - experience.ref_log_probs)[experience.mask]
        expected = torch.full_like(difference, 0.0 if is_zero else 0.5)
        torch.testing.assert_close(difference, expected, rtol=0, atol=1e-5)
        assert (experience.advantages.abs().max() < 1e-5) == is_zero


def test_old_log_probs_are_those_of_evaluation_mode(algorithm, source, fit):
    """With dropout on, two passes in training mode would differ."""
    config = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "initializer_range": 0.2,
    }
    recorder = Recorder()
    module = algorithm(source=source(config, dropout=True))
    fit(module, iterations=1, callbacks=[recorder])
    (experience,) = recorder.experiences
    first, second = (module.output_under(module.policy, experience).log_probs for _ in range(2))
    assert torch.equal(first, second)
    assert module.policy.training
    # They are also what the sampler, in evaluation mode too, drew the tokens from.
    torch.testing.assert_close(
        experience.old_log_probs, experience.sampler_log_probs, rtol=0, atol=1e-5
    )


# ----- what is logged


def test_loss_and_gradient_norm_are_means_over_the_updates(algorithm, fit):
    recorder = Recorder()
    module = algorithm(reward=PythonFunction(num_fives), update_epochs=2, num_minibatches=2)
    trainer = fit(module, iterations=1, callbacks=[recorder])
    assert len(recorder.updates) == 4
    losses = torch.stack([update.loss for update in recorder.updates])
    norms = torch.tensor([update.grad_norms["actor"] for update in recorder.updates])
    assert losses.std() > 1e-3
    assert norms.std() > 1e-3
    torch.testing.assert_close(trainer.callback_metrics["loss"], losses.mean())
    torch.testing.assert_close(trainer.callback_metrics["grad_norm"], norms.mean())


# ----- the schedule


def test_a_linear_schedule_falls_evenly_over_the_optimizer_steps(algorithm, fit):
    """0.5 falls to 0 over 3 iterations of 2 steps: 4/6, 2/6 and 0 of it are left."""
    recorder = Recorder()
    module = algorithm(lr_schedule="linear", num_minibatches=2)
    fit(module, iterations=3, callbacks=[recorder])
    assert recorder.learning_rates == pytest.approx([0.5 * 4 / 6, 0.5 * 2 / 6, 0.0])


def test_an_iteration_is_not_cut_by_the_last_optimizer_step(algorithm, fit):
    """3 steps of 2 per iteration are two whole iterations: 0.5 falls to 0 over 4 steps."""
    recorder = Recorder()
    module = algorithm(lr_schedule="linear", num_minibatches=2)
    trainer = fit(module, max_steps=3, callbacks=[recorder])
    assert module.num_iterations == 2
    assert trainer.global_step == 4
    assert recorder.learning_rates == pytest.approx([0.25, 0.0])


# ----- random numbers


def test_rows_are_dealt_anew_in_every_epoch_and_iteration(algorithm, fit):
    """The first of two minibatches, in two epochs of two iterations: four different choices."""
    dealt = []

    class Deals(RLCallback):
        def on_rollout(self, trainer, module, scored, experience):
            dealt.extend(module.minibatches(epoch)[0].tolist() for epoch in (0, 1))

    fit(algorithm(num_minibatches=2), iterations=2, callbacks=[Deals()])
    assert len({tuple(rows) for rows in dealt}) == 4


def asked(function):
    """A reward that keeps the responses of each call, and the calls."""
    calls = []

    def reward(responses):
        calls.append(responses)
        return function(responses)

    return PythonFunction(reward), calls


def test_validation_draws_the_same_numbers_each_time_and_none_for_the_greedy_response(
    algorithm, fit, data
):
    """A policy that stays gives the same answers; another seed changes the sampled ones only."""
    reward, calls = asked(num_fives)
    module = algorithm(
        reward=reward,
        evaluation=Evaluation(num_samples=2, pass_at=(2,)),
        optimizer=partial(torch.optim.SGD, lr=0.0),
    )
    trainer = fit(module, iterations=2, **VALIDATE)
    first, second = calls[1:3], calls[4:6]  # behind the responses of each iteration
    assert [len(responses) for responses in first] == [6, 12]
    assert first == second
    module.seed = 5
    calls.clear()
    trainer.validate(module, data(), verbose=False)
    assert calls[0] == first[0]
    assert calls[1] != first[1]


def test_validation_keeps_the_responses_of_its_first_batch(algorithm, fit, data):
    """Six held-out prompts in batches of three; the greedy responses to the first are shown."""
    module = algorithm()
    datamodule = data(eval_batch_size=3)
    fit(module, iterations=1, datamodule=datamodule, **VALIDATE)
    shown = [sample["prompt"] for sample in module.validation_samples]
    assert shown == [row.text for row in datamodule.held_out_rows[:3]]


def test_prediction_answers_each_held_out_prompt_once_and_as_sampled(algorithm, fit, data):
    module = algorithm(optimizer=partial(torch.optim.SGD, lr=0.0))
    trainer = fit(module, iterations=1)
    datamodule = data(eval_batch_size=4)
    batches = trainer.predict(module, datamodule)
    rows = [row for batch in batches for row in batch]
    assert [row["prompt"] for row in rows] == [row.text for row in datamodule.held_out_rows]
    assert "reward" not in rows[0]
    again = trainer.predict(module, data(eval_batch_size=4))
    assert again == batches
    module.seed = 5  # sampled, so another seed says something else
    assert trainer.predict(module, data(eval_batch_size=4)) != batches
