"""What every estimator, policy loss, aggregation, KL penalty and sampler correction obeys.

The classes are found, not listed: one that is written tomorrow in its package is tested by these
laws tomorrow. Only a class with required arguments, or with settings worth testing beside its
defaults, needs an entry in `SETTINGS`.
"""

import importlib
import inspect
import pkgutil
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch

from lit_rl import advantages, policy_losses
from lit_rl.advantages import (
    GAE,
    AdvantageEstimator,
    BatchMean,
    CriticEstimator,
    MovingAverage,
    NormalizedParts,
    ReturnToGo,
    WhitenedReturn,
)
from lit_rl.aggregations import Aggregation, FixedLength, Totals
from lit_rl.kl_penalties import KLInLoss, KLInReward, KLPenalty
from lit_rl.policy_losses import (
    ClippedSurrogate,
    ClippedWeight,
    OffPolicySequenceMask,
    PolicyLoss,
    SequenceClipped,
)
from lit_rl.reward_shaping import (
    ClipReward,
    MissingEndPenalty,
    RewardShaping,
    ScaleReward,
    SoftOverlongPunishment,
)
from lit_rl.sampler_corrections import ImportanceMask, SamplerCorrection, TruncatedImportance
from lit_rl.types import (
    BaselinedRollout,
    CriticExperience,
    Experience,
    ScoredRollout,
    ValuedRollout,
)
from lit_rl.value_losses import ClippedSquaredError, ValueLoss

# How a class is constructed; one that is not named here is constructed without arguments.
SETTINGS = {
    ClipReward: [{"minimum": -0.5, "maximum": 0.5}],
    MissingEndPenalty: [{"penalty": 1.0}],
    ScaleReward: [{"factor": 0.5}],
    SoftOverlongPunishment: [{"max_tokens": 5, "cache_tokens": 3}],
    ClippedSquaredError: [{}, {"clip": None}],
    ClippedSurrogate: [{}, {"clip_high": 0.28}, {"dual_clip": 1.5}],
    ClippedWeight: [{}, {"clip_low": 0.3}],
    FixedLength: [{"length": 8}],
    GAE: [
        {},
        {"gamma": 0.9, "critic_lam": 1.0, "bootstrap_truncated": True, "whiten": False},
        {"length_adaptive": 0.5},
    ],
    ImportanceMask: [{"level": "token"}, {"level": "sequence"}],
    KLInLoss: [
        {"estimator": "k1", "unbiased_gradient": True},
        {"estimator": "k2"},
        {"estimator": "k3"},
        {"estimator": "k3", "unbiased_gradient": True},
        {"estimator": "abs"},
    ],
    OffPolicySequenceMask: [
        {"loss": ClippedSurrogate(), "max_kl": 0.1},
        {"loss": SequenceClipped(clip_low=0.1, clip_high=0.1), "max_kl": 0.1},
    ],
    SequenceClipped: [{}, {"clip_low": 0.1, "clip_high": 0.2}],
    TruncatedImportance: [{"level": "token"}, {"level": "sequence"}],
    KLInReward: [{"estimator": name} for name in ("k1", "k2", "k3", "abs")],
    NormalizedParts: [{}, {"weights": {"right": 2.0, "short": -0.5}}],
    ReturnToGo: [{}, {"gamma": 0.9, "baseline": BatchMean()}, {"baseline": MovingAverage()}],
    WhitenedReturn: [{}, {"gamma": 0.9}],
}

# Three prompts with four responses each. In the second group one is empty and one is missing. In
# the first response two tokens are not the policy's own.
GROUP_SIZE = 4
LENGTHS = torch.tensor([5, 2, 1, 3, 0, 4, 3, 5, 5, 5, 2, 1])
ROLLOUTS, TOKENS = len(LENGTHS), 5
MASK = torch.arange(TOKENS) < LENGTHS[:, None]
MASK[0, 1:3] = False
MISSING = torch.arange(ROLLOUTS) == 6
COUNTS = MASK & ~MISSING[:, None]

