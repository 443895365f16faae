"""The step of the policy keeps to its trust region, and nothing else moves the policy."""

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from acting import StopAfter
from lit_rl.advantages import GAE
from lit_rl.algorithms import TRPO, CurrentLogProbs
from lit_rl.callbacks import RatioMetrics, RewardMetrics, RLCallback, StopOnKL
from lit_rl.models import SharedTrunk
from lit_rl.models.fisher import fisher_product, flat, plain_attention
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


def nothing(responses: list[str]) -> list[float]:
    return [0.0] * len(responses)


class Recorder(RLCallback):
    """Keeps the experience, the policy before the updates, and policy and critic after each."""

    def __init__(self):
        self.experiences, self.before, self.updates = [], [], []
        self.policies, self.critics, self.metrics = [], [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.experiences.append(experience)
        self.before.append(copy.deepcopy(module.policy))

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)
        self.policies.append(copy.deepcopy(module.policy))
        self.critics.append(flat(module.critic.parameters()).detach().clone())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.metrics.append({name: float(v) for name, v in trainer.callback_metrics.items()})

    @property
    def steps(self):
        return [u.policy_step for u in self.updates if u.policy_step is not None]


def vector(policy):
    return flat(policy.parameters()).detach()


def distributions(policy, experience, temperature=1.0):
    """The model's own distribution at each response token."""
    logits = policy.head(policy.states(experience))
    return torch.distributions.Categorical(logits=logits / temperature)


@torch.no_grad()
def mean_kl(old, new, experience):
    """From the definition, over the whole vocabulary."""
    first, second = (distributions(policy, experience) for policy in (old, new))
    return torch.distributions.kl_divergence(first, second)[experience.mask].mean()


def surrogate(policy, experience, entropy_coef=0.0):
    """mean over tokens of ratio * A + coef * entropy, from the model's own distributions."""
    distribution = distributions(policy, experience)
    log_probs = distribution.log_prob(experience.response_ids)
    ratio = (log_probs - experience.old_log_probs).exp()
    values = ratio * experience.advantages + entropy_coef * distribution.entropy()
    return values[experience.mask].mean()


@pytest.fixture
def trpo(algorithm):
    settings = {
        "kind": TRPO,
        "reward": PythonFunction(num_fives),
        "advantage": GAE(whiten=False),
        "critic_lr": 0.05,
        "cg_iterations": 4,
        "update_epochs": 2,
    }
    return partial(algorithm, **settings)


@pytest.fixture
def recorded(fit):
    def run(module, iterations=1, **settings):
        recorder = Recorder()
        trainer = fit(module, iterations, callbacks=[recorder], **settings)
        assert trainer.global_step == iterations * module.steps_per_iteration
        return recorder

    return run


# ----- the step


def test_a_step_improves_the_surrogate_within_the_limit(trpo, recorded):
    seen = recorded(trpo(max_kl=0.02), iterations=3)
    assert len(seen.steps) == 3
    for number, step in enumerate(seen.steps):
        old, new = seen.before[number], seen.policies[2 * number]
        experience = seen.experiences[number]
        kl = mean_kl(old, new, experience)
        # Half of the full step has a quarter of its KL.
        assert 0.02 * 0.2 < kl <= 0.02
        assert step.kl == pytest.approx(float(kl), rel=1e-3)
        with torch.no_grad():
            gain = surrogate(new, experience) - surrogate(old, experience)
        assert gain > 0.001
        assert step.improvement == pytest.approx(float(gain), rel=1e-3)


def test_a_step_is_along_the_damped_natural_gradient_and_its_full_length_has_the_limit_as_kl(
    trpo, recorded
):
    """(F + damping) step is parallel to the gradient; step^T F step / 2 = max_kl when whole."""
    seen = recorded(trpo(max_kl=0.01, damping=0.05, cg_iterations=60))
    (old,), (experience,), (step,) = seen.before, seen.experiences, seen.steps
    moved = (vector(seen.policies[0]) - vector(old)) / step.fraction
    with plain_attention():
        image = fisher_product(old, [experience], moved, temperature=1.0)
        gradient = torch.autograd.grad(surrogate(old, experience), list(old.parameters()))
    assert float(moved @ image / 2) == pytest.approx(0.01, rel=1e-3)
    cosine = torch.cosine_similarity(image + 0.05 * moved, flat(gradient), dim=0)
    assert float(cosine) > 0.9999
    # Natural and plain gradient are not the same direction.
    assert float(torch.cosine_similarity(moved, flat(gradient), dim=0)) < 0.99


def test_the_entropy_bonus_is_part_of_what_is_improved(trpo, recorded):
    """Without any reward and any value the objective is coef times the entropy."""
    seen = recorded(trpo(reward=PythonFunction(nothing), entropy_coef=2.0))
    (old,), (experience,), (step,) = seen.before, seen.experiences, seen.steps
    with torch.no_grad():
        before, after = (
            distributions(policy, experience).entropy()[experience.mask].mean()
            for policy in (old, seen.policies[0])
        )
    assert after - before > 0.001
    assert step.improvement == pytest.approx(float(2.0 * (after - before)), rel=1e-3)


