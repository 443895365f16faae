"""Each alarm rings where something is wrong, and not where it is not."""

import csv
import math
from pathlib import Path

import pytest

from lit_rl.callbacks import HealthMonitor

CURVES = Path(__file__).parents[1] / "golden" / "healthy_curves"
NAN = math.nan
# An iteration in which nothing is wrong, far from the end of the task.
SOUND = {
    "loss": 0.1,
    "grad_norm": 0.5,
    "reward/mean": 0.3,
    "reward/std": 0.4,
    "reward/zero_std_group_fraction": 0.5,
    "response/length_mean": 20.0,
    "response/truncated_fraction": 0.1,
    "policy/entropy": 0.5,
    "kl/reference_k1": 0.05,
    "ratio/approx_kl_k3": 0.01,
    "ratio/clip_low_fraction": 0.1,
    "ratio/clip_high_fraction": 0.1,
    "ratio/dual_clip_fraction": 0.0,
    "critic/explained_variance": 0.3,
    "sampler/abs_difference_max": 0.001,
}
# What an alarm rings at, after five sound iterations, and what is as close to it as nothing is.
WRONG = {
    "no_signal": (
        {"reward/zero_std_group_fraction": 1.0},
        {"reward/zero_std_group_fraction": 0.99},
    ),
    "entropy_collapse": ({"policy/entropy": 0.009}, {"policy/entropy": 0.011}),
    # Twice the 0.5 of the start.
    "entropy_rise": ({"policy/entropy": 1.01}, {"policy/entropy": 0.99}),
    "reference_kl": ({"kl/reference_k1": 0.51}, {"kl/reference_k1": 0.49}),
    "update_kl": ({"ratio/approx_kl_k3": 0.11}, {"ratio/approx_kl_k3": 0.09}),
    # The three sides add up: 0.5 + 0.1 + 0.06.
    "clipping": (
        {"ratio/clip_low_fraction": 0.5, "ratio/dual_clip_fraction": 0.06},
        {"ratio/clip_low_fraction": 0.5, "ratio/dual_clip_fraction": 0.04},
    ),
    "truncation": (
        {"response/truncated_fraction": 0.91},
        {"response/truncated_fraction": 0.89},
    ),
    # Three times the 20 tokens of the start.
    "length": ({"response/length_mean": 61.0}, {"response/length_mean": 59.0}),
    "critic": ({"critic/explained_variance": -0.11}, {"critic/explained_variance": -0.09}),
}
PATIENT = sorted(WRONG)


@pytest.fixture
def sound(watched):
    """A run behind 20 sound iterations, so that every alarm knows what is usual."""

    def run(monitor=None, **settings):
        run = watched(monitor or HealthMonitor(), **settings)
        run.iterate(*[SOUND] * 20)
        return run

    return run


def rung(run):
    return run.monitor.rung


@pytest.mark.parametrize("name", PATIENT)
def test_rings_when_something_is_wrong_for_long_enough(sound, name, recwarn):
    run = sound()
    assert not recwarn.list
    wrong, _ = WRONG[name]
    run.iterate(*[SOUND | wrong] * 4)
    assert rung(run) == []
    run.iterate(SOUND | wrong)
    assert rung(run) == [name]
    # Once, however long it lasts.
    run.iterate(*[SOUND | wrong] * 20)
    (warning,) = recwarn.list
    assert str(warning.message).startswith("HealthMonitor, iteration 25: ")
    assert "{" not in str(warning.message)


@pytest.mark.parametrize("name", PATIENT)
def test_does_not_ring_just_within_its_threshold(sound, name, recwarn):
    run = sound()
    _, right = WRONG[name]
    run.iterate(*[SOUND | right] * 20)
    assert not recwarn.list


@pytest.mark.parametrize("name", PATIENT)
def test_a_good_iteration_begins_the_count_anew(sound, name, recwarn):
    run = sound()
    wrong, _ = WRONG[name]
    for _ in range(5):
        run.iterate(*[SOUND | wrong] * 4, SOUND)
    assert not recwarn.list


@pytest.mark.parametrize("name", PATIENT)
def test_what_is_not_known_leaves_the_count_as_it_is(sound, name):
    """As in an iteration whose rewards are all missing, or while a critic warms up."""
    run = sound()
    wrong, _ = WRONG[name]
    unknown = SOUND | dict.fromkeys(wrong, NAN)
    run.iterate(*[SOUND | wrong] * 4, unknown, unknown)
    assert rung(run) == []
    run.iterate(SOUND | wrong)
    assert rung(run) == [name]


@pytest.mark.parametrize("name", ["no_signal", "entropy_collapse", "critic"])
def test_a_solved_task_is_no_alarm(sound, name, recwarn):
    """0.9 of the reward of success: then equal rewards and a low entropy are what success is."""
    run = sound()
    wrong, _ = WRONG[name]
    run.iterate(*[SOUND | wrong | {"reward/mean": 0.91}] * 20)
    assert not recwarn.list
    run.iterate(*[SOUND | wrong | {"reward/mean": 0.89}] * 5)
    assert rung(run) == [name]