# How the rows of a step may be cut into micro-batches, in any order.
SPLITS = [
    [[row] for row in range(ROLLOUTS)],
    [[11, 0, 5], [4], [1, 2, 3, 6, 7, 8, 9, 10]],
    [[3, 2, 1, 0, 7, 6], [5, 4, 11, 10, 9, 8]],
]
# What may stand where the mask is False.
over_anything = pytest.mark.parametrize("anything", [torch.nan, torch.inf, -torch.inf, 1e3])


def concrete_subclasses(base):
    """Subclasses and theirs, without abstract ones and without the toys of other tests."""
    found = set()
    for subclass in base.__subclasses__():
        found |= concrete_subclasses(subclass)
        if subclass.__module__.startswith("lit_rl.") and not inspect.isabstract(subclass):
            found.add(subclass)
    return found


def members(base):
    """Every concrete subclass of `base` under each of its settings, as parameters of a fixture."""
    return [
        pytest.param((cls, settings), id="-".join([cls.__name__, *map(str, settings.values())]))
        for cls in sorted(concrete_subclasses(base), key=lambda cls: cls.__name__)
        for settings in SETTINGS.get(cls, [{}])
    ]


def constructed(cls, settings):
    try:
        return cls(**deepcopy(settings))
    except TypeError as error:
        pytest.fail(
            f"{cls.__name__} cannot be constructed from {settings}: {error}. "
            f"Add an entry for {cls.__name__} to SETTINGS in {__file__}"
        )


# A class counts from the moment its file exists, before the package re-exports it.
for package in (advantages, policy_losses):
    for module in pkgutil.iter_modules(package.__path__, prefix=f"{package.__name__}."):
        importlib.import_module(module.name)


@pytest.fixture(params=members(AdvantageEstimator))
def estimator(request):
    return constructed(*request.param)


@pytest.fixture(params=members(CriticEstimator))
def critic_estimator(request):
    return constructed(*request.param)


@pytest.fixture(
    params=[
        member for member in members(AdvantageEstimator) if member.values[0][0].min_group_size > 1
    ]
)
def group_estimator(request):
    return constructed(*request.param)


@pytest.fixture(params=members(PolicyLoss))
def policy_loss(request):
    return constructed(*request.param)


@pytest.fixture(params=members(ValueLoss))
def value_loss(request):
    return constructed(*request.param)


@pytest.fixture(params=members(Aggregation))
def aggregation(request):
    return constructed(*request.param)


@pytest.fixture(params=members(KLPenalty))
def penalty(request):
    return constructed(*request.param)


@pytest.fixture(params=members(RewardShaping))
def shaping(request):
    return constructed(*request.param)


@pytest.fixture(params=members(SamplerCorrection))
def correction(request):
    return constructed(*request.param)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs_near_the_old_ones():
    """With ratios on both sides of every clip."""
    return experience().old_log_probs + 0.5 * normal(ROLLOUTS, TOKENS, seed=1)


def experience():
    """With advantages that are the same for each token of a response."""
    return Experience(
        prompt_ids=torch.ones(ROLLOUTS, 1, dtype=torch.long),
        prompt_mask=torch.ones(ROLLOUTS, 1, dtype=torch.bool),
        response_ids=torch.zeros(ROLLOUTS, TOKENS, dtype=torch.long),
        mask=MASK,
        sampler_log_probs=torch.where(MASK, -normal(ROLLOUTS, TOKENS, seed=2).abs(), 0.0),
        advantages=torch.where(MASK, normal(ROLLOUTS, 1, seed=3), 0.0),
        old_log_probs=torch.where(MASK, -normal(ROLLOUTS, TOKENS, seed=4).abs(), 0.0),
        ref_log_probs=torch.where(MASK, -normal(ROLLOUTS, TOKENS, seed=5).abs(), 0.0),
    )


def critic_experience():
    """With targets on both sides of the old values."""
    return experience().extended(
        CriticExperience,
        old_values=torch.where(MASK, normal(ROLLOUTS, TOKENS, seed=8), 0.0),
        returns=torch.where(MASK, normal(ROLLOUTS, TOKENS, seed=9), 0.0),
    )


def values_near_the_old_ones():
    """Further from them than a clip, and nearer."""
    return critic_experience().old_values + 0.5 * normal(ROLLOUTS, TOKENS, seed=10)


