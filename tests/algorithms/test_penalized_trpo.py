"""The penalty to the old policy: its value and gradient, and how its weight is steered."""

import math
from functools import partial

import pytest
import torch

from acting import StopAfter
from lit_rl.advantages import GAE
from lit_rl.algorithms import PenalizedTRPO
from lit_rl.algorithms.penalized_trpo import adapted_beta, kl_from_old
from lit_rl.callbacks import RLCallback
from lit_rl.generation import SamplingSettings
from lit_rl.rewards import PythonFunction
from lit_rl.types import Experience
from tiny_job import num_fives


class Recorder(RLCallback):
    def __init__(self):
        self.experiences, self.updates, self.metrics, self.betas, self.kls = [], [], [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.experiences.append(experience)

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.metrics.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        self.betas.append(module.beta)
        experience = self.experiences[-1]
        with torch.no_grad():
            new = module.log_probs_under(module.policy, experience)
        d = (new - experience.old_log_probs)[experience.mask]  # of no token the mean is NaN
        self.kls.append(float((d.exp() - 1 - d).mean()))


@pytest.fixture
def penalized(algorithm):
    settings = {
        "kind": PenalizedTRPO,
        "reward": PythonFunction(num_fives),
        "advantage": GAE(whiten=False),
        "update_epochs": 2,
        "optimizer": partial(torch.optim.SGD, lr=0.3),
        "critic_lr": 0.05,
    }
    return partial(algorithm, **settings)


# ----- the penalty


def one_token(log_probs, old_log_probs):
    """Every row is one token with the given old log-prob."""
    size = len(old_log_probs)
    return Experience(
        prompt_ids=torch.ones(size, 1, dtype=torch.long),
        prompt_mask=torch.ones(size, 1, dtype=torch.bool),
        response_ids=torch.arange(size)[:, None],
        mask=torch.ones(size, 1, dtype=torch.bool),
        sampler_log_probs=old_log_probs[:, None],
        advantages=torch.zeros(size, 1),
        old_log_probs=old_log_probs[:, None],
        ref_log_probs=None,
    )


def test_value_and_gradient_are_those_of_the_kl_in_the_mean_over_the_old_policy():
    """Weighted by their old probabilities, four actions are the exact mean over samples."""
    old = torch.tensor([0.5, -1.0, 0.0, 1.0], dtype=torch.float64).log_softmax(-1)
    logits = torch.tensor([0.0, 0.3, -0.7, 1.5], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    kl = (old.exp() * (old - log_probs)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    estimate = kl_from_old(log_probs[:, None], one_token(log_probs, old))[:, 0]
    mean = (old.exp() * estimate).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(mean, kl)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("anything", [torch.nan, torch.inf])
def test_what_does_not_count_has_no_penalty_and_no_gradient(anything):
    rows = one_token(None, torch.tensor([-1.0, -2.0]))
    rows = Experience(**{**vars(rows), "mask": torch.tensor([[True], [False]])})
    log_probs = torch.tensor([[-1.5], [anything]], requires_grad=True)
    kl = kl_from_old(log_probs, rows)
    kl.sum().backward()
    assert kl[0] > 0
    assert kl[1] == 0
    assert log_probs.grad[1] == 0
    assert log_probs.grad[0] != 0


def test_the_penalty_is_beta_times_the_mean_over_the_tokens(penalized, fit):
    """The loss of the second update by hand: surrogate, beta * k3, value loss."""
    recorder = Recorder()
    module = penalized(beta=3.0)
    fit(module, iterations=1, callbacks=[recorder])
    update = recorder.updates[1]
    total, tokens = 0.0, 0
    for part, output in update.micro_batches:
        d = output.log_probs - part.old_log_probs
        values = -d.exp() * part.advantages + 3.0 * (d.exp() - 1 - d)
        values = values + module.value_loss(output.values, part)
        total, tokens = total + values[part.mask].sum(), tokens + part.mask.sum()
        assert d[part.mask].abs().max() > 0.01
    torch.testing.assert_close(update.loss, total / tokens, rtol=1e-4, atol=1e-5)


def test_more_penalty_keeps_the_policy_closer(penalized, fit):
    kls = []
    for beta in (0.1, 10.0):
        recorder = Recorder()
        fit(penalized(beta=beta, update_epochs=6), iterations=1, callbacks=[recorder])
        kls.append(recorder.kls[0])
    assert kls[1] < 0.5 * kls[0]


# ----- beta


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 1.0), (0.0199, 1.0), (0.0201, 2.0), (0.03, 2.0), (0.0449, 2.0), (0.0451, 4.0)],
)
def test_beta_halves_below_two_thirds_and_doubles_above_one_and_a_half_of_the_target(kl, expected):
    """Target 0.03: it stays between 0.02 and 0.045."""
    assert adapted_beta(2.0, kl, target_kl=0.03) == expected


