"""The weight of the KL: fixed, scheduled, and steered to a target."""

import math

import pytest

from lit_rl.advantages import GroupNormalized
from lit_rl.algorithms import CurrentLogProbs, RecomputedLogProbs
from lit_rl.callbacks import AdaptiveKL, CosineKL, FixedKL, LinearKL, kl_controllers
from lit_rl.callbacks.kl_controllers import adaptive_kl_coef
from lit_rl.kl_penalties import KLInLoss, KLInReward
from lit_rl.sampler_corrections import TruncatedImportance

NAN = float("nan")


def adaptive(initial=0.2, target=6.0, unit="nats_per_response", horizon=10000):
    return AdaptiveKL(initial=initial, target=target, unit=unit, horizon=horizon)


def tokens(make, count, kl):
    """Responses of one token each, with this KL."""
    return make.experience([[1]] * count, old=[[kl]] * count, ref=[[0.0]] * count)


@pytest.fixture
def run(make, iterate):
    """Run iterations on the given experiences; return the weight after each."""

    def iterations(controller, *experiences):
        module, course = make.module(kl_coef=9.0), []
        for experience in experiences:
            iterate(controller, experience=experience, module=module)
            course.append(module.kl_coef)
        return course

    return iterations


# Errors of 1, -0.5 and 0.1: the first two are cut off at 0.2. 256 of 10000 responses.
CASES = [(12.0, 0.201024), (3.0, 0.198976), (6.6, 0.200512), (6.0, 0.2)]


@pytest.mark.parametrize(("kl", "expected"), CASES)
def test_the_error_is_proportional_and_cut_off(make, run, kl, expected):
    (coefficient,) = run(adaptive(), tokens(make, 256, kl))
    assert coefficient == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kl", "expected"), CASES)
def test_responses_of_all_ranks_count(make, run, monkeypatch, kl, expected):
    """Two ranks with 128 responses each are one with 256."""
    monkeypatch.setattr(kl_controllers, "sum_over_ranks", lambda values: 2 * values)
    (coefficient,) = run(adaptive(), tokens(make, 128, kl))
    assert coefficient == pytest.approx(expected, rel=1e-6)


def test_every_iteration_multiplies(make, run):
    course = run(adaptive(), tokens(make, 256, 12.0), tokens(make, 256, 12.0))
    assert course == pytest.approx([0.2 * 1.00512, 0.2 * 1.00512**2], rel=1e-9)


def test_the_unit_says_what_the_target_counts(make, run):
    # Two responses, of 3 tokens and of 1, with KL 2 + 2 + 2 and 6: 6 per response, 3 per token.
    experience = make.experience(
        [[1, 1, 1], [1, 0, 0]],
        old=[[-1.0, -1.0, -1.0], [-1.0, NAN, 5.0]],
        ref=[[-3.0, -3.0, -3.0], [-7.0, 0.0, NAN]],
    )
    held = {"initial": 0.25, "horizon": 1000}
    assert run(adaptive(target=6.0, unit="nats_per_response", **held), experience) == [0.25]
    assert run(adaptive(target=3.0, unit="nats_per_token", **held), experience) == [0.25]
    # 3 is half of 6, and an error of -0.5 is cut off at -0.2.
    lowered = [pytest.approx(0.25 * (1 - 0.2 * 2 / 1000))]
    assert run(adaptive(target=6.0, unit="nats_per_token", **held), experience) == lowered


def test_tokens_and_rows_that_do_not_count_take_no_part(make, run):
    # KL 1 and 9 with mask 1 and 0: mean 1, not 5. The second row is left out: one response.
    experience = make.experience(
        [[1, 0], [0, 0]], old=[[0.0, 0.0], [0.0, NAN]], ref=[[-1.0, -9.0], [-50.0, NAN]]
    )
    for unit in ("nats_per_token", "nats_per_response"):
        assert run(adaptive(target=1.0, unit=unit), experience) == [0.2]
    # One response, not two, in the gain.
    (coefficient,) = run(adaptive(target=0.1, horizon=100), experience)
    assert coefficient == pytest.approx(0.2 * (1 + 0.2 * 1 / 100))


def test_the_sampler_drew_the_tokens_where_there_are_no_old_log_probs(make, run):
    experience = make.experience([[1, 1]], sampler=[[-1.0, -2.0]], ref=[[-4.0, -5.0]])
    assert run(adaptive(target=6.0), experience) == [0.2]


def test_a_wild_log_ratio_moves_the_weight_no_further_than_the_cut(make, run):
    wild = make.experience([[1]], old=[[-1.0]], ref=[[-120.0]])
    assert run(adaptive(horizon=100), wild) == [pytest.approx(0.2 * 1.002)]


def test_no_response_leaves_the_weight_alone(make, run):
    empty = make.experience([[0]], old=[[NAN]], ref=[[NAN]])
    assert run(adaptive(), empty) == [0.2]


def test_a_kl_that_is_nan_is_not_hidden():
    coefficient = adaptive_kl_coef(0.2, NAN, target=6.0, num_responses=1, horizon=100)
    assert math.isnan(coefficient)


def test_more_responses_than_the_horizon_bears_are_refused():
    # 1 - 0.2 * 500 / 100 = 0: the weight would be lost, and negative with one response more.
    with pytest.raises(ValueError, match="horizon is 100 responses, but an iteration has 500"):
        adaptive_kl_coef(0.2, 1.0, target=6.0, num_responses=500, horizon=100)
    below = adaptive_kl_coef(0.2, 1.0, target=6.0, num_responses=499, horizon=100)
    assert below == pytest.approx(0.2 * 0.002)