def scored_rollout():
    """Every token that counts earned something; every other one ends a step."""
    token_rewards = torch.where(COUNTS, normal(ROLLOUTS, TOKENS, seed=6), 0.0)
    ends_step = COUNTS & (torch.arange(TOKENS) % 2 == 0)
    rewards = token_rewards.sum(dim=1)
    names = tuple(str(row) for row in range(ROLLOUTS))
    return ScoredRollout(
        prompt_ids=torch.ones(ROLLOUTS, 1, dtype=torch.long),
        prompt_mask=torch.ones(ROLLOUTS, 1, dtype=torch.bool),
        response_ids=torch.zeros(ROLLOUTS, TOKENS, dtype=torch.long),
        mask=MASK,
        sampler_log_probs=experience().sampler_log_probs,
        finished=torch.arange(ROLLOUTS) % 3 > 0,
        prompts=names,
        responses=names,
        answers=names,
        columns={},
        group_size=GROUP_SIZE,
        rewards=rewards,
        token_rewards=token_rewards,
        step_rewards=torch.where(ends_step, normal(ROLLOUTS, TOKENS, seed=11), torch.nan),
        reward_parts={
            "right": torch.where(MISSING, torch.nan, rewards),
            # It does not apply to the longest responses.
            "short": torch.where(MISSING | (LENGTHS == 5), torch.nan, normal(ROLLOUTS, seed=12)),
        },
        missing=MISSING,
    )


def rollout_for(estimator):
    """`scored_rollout`, at the stage that the estimator reads."""
    scored, stage = scored_rollout(), estimator.reads
    if issubclass(stage, ValuedRollout):
        values = torch.where(MASK, normal(ROLLOUTS, TOKENS, seed=13), 0.0)
        return scored.extended(stage, values=values, end_values=normal(ROLLOUTS, seed=14))
    if issubclass(stage, BaselinedRollout):
        return scored.extended(stage, baseline_rewards=normal(ROLLOUTS, seed=15))
    assert stage is ScoredRollout
    return scored


def with_anything(scored, anything):
    """A rollout that holds `anything` at the tokens and the rows that do not count."""

    def dirty(tensor):
        if not tensor.is_floating_point():
            return tensor
        return torch.where(COUNTS if tensor.dim() == 2 else COUNTS.any(dim=1), tensor, anything)

    return scored.map_tensors(dirty)


def gradient_of(function, log_probs):
    """Value of `function(log_probs)`, and the gradient of its sum."""
    log_probs = log_probs.clone().requires_grad_()
    value = function(log_probs)
    if not value.requires_grad:
        return value, torch.zeros_like(log_probs)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    return value.detach(), gradient


def filled(tensor, anything):
    """`tensor` with `anything` at the positions that do not count."""
    return torch.where(MASK, tensor, anything)


# The classes are found.


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (AdvantageEstimator, {"GAE", "GroupCentered", "GroupNormalized", "LeaveOneOut"}),
        (ValueLoss, {"ClippedSquaredError"}),
        (
            PolicyLoss,
            {
                "ClippedSurrogate",
                "ClippedWeight",
                "GeometricMeanClipped",
                "LogProbSurrogate",
                "OffPolicySequenceMask",
                "SequenceClipped",
                "SoftGate",
                "Surrogate",
            },
        ),
        (SamplerCorrection, {"ImportanceMask", "TruncatedImportance"}),
        (Aggregation, {"FixedLength", "SequenceMean", "SequenceSum", "TokenMean", "TokenSum"}),
        (KLPenalty, {"KLInLoss", "KLInReward"}),
        (
            RewardShaping,
            {"ClipReward", "MissingEndPenalty", "ScaleReward", "SoftOverlongPunishment"},
        ),
    ],
)
def test_the_laws_hold_for_the_subclasses_of_subclasses_too(base, names):
    assert names <= {cls.__name__ for cls in concrete_subclasses(base)}


def test_a_class_that_cannot_be_constructed_says_where_to_add_its_arguments():
    @dataclass
    class Halved:
        length: int

    with pytest.raises(pytest.fail.Exception, match="Add an entry for Halved to SETTINGS in"):
        constructed(Halved, {})