def test_beta_follows_the_kl_after_the_updates(penalized, fit):
    """A target far above every KL halves it, one far below doubles it; the metric is the old one.

    The KL is that of the policy behind the last update, from the definition of k3.
    """
    for target, betas in ((1e3, [2.0, 1.0, 0.5]), (1e-9, [8.0, 16.0, 32.0])):
        recorder = Recorder()
        fit(penalized(beta=4.0, target_kl=target), iterations=3, callbacks=[recorder])
        assert recorder.betas == betas
        logged = [metrics["old_policy_kl_coef"] for metrics in recorder.metrics]
        assert logged == [4.0, *betas[:-1]]
        for metrics, kl in zip(recorder.metrics, recorder.kls, strict=True):
            assert metrics["old_policy_kl"] == pytest.approx(kl, rel=1e-3)
            assert kl > 0


def test_beta_stays_within_a_factor_of_1024(penalized, fit):
    """Without a signal the KL is 0; after a thousand iterations beta would be 0 for good."""
    module = penalized(beta=4.0, target_kl=1e3)
    module.beta = 4.0 / 1024
    fit(module, iterations=1)
    assert module.beta == 4.0 / 1024


def test_beta_waits_for_the_warm_up_of_the_critic(penalized, fit):
    """Two iterations in which the policy rests say nothing of beta; their KL is 0."""
    recorder, module = Recorder(), penalized(beta=4.0, target_kl=1e3, critic_warmup=2)
    fit(module, iterations=3, callbacks=[recorder])
    assert recorder.betas == [4.0, 4.0, 2.0]
    kls = [metrics["old_policy_kl"] for metrics in recorder.metrics]
    assert kls[:2] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert kls[2] > 0


def test_an_iteration_without_a_token_leaves_beta(penalized, fit):
    """One token that may not be the end token is cut off, and what is cut off is left out."""
    sampling = SamplingSettings(max_new_tokens=1, min_new_tokens=1)
    recorder = Recorder()
    module = penalized(beta=4.0, target_kl=1e3, sampling=sampling, filter_truncated=True)
    fit(module, iterations=1, callbacks=[recorder])
    assert not recorder.experiences[0].mask.any()
    assert recorder.betas == [4.0]
    assert math.isnan(recorder.metrics[0]["old_policy_kl"])


def test_a_fixed_beta_stays_and_no_kl_is_measured(penalized, fit):
    recorder = Recorder()
    fit(penalized(beta=4.0), iterations=2, callbacks=[recorder])
    assert recorder.betas == [4.0, 4.0]
    assert "old_policy_kl" not in recorder.metrics[-1]


def test_a_resumed_run_is_the_uninterrupted_one(penalized, fit, weights, tmp_path):
    build = partial(penalized, beta=4.0, target_kl=1e3)
    whole, path = build(), tmp_path / "stopped.ckpt"
    fit(whole, iterations=4)
    fit(build(), iterations=4, callbacks=[StopAfter(2, path)])
    assert torch.load(path, weights_only=True)["lit_rl"]["beta"] == 1.0
    resumed = build()
    fit(resumed, iterations=4, ckpt_path=path)
    assert resumed.beta == whole.beta == 0.25
    assert torch.equal(weights(resumed), weights(whole))


def test_a_fixed_beta_is_that_of_the_configuration_over_a_resume(penalized, fit, tmp_path):
    path = tmp_path / "stopped.ckpt"
    fit(penalized(beta=4.0), iterations=2, callbacks=[StopAfter(1, path)])
    resumed = penalized(beta=5.0)
    fit(resumed, iterations=2, ckpt_path=path)
    assert resumed.beta == 5.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0, must be above 0"),
        ({"beta": float("inf")}, "beta is inf, must be above 0"),
        ({"target_kl": 0.0}, "target_kl is 0.0, must be above 0"),
        ({"update_epochs": 1}, "one update per rollout, in which the penalty has no gradient"),
    ],
)
def test_refuses(penalized, settings, message):
    with pytest.raises(ValueError, match=message):
        penalized(**settings)