def test_a_fixed_weight_never_moves(make, run):
    """However far the KL is above any target."""
    assert run(FixedKL(0.25), *[tokens(make, 4, 1000.0)] * 3) == [0.25] * 3


def test_schedules_by_hand():
    linear = LinearKL(initial=0.1, final=0.3, num_iterations=4)
    course = [linear.coefficient(iteration) for iteration in range(6)]
    assert course == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3])
    # The ends are exact.
    assert (course[0], course[4], course[5]) == (0.1, 0.3, 0.3)
    # cos(pi / 4) = sqrt(2) / 2: the way is (1 - sqrt(2) / 2) / 2, 1 / 2, (1 + sqrt(2) / 2) / 2.
    cosine = CosineKL(initial=1.0, final=0.0, num_iterations=4)
    root = math.sqrt(2) / 2
    course = [cosine.coefficient(iteration) for iteration in range(6)]
    assert course == pytest.approx([1, (1 + root) / 2, 0.5, (1 - root) / 2, 0, 0])
    assert course[4:] == [0.0, 0.0]


def test_the_weight_holds_from_the_first_iteration_and_from_the_one_of_a_resume(make, trainer):
    for iteration, expected in ((0, 0.5), (1, 0.25), (7, 0.0)):
        module = make.module(kl_coef=9.0)
        module.iteration = iteration
        LinearKL(initial=0.5, final=0.0, num_iterations=2).on_train_start(trainer, module)
        assert module.kl_coef == expected


def test_a_checkpoint_restores_the_adaptive_weight(make, trainer, run):
    first = adaptive()
    (saved,) = run(first, tokens(make, 256, 12.0))
    resumed, module = adaptive(), make.module()
    resumed.load_state_dict(first.state_dict())
    resumed.on_train_start(trainer, module)
    assert module.kl_coef == saved != 0.2


@pytest.mark.parametrize(
    ("name", "value"),
    [("target", 0.0), ("target", -1.0), ("horizon", 0), ("initial", 0.0), ("initial", -0.1)],
)
def test_numbers_with_which_the_controller_would_fail_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} of AdaptiveKL is {value}, must be above 0"):
        adaptive(**{name: value})


@pytest.mark.parametrize(
    "build",
    [
        lambda: FixedKL(-0.1),
        lambda: LinearKL(initial=-0.1, final=1.0, num_iterations=2),
        lambda: CosineKL(initial=0.1, final=-0.1, num_iterations=2),
    ],
)
def test_negative_weights_are_refused(build):
    with pytest.raises(ValueError, match=r"is -0\.1, must be at least 0"):
        build()


def test_a_schedule_without_iterations_is_refused():
    with pytest.raises(ValueError, match="num_iterations is 0, must be at least 1"):
        LinearKL(initial=0.1, final=0.2, num_iterations=0)


@pytest.mark.usefixtures("without_type_checks")
def test_a_unit_that_is_missing_or_unknown_is_refused():
    with pytest.raises(ValueError, match="unit of AdaptiveKL is 'nats': say nats_per_response or"):
        adaptive(unit="nats")
    with pytest.raises(TypeError, match="unit"):
        AdaptiveKL(initial=0.2, target=6.0, horizon=10000)


@pytest.fixture
def setup(make, trainer):
    """Begin a run of a module with these controllers."""

    def begin(*controllers, **attributes):
        defaults = {
            "skip_zero_advantages": False,
            "kl": KLInLoss(),
            "advantage": GroupNormalized(),
        }
        trainer.callbacks = list(controllers)
        controllers[0].setup(trainer, make.module(**{**defaults, **attributes}), "fit")

    return begin


def test_two_controllers_are_refused(setup):
    setup(FixedKL(0.1))
    with pytest.raises(ValueError, match="one of FixedKL and AdaptiveKL can set kl_coef"):
        setup(FixedKL(0.1), adaptive())


def test_rows_that_are_left_out_of_the_updates_are_refused(setup):
    with pytest.raises(ValueError, match="skip_zero_advantages leaves out rows that the KL of Fix"):
        setup(FixedKL(0.1), skip_zero_advantages=True)


def test_a_kl_that_a_corrected_sampler_would_tell_is_refused(setup):
    correction = TruncatedImportance("token")
    current = {"old_log_probs": CurrentLogProbs(), "sampler_correction": correction}
    setup(FixedKL(0.1), kl=KLInLoss(), **current)
    setup(FixedKL(0.1), kl=KLInReward(), **{**current, "old_log_probs": RecomputedLogProbs()})
    with pytest.raises(ValueError, match="CurrentLogProbs would take from the sampler"):
        setup(FixedKL(0.1), kl=KLInReward(), **current)


def test_an_estimator_that_does_not_see_the_kl_in_the_reward_is_refused(setup):
    class Blind(GroupNormalized):
        sees_final_reward = False

    setup(FixedKL(0.1), kl=KLInReward())
    setup(FixedKL(0.1), kl=KLInLoss(), advantage=Blind())
    with pytest.raises(ValueError, match="which Blind does not see: use kl KLInLoss"):
        setup(FixedKL(0.1), kl=KLInReward(), advantage=Blind())