# Advantages.


def test_a_token_that_does_not_count_and_a_missing_row_have_no_advantage(estimator):
    values = estimator(rollout_for(estimator))
    assert values[~COUNTS].eq(0).all()
    assert values[COUNTS].ne(0).any()
    assert values.isfinite().all()


@over_anything
def test_what_does_not_count_changes_no_advantage(estimator, anything):
    scored = rollout_for(estimator)
    assert torch.equal(estimator(with_anything(scored, anything)), estimator(scored))


def test_reordering_the_prompts_reorders_the_advantages(estimator):
    scored = rollout_for(estimator)
    rows = torch.arange(ROLLOUTS).view(-1, GROUP_SIZE)[[2, 0, 1]].flatten()
    reordered = scored.map_tensors(lambda tensor: tensor[rows])
    torch.testing.assert_close(estimator(reordered), estimator(scored)[rows])


def test_padding_more_columns_changes_no_advantage(estimator):
    scored = rollout_for(estimator)

    def padded(tensor):
        return torch.nn.functional.pad(tensor, (0, 2)) if tensor.shape[1:] == (TOKENS,) else tensor

    torch.testing.assert_close(estimator(scored.map_tensors(padded)), padded(estimator(scored)))


def test_a_constant_added_to_the_rewards_of_a_group_changes_nothing(group_estimator):
    scored = rollout_for(group_estimator)
    constants = torch.tensor([100.0, -3.0, 0.7]).repeat_interleave(GROUP_SIZE)
    shifted = replace(
        scored,
        rewards=scored.rewards + constants,
        step_rewards=scored.step_rewards + constants[:, None],
        reward_parts={name: part + constants for name, part in scored.reward_parts.items()},
    )
    torch.testing.assert_close(group_estimator(shifted), group_estimator(scored))


def test_what_an_estimator_remembers_comes_from_observing_and_survives_a_checkpoint(estimator):
    scored = rollout_for(estimator)
    other = replace(scored, token_rewards=scored.token_rewards.square())
    fresh = deepcopy(estimator)
    assert torch.equal(estimator(other), estimator(other))
    assert estimator.state_dict() == fresh.state_dict()
    estimator.observe(scored)
    fresh.load_state_dict(estimator.state_dict())
    assert torch.equal(fresh(other), estimator(other))


@over_anything
def test_what_does_not_count_has_no_target_and_changes_none(critic_estimator, anything):
    valued = rollout_for(critic_estimator)
    targets = critic_estimator.returns(valued)
    assert targets[~COUNTS].eq(0).all()
    assert targets[COUNTS].ne(0).all()
    assert torch.equal(critic_estimator.returns(with_anything(valued, anything)), targets)


# Value losses.


def test_a_value_at_its_target_has_no_loss_and_no_gradient(value_loss):
    batch = critic_experience()
    batch = replace(batch, old_values=batch.returns)
    loss, gradient = gradient_of(lambda now: value_loss(now, batch), batch.returns)
    assert loss.eq(0).all()
    assert gradient.eq(0).all()


def test_at_the_old_values_the_gradient_is_the_error(value_loss):
    batch = critic_experience()
    _, gradient = gradient_of(lambda now: value_loss(now, batch), batch.old_values)
    torch.testing.assert_close(gradient, batch.old_values - batch.returns)
    assert not value_loss.clipped(batch.old_values, batch).any()


def test_the_gradient_stops_where_a_value_clip_binds_and_nowhere_else(value_loss):
    batch, values = critic_experience(), values_near_the_old_ones()
    _, gradient = gradient_of(lambda now: value_loss(now, batch), values)
    assert torch.equal(gradient.eq(0), value_loss.clipped(values, batch) | ~MASK)


@over_anything
def test_masked_tokens_have_no_value_loss_and_no_gradient_whatever_they_hold(value_loss, anything):
    clean, values = critic_experience(), values_near_the_old_ones()
    dirty = replace(
        clean,
        old_values=filled(clean.old_values, anything),
        returns=filled(clean.returns, anything),
    )
    dirty_values = filled(values, anything)
    loss, gradient = gradient_of(lambda now: value_loss(now, dirty), dirty_values)
    expected = gradient_of(lambda now: value_loss(now, clean), filled(values, 0.0))

    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])
    assert loss[~MASK].eq(0).all()
    assert gradient[~MASK].eq(0).all()
    assert torch.equal(value_loss.clipped(dirty_values, dirty), value_loss.clipped(values, clean))


