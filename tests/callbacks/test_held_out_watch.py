"""A fall of the held-out accuracy, with and without one of the reward."""

from lit_rl.callbacks import HealthMonitor


def rung(run):
    return run.monitor.rung


def test_rings_when_accuracy_falls_while_the_reward_does_not(watched, recwarn):
    run = watched(HealthMonitor())
    run.iterate(*[{"reward/mean": 0.5}] * 5)
    run.validate(0.6)
    run.iterate(*[{"reward/mean": 0.7}] * 5)
    run.validate(0.45)
    assert rung(run) == ["held_out"]
    (warning,) = recwarn.list
    message = str(warning.message)
    assert "fell from 0.600 after iteration 5 to 0.450 while the reward of training did not" in (
        message
    )
    assert "exploits the reward" in message
    assert ". " not in message.partition(": ")[2]


def test_says_so_when_the_reward_fell_too(watched, recwarn):
    run = watched(HealthMonitor())
    run.iterate(*[{"reward/mean": 0.5}] * 5)
    run.validate(0.6)
    run.iterate(*[{"reward/mean": 0.2}] * 5)
    run.validate(0.3)
    (warning,) = recwarn.list
    assert "the policy has got worse" in str(warning.message)


def test_a_small_or_an_uncertain_fall_is_no_alarm(watched, recwarn):
    run = watched(HealthMonitor())
    run.validate(0.6)
    run.iterate({})
    run.validate(0.51)
    run.iterate({})
    # Three standard errors of the difference: 3 * sqrt(0.05^2 + 0.01^2) = 0.153.
    run.validate(0.45, standard_error=0.05)
    assert not recwarn.list
    run.iterate({})
    run.validate(0.44, standard_error=0.05)
    assert rung(run) == ["held_out"]


def test_the_best_counts_however_long_ago(watched):
    run = watched(HealthMonitor())
    for accuracy in (0.6, 0.55, 0.52, 0.49):
        run.validate(accuracy)
        run.iterate({})
    assert rung(run) == ["held_out"]


def test_a_validation_that_is_repeated_after_a_resume_counts_once(watched):
    run = watched(HealthMonitor())
    run.validate(0.6)
    run.validate(0.45)
    assert len(run.monitor.held_out.points) == 1
    assert rung(run) == []


def test_without_a_threshold_or_an_accuracy_nothing_is_said(watched, recwarn):
    off = watched(HealthMonitor(max_held_out_drop=None))
    off.validate(0.9)
    off.module.iteration = 1
    off.validate(0.1)
    silent = watched(HealthMonitor())
    silent.monitor.on_validation_end(silent.trainer, silent.module)
    assert not recwarn.list