def test_a_rejected_step_leaves_the_policy_bit_for_bit_and_the_critic_learns(trpo, recorded):
    """A limit of 1e-20 nats asks for a step that rounding swallows: nothing improves.

    The optimizer, SGD with a learning rate of 0.5, does not move the policy either.
    """
    seen = recorded(trpo(max_kl=1e-20), iterations=2)
    assert [step.fraction for step in seen.steps] == [0.0, 0.0]
    for policy in seen.policies:
        assert torch.equal(vector(policy), vector(seen.before[0]))
    critics = seen.critics
    assert all(not torch.equal(a, b) for a, b in pairwise(critics))
    assert seen.metrics[-1]["trust_region/rejected_fraction"] == 1.0
    assert seen.metrics[-1]["trust_region/kl"] == 0.0
    assert seen.metrics[-1]["critic/grad_norm"] > 0


def test_what_the_optimizer_would_do_to_the_policy_is_not_logged(trpo, recorded):
    """It does nothing: a gradient norm or a learning rate would be that of no step."""
    metrics = recorded(trpo()).metrics[-1]
    assert metrics.keys() & {"grad_norm", "learning_rate"} == set()
    assert metrics["critic/learning_rate"] == pytest.approx(0.05)


def test_without_any_advantage_there_is_no_step(trpo, recorded):
    seen = recorded(trpo(reward=PythonFunction(nothing)))
    assert torch.equal(vector(seen.policies[-1]), vector(seen.before[0]))
    assert seen.metrics[-1]["trust_region/rejected_fraction"] == 1.0


def test_only_the_first_epoch_moves_the_policy(trpo, recorded):
    """Two minibatches in three epochs: two steps, then the critic alone."""
    seen = recorded(trpo(num_minibatches=2, update_epochs=3))
    policies = [vector(seen.before[0]), *map(vector, seen.policies)]
    moved = [not torch.equal(a, b) for a, b in pairwise(policies)]
    assert moved == [True, True, False, False, False, False]
    assert len({float(critic.double().sum()) for critic in seen.critics}) == 6


def test_the_policy_takes_no_part_in_epochs_that_do_not_move_it(trpo, fit, weights):
    """The critic learns the same as beside it, and the metrics are those of the first epoch."""

    class WithPass(TRPO):
        def update(self, experience, rows, index):
            update = super().update(experience, rows, index)
            self.seen = [*getattr(self, "seen", []), bool(update.micro_batches)]
            return update

    class WithPolicy(WithPass):
        def forward_pass(self, experience):
            self.policy_rests = False
            return super().forward_pass(experience)

    results = []
    for kind in (WithPass, WithPolicy):
        module = trpo(kind=kind, update_epochs=3, num_minibatches=2)
        trainer = fit(module, iterations=1, callbacks=[RatioMetrics(), RewardMetrics()])
        entropy = trainer.callback_metrics["policy/entropy"]
        results.append((module.seen, weights(module), flat(module.critic.parameters()), entropy))
    (seen, policy, critic, entropy), (all_seen, policy_beside, critic_beside, _) = results
    assert seen == [True] * 2 + [False] * 4
    assert all_seen == [True] * 6
    assert torch.equal(policy, policy_beside)
    torch.testing.assert_close(critic, critic_beside, rtol=0, atol=1e-7)
    assert entropy > 0


def test_each_step_keeps_to_the_limit_from_the_policy_before_it(trpo, recorded):
    """On the rows of its own minibatch."""
    module = trpo(num_minibatches=2, update_epochs=1, max_kl=0.005)
    seen = recorded(module)
    first, second = (
        torch.cat([part.mask.sum()[None] for part, _ in update.micro_batches]).sum()
        for update in seen.updates
    )
    assert first + second == seen.experiences[0].mask.sum()
    pairs = [(seen.before[0], seen.policies[0]), tuple(seen.policies)]
    for (old, new), update in zip(pairs, seen.updates, strict=True):
        sums = [mean_kl(old, new, part) * part.mask.sum() for part, _ in update.micro_batches]
        tokens = sum(part.mask.sum() for part, _ in update.micro_batches)
        assert 0 < float(sum(sums) / tokens) <= 0.005


def test_the_policy_waits_while_the_critic_warms_up(trpo, recorded):
    seen = recorded(trpo(critic_warmup=1), iterations=2)
    assert torch.equal(vector(seen.before[1]), vector(seen.before[0]))
    assert not torch.equal(vector(seen.policies[-1]), vector(seen.before[0]))
    assert not torch.equal(seen.critics[1], seen.critics[0])
    assert math.isnan(seen.metrics[0]["trust_region/kl"])
    assert seen.metrics[1]["trust_region/rejected_fraction"] == 0.0


def test_metrics_are_means_over_the_steps(trpo, recorded):
    seen = recorded(trpo(num_minibatches=2))
    assert len(seen.steps) == 2
    for name in ("kl", "improvement"):
        mean = sum(getattr(step, name) for step in seen.steps) / 2
        assert seen.metrics[0][f"trust_region/{name}"] == pytest.approx(mean, rel=1e-6)
    fraction = sum(step.fraction for step in seen.steps) / 2
    assert seen.metrics[0]["trust_region/step_fraction"] == pytest.approx(fraction)