def test_reordering_the_rows_reorders_the_value_loss(value_loss):
    batch, values = critic_experience(), values_near_the_old_ones()
    rows = torch.arange(ROLLOUTS).flip(0)
    reordered = batch.select(rows)
    assert torch.equal(value_loss(values[rows], reordered), value_loss(values, batch)[rows])
    clipped = value_loss.clipped(values, batch)
    assert torch.equal(value_loss.clipped(values[rows], reordered), clipped[rows])


# Policy losses.


def test_at_equal_policies_the_gradient_is_minus_the_advantage(policy_loss):
    batch = experience()
    _, gradient = gradient_of(lambda now: policy_loss(now, batch), batch.old_log_probs)
    torch.testing.assert_close(gradient, -batch.advantages)
    clipped = policy_loss.clipped(batch.old_log_probs, batch)
    assert not any(binding.any() for binding in clipped.values())


@over_anything
def test_masked_tokens_have_no_loss_and_no_gradient_whatever_they_hold(policy_loss, anything):
    clean, log_probs = experience(), log_probs_near_the_old_ones()
    dirty = replace(
        clean,
        sampler_log_probs=filled(clean.sampler_log_probs, anything),
        advantages=filled(clean.advantages, anything),
        old_log_probs=filled(clean.old_log_probs, anything),
        ref_log_probs=filled(clean.ref_log_probs, anything),
    )
    dirty_log_probs = filled(log_probs, anything)
    loss, gradient = gradient_of(lambda now: policy_loss(now, dirty), dirty_log_probs)
    expected = gradient_of(lambda now: policy_loss(now, clean), filled(log_probs, 0.0))

    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])
    assert loss[~MASK].eq(0).all()
    assert gradient[~MASK].eq(0).all()
    clipped = policy_loss.clipped(dirty_log_probs, dirty)
    assert not any(binding[~MASK].any() for binding in clipped.values())


def test_reordering_the_rows_reorders_the_loss(policy_loss):
    batch, log_probs = experience(), log_probs_near_the_old_ones()
    rows = torch.arange(ROLLOUTS).flip(0)
    loss = policy_loss(log_probs, batch)
    assert torch.equal(policy_loss(log_probs[rows], batch.select(rows)), loss[rows])
    for name, binding in policy_loss.clipped(log_probs, batch).items():
        reordered = policy_loss.clipped(log_probs[rows], batch.select(rows))[name]
        assert torch.equal(reordered, binding[rows])


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_an_extreme_ratio_leaves_loss_and_gradient_finite(policy_loss, log_ratio, advantage):
    batch = replace(experience(), advantages=torch.full((ROLLOUTS, TOKENS), advantage).double())
    batch = replace(batch, old_log_probs=batch.old_log_probs - log_ratio)
    loss, gradient = gradient_of(lambda now: policy_loss(now, batch), experience().old_log_probs)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    if advantage == 0:
        assert loss.eq(0).all()
        assert gradient.eq(0).all()


def test_at_a_token_at_most_one_clip_binds(policy_loss):
    clipped = policy_loss.clipped(log_probs_near_the_old_ones(), experience())
    for name, binding in clipped.items():
        others = [other for key, other in clipped.items() if key != name]
        assert not any((binding & other).any() for other in others)


# Aggregations.


@pytest.mark.parametrize("split", SPLITS, ids=["one by one", "uneven", "halves"])
def test_micro_batches_have_the_loss_and_the_gradient_of_the_whole(policy_loss, aggregation, split):
    batch, log_probs = experience(), log_probs_near_the_old_ones()
    totals = Totals.of(MASK)

    def in_parts(now):
        parts = []
        for rows in map(torch.tensor, split):
            part = batch.select(rows)
            parts.append(aggregation(policy_loss(now[rows], part), part.mask, totals))
        return torch.stack(parts).sum()

    def whole(now):
        return aggregation(policy_loss(now, batch), MASK, totals)

    torch.testing.assert_close(gradient_of(in_parts, log_probs), gradient_of(whole, log_probs))