@pytest.mark.parametrize("name", ["truncation", "length"])
def test_a_reward_that_rises_excuses_long_responses(sound, name, recwarn):
    """The mean reward of the last five iterations is above all of the first five, 0.3."""
    run = sound()
    wrong, _ = WRONG[name]
    run.iterate(*[SOUND | wrong | {"reward/mean": 0.31}] * 20)
    # In the first of them the mean is already (4 * 0.3 + 0.31) / 5.
    assert not recwarn.list


def test_much_shorter_responses_ring_too(sound):
    run = sound()
    run.iterate(*[SOUND | {"response/length_mean": 6.7}] * 5)  # 20 / 3 is 6.67
    assert rung(run) == []
    run.iterate(*[SOUND | {"response/length_mean": 6.6}] * 5)
    assert rung(run) == ["length"]


def test_estimators_that_compare_no_group_have_no_signal_where_all_rewards_are_equal(sound):
    """With a critic, groups of equal rewards are no matter; the batch must not be."""
    run = sound(group_size_needed=1)
    run.iterate(*[SOUND | {"reward/zero_std_group_fraction": 1.0}] * 20)
    assert rung(run) == []
    run.iterate(*[SOUND | {"reward/std": 0.0}] * 5)
    assert rung(run) == ["no_signal"]


def test_gradient_norm_rings_at_once_at_twenty_times_the_median(sound):
    run = sound()  # the usual norm is 0.5; 20 values with one outlier keep that median
    run.iterate(SOUND | {"grad_norm": 9.9})
    assert rung(run) == []
    run.iterate(SOUND | {"grad_norm": 10.1})
    assert rung(run) == ["grad_norm"]


def test_a_large_factor_of_a_gradient_that_is_not_clipped_is_no_alarm(watched, recwarn):
    run = watched(HealthMonitor())
    run.iterate(*[SOUND | {"grad_norm": 0.01}] * 20, SOUND | {"grad_norm": 0.9})
    assert not recwarn.list


def test_sampler_and_trainer_that_disagree_ring_at_once(sound):
    run = sound()
    run.iterate(SOUND | {"sampler/abs_difference_max": 0.99})
    assert rung(run) == []
    run.iterate(SOUND | {"sampler/abs_difference_max": 1.5})
    assert rung(run) == ["sampler"]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "critic/grad_norm"])
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_loss_or_norm_that_is_no_number_rings_at_once(sound, name, value):
    run = sound()
    run.iterate(SOUND | {name: value})
    assert rung(run) == ["not_finite"]


def test_an_update_that_was_left_out_rings_when_it_is_counted(sound):
    run = sound()
    run.iterate(*[SOUND | {"skipped_updates": 0.0}] * 2)
    assert rung(run) == []
    run.iterate(SOUND | {"skipped_updates": 1.0})
    assert rung(run) == ["not_finite"]


def test_updates_that_were_left_out_long_ago_are_no_alarm(watched, recwarn):
    """As in a run that is resumed behind them, whose history is in its checkpoint."""
    first, resumed = HealthMonitor(), HealthMonitor()
    first.history.add({"skipped_updates": 2.0})
    resumed.load_state_dict(first.state_dict())
    watched(resumed).iterate(*[SOUND | {"skipped_updates": 2.0}] * 3)
    assert not recwarn.list


def test_metrics_that_are_not_logged_are_no_alarm(watched, recwarn):
    run = watched(HealthMonitor())
    run.iterate(*[{"loss": 0.1}] * 30)
    assert not recwarn.list


@pytest.mark.parametrize("name", [*PATIENT, "grad_norm", "sampler"])
def test_every_alarm_says_in_one_sentence_what_to_try(name):
    monitor = HealthMonitor()
    (alarm,) = (alarm for alarm in monitor.alarms if alarm.name == name)
    message = alarm.message(0.123456)
    assert ". " not in message
    assert ";" in message  # behind it stands what to try
    assert "{" not in message


CURVE_FILES = sorted(CURVES.glob("*.csv"))


@pytest.mark.parametrize("file", CURVE_FILES, ids=lambda file: file.stem)
def test_healthy_runs_ring_nothing(watched, file, recwarn):
    """The metrics of runs of the README, rounded to four digits; see the first line of each."""
    with file.open() as lines:
        source = next(lines)
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    assert source.startswith("# ")
    by_groups = not any(name in file.stem for name in ("ppo", "trpo", "reinforce"))
    run = watched(HealthMonitor(), group_size_needed=2 if by_groups else 1)
    accuracies = []
    for row in rows:
        accuracy = row.pop("val/greedy_accuracy", None)
        error = row.pop("val/greedy_accuracy_standard_error", None)
        if "loss" in row:
            run.iterate(row)
        if accuracy is not None:
            accuracies.append(accuracy)
            run.validate(accuracy, error)
    assert not recwarn.list
    # It is a whole run that learns.
    assert run.module.iteration >= 30
    assert accuracies[-1] > max(0.9, accuracies[0])