# ----- what may not change it


def test_the_size_of_micro_batches_changes_no_step(trpo, recorded):
    """Conjugate gradient multiplies rounding; few iterations of it are compared."""
    settings = {"num_minibatches": 2, "entropy_coef": 0.01}
    whole, pieces = (
        recorded(trpo(micro_batch_tokens=size, **settings), iterations=2) for size in (10_000, 24)
    )
    assert [len(update.passes) for update in whole.updates] == [1] * 8
    assert min(len(update.passes) for update in pieces.updates) > 2
    moved = vector(whole.policies[-1]) - vector(whole.before[0])
    assert moved.abs().max() > 0.01
    torch.testing.assert_close(
        vector(pieces.policies[-1]), vector(whole.policies[-1]), rtol=0, atol=1e-5
    )


def test_gradient_checkpointing_changes_no_step(trpo, recorded):
    plain, checkpointed = (recorded(trpo(gradient_checkpointing=flag)) for flag in (False, True))
    assert torch.equal(vector(plain.policies[-1]), vector(checkpointed.policies[-1]))


def test_the_curvature_of_one_row_in_some_is_that_of_a_part_of_the_update(trpo, recorded, fit):
    """24 rows in two minibatches of 12: the Fisher rows are 4 of the 12."""
    module = trpo(num_minibatches=2, fisher_one_in=3)
    rows = []

    class Rows(RLCallback):
        def on_minibatch(self, trainer, module, update):
            if update.index < 2:
                rows.append((module.minibatches(0)[update.index], module.fisher_rows(update.index)))

    fit(module, iterations=1, callbacks=[Rows()])
    for minibatch, part in rows:
        assert (len(minibatch), len(part)) == (12, 4)
        assert minibatch[:4].tolist() == part.tolist()
    seen = recorded(trpo(fisher_one_in=3))
    (step,) = seen.steps
    assert step.fraction > 0
    assert mean_kl(seen.before[0], seen.policies[0], seen.experiences[0]) <= 0.01


def test_a_resumed_run_is_the_uninterrupted_one(trpo, fit, weights, tmp_path):
    build = partial(trpo, optimizer=partial(torch.optim.AdamW, lr=0.01), kl_coef=0.05)
    whole, path = build(), tmp_path / "stopped.ckpt"
    fit(whole, iterations=4)
    fit(build(), iterations=4, callbacks=[StopAfter(2, path)])
    resumed = build()
    fit(resumed, iterations=4, ckpt_path=path)
    assert resumed.iteration == 4
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(flat(resumed.critic.parameters()), flat(whole.critic.parameters()))


# ----- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kl": 0.0}, "max_kl is 0.0, must be above 0"),
        ({"damping": -0.1}, "damping is -0.1, must be at least 0"),
        ({"cg_iterations": 0}, "cg_iterations is 0, must be at least 1"),
        ({"line_search_steps": 0}, "0 steps, must be at least 1"),
        ({"backtrack_coef": 1.5}, "backtrack_coef is 1.5, must be in"),
        ({"accept_ratio": 1.0}, "accept_ratio is 1.0, must be in"),
        ({"fisher_one_in": 0}, "fisher_one_in is 0, must be at least 1"),
        ({"old_log_probs": CurrentLogProbs(), "update_epochs": 1}, "makes every ratio 1"),
    ],
)
def test_refuses_a_setting_at_construction(trpo, settings, message):
    with pytest.raises(ValueError, match=message):
        trpo(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "source.dtype bfloat16 is too coarse"),
        (
            {"attn_implementation": "flash_attention_2"},
            "flash_attention_2 has no second derivative",
        ),
        ({"dropout": True}, "source.dropout true gives old and new policy different"),
    ],
)
def test_refuses_a_model_whose_step_would_be_wrong(trpo, source, settings, message):
    with pytest.raises(ValueError, match=message):
        trpo(source=source(**settings))


def test_refuses_a_critic_that_shares_weights(trpo, fit):
    with pytest.raises(ValueError, match=r"SharedTrunk reads the policy's own hidden states"):
        fit(trpo(critic=SharedTrunk()))


def test_refuses_mixed_precision(trpo, fit):
    with pytest.raises(ValueError, match=r"trainer.precision bf16-mixed is too coarse"):
        fit(trpo(), precision="bf16-mixed")


def test_refuses_to_stop_updates_of_which_one_moves_the_policy(trpo, fit):
    with pytest.raises(ValueError, match="TRPO moves the policy in the first one alone"):
        fit(trpo(), callbacks=[StopOnKL(limit=0.1)])
    fit(trpo(num_minibatches=2), iterations=1, callbacks=[StopOnKL(limit=0.1)])


def test_refuses_fisher_rows_that_do_not_divide_an_update(trpo, fit):
    with pytest.raises(ValueError, match=r"fisher_one_in 5 does not divide the 24 rows.*4 would"):
        fit(trpo(fisher_one_in=5))