@over_anything
def test_masked_tokens_do_not_reach_the_aggregate(aggregation, anything):
    loss, totals = filled(normal(ROLLOUTS, TOKENS, seed=7), 0.0), Totals.of(MASK)
    dirty = gradient_of(lambda values: aggregation(values, MASK, totals), filled(loss, anything))
    clean = gradient_of(lambda values: aggregation(values, MASK, totals), loss)

    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1], clean[1])
    assert dirty[1][~MASK].eq(0).all()


def test_every_token_that_counts_has_a_positive_weight(aggregation):
    loss, totals = normal(ROLLOUTS, TOKENS, seed=7), Totals.of(MASK)
    _, weights = gradient_of(lambda values: aggregation(values, MASK, totals), loss)
    assert weights[MASK].gt(0).all()


def test_reordering_the_rows_leaves_the_aggregate(aggregation):
    loss, totals = normal(ROLLOUTS, TOKENS, seed=7), Totals.of(MASK)
    rows = torch.arange(ROLLOUTS).flip(0)
    reordered = aggregation(loss[rows], MASK[rows], totals)
    torch.testing.assert_close(reordered, aggregation(loss, MASK, totals))


# KL penalties.


def test_equal_policies_pay_no_penalty(penalty):
    ref_log_probs = experience().ref_log_probs
    assert penalty.per_token(ref_log_probs, ref_log_probs).eq(0).all()
    assert penalty.loss(ref_log_probs, ref_log_probs, MASK).eq(0).all()
    assert penalty.reward(ref_log_probs, ref_log_probs, MASK).eq(0).all()


def test_a_penalty_acts_in_exactly_one_place(penalty):
    log_probs, ref_log_probs = log_probs_near_the_old_ones(), experience().ref_log_probs
    in_loss = penalty.loss(log_probs, ref_log_probs, MASK).ne(0).any()
    in_reward = penalty.reward(log_probs, ref_log_probs, MASK).ne(0).any()
    assert in_loss != in_reward


def test_the_gradient_of_a_penalty_moves_log_probs_towards_the_reference(penalty):
    log_probs, ref_log_probs = log_probs_near_the_old_ones(), experience().ref_log_probs
    loss, gradient = gradient_of(lambda now: penalty.loss(now, ref_log_probs, MASK), log_probs)
    acts_in_loss = bool(loss.ne(0).any())
    # Descent subtracts the gradient: positive where the log-prob is above the reference.
    assert torch.equal(
        gradient.sign()[MASK], (log_probs - ref_log_probs).sign()[MASK] * acts_in_loss
    )


def test_a_penalty_in_the_reward_has_no_gradient(penalty):
    log_probs = log_probs_near_the_old_ones().requires_grad_()
    assert not penalty.reward(log_probs, experience().ref_log_probs, MASK).requires_grad


@over_anything
def test_masked_tokens_pay_no_penalty_whatever_they_hold(penalty, anything):
    log_probs, ref_log_probs = log_probs_near_the_old_ones(), experience().ref_log_probs
    dirty_ref = filled(ref_log_probs, -anything)
    loss, gradient = gradient_of(
        lambda now: penalty.loss(now, dirty_ref, MASK), filled(log_probs, anything)
    )
    expected = gradient_of(lambda now: penalty.loss(now, ref_log_probs, MASK), log_probs)

    assert torch.equal(loss, filled(expected[0], 0.0))
    assert torch.equal(gradient, filled(expected[1], 0.0))
    dirty_reward = penalty.reward(filled(log_probs, anything), dirty_ref, MASK)
    assert torch.equal(dirty_reward, penalty.reward(log_probs, ref_log_probs, MASK))


def test_reordering_the_rows_reorders_the_penalties(penalty):
    log_probs, ref_log_probs = log_probs_near_the_old_ones(), experience().ref_log_probs
    rows = torch.arange(ROLLOUTS).flip(0)
    for place in (penalty.loss, penalty.reward):
        reordered = place(log_probs[rows], ref_log_probs[rows], MASK[rows])
        assert torch.equal(reordered, place(log_probs, ref_log_probs, MASK)[rows])


# Corrections of the sampler.


def test_a_sampler_that_agrees_with_the_trainer_has_weights_of_one(correction):
    agreeing = replace(experience(), sampler_log_probs=experience().old_log_probs)
    assert correction.weights(agreeing).eq(1).all()


def test_weights_are_not_negative_and_not_all_one(correction):
    weights = correction.weights(experience())
    assert weights.ge(0).all()
    assert weights.ne(1).any()


def test_weights_have_no_gradient(correction):
    batch = experience()
    old_log_probs = batch.old_log_probs.clone().requires_grad_()
    assert not correction.weights(replace(batch, old_log_probs=old_log_probs)).requires_grad


@over_anything
def test_masked_tokens_have_weight_one_and_change_no_weight(correction, anything):
    clean = experience()
    dirty = replace(
        clean,
        old_log_probs=filled(clean.old_log_probs, anything),
        sampler_log_probs=filled(clean.sampler_log_probs, anything),
    )
    weights = correction.weights(dirty)
    assert torch.equal(weights, correction.weights(clean))
    assert weights[~MASK].eq(1).all()


def test_reordering_the_rows_reorders_the_weights(correction):
    batch, rows = experience(), torch.arange(ROLLOUTS).flip(0)
    assert torch.equal(correction.weights(batch.select(rows)), correction.weights(batch)[rows])


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_an_extreme_sampler_leaves_the_weights_finite(correction, log_ratio):
    batch = experience()
    far = replace(batch, sampler_log_probs=batch.old_log_probs - log_ratio)
    assert correction.weights(far).isfinite().all()


def test_nan_of_the_sampler_at_a_token_that_counts_is_not_hidden(correction):
    batch = experience()
    sampler_log_probs = batch.sampler_log_probs.clone()
    sampler_log_probs[0, 0] = torch.nan
    weights = correction.weights(replace(batch, sampler_log_probs=sampler_log_probs))
    assert weights[0, 0].isnan()


# Reward shaping.


def test_the_tokens_of_a_shaped_rollout_earn_its_rewards(shaping):
    shaped = shaping(scored_rollout())
    counts = COUNTS.any(dim=1)
    torch.testing.assert_close(shaped.token_rewards.sum(dim=1)[counts], shaped.rewards[counts])
    assert shaped.token_rewards[~MASK].eq(0).all()
    assert shaped.rewards.ne(scored_rollout().rewards).any()


def test_a_missing_row_is_not_shaped(shaping):
    shaped = shaping(scored_rollout())
    assert shaped.rewards[MISSING].eq(0).all()
    assert shaped.token_rewards[MISSING].eq(0).all()


def test_shaping_leaves_what_the_reward_gave_and_where_steps_end(shaping):
    scored = scored_rollout()
    shaped = shaping(scored)
    assert torch.equal(shaped.step_rewards.isnan(), scored.step_rewards.isnan())
    given = ("reward_parts", "missing", "mask", "finished", "responses")
    assert all(getattr(shaped, name) is getattr(scored, name) for name in given)


@over_anything
def test_what_does_not_count_changes_no_shaped_reward(shaping, anything):
    shaped, clean = shaping(with_anything(scored_rollout(), anything)), shaping(scored_rollout())
    counts = COUNTS.any(dim=1)
    assert torch.equal(shaped.rewards[counts], clean.rewards[counts])
    assert torch.equal(shaped.token_rewards[COUNTS], clean.token_rewards[COUNTS])


def test_reordering_the_prompts_reorders_the_shaped_rewards(shaping):
    scored = scored_rollout()
    rows = torch.arange(ROLLOUTS).view(-1, GROUP_SIZE)[[2, 0, 1]].flatten()
    reordered = shaping(scored.map_tensors(lambda tensor: tensor[rows]))
    assert torch.equal(reordered.rewards, shaping(scored).rewards[rows])
    assert torch.equal(reordered.token_rewards, shaping(scored).token_rewards[rows])
