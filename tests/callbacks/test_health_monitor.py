"""What an alarm does, and what a checkpoint keeps of it."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.callbacks import CriticMetrics, HealthMonitor, RatioMetrics, RewardMetrics
from lit_rl.callbacks.health_monitor import MAX_ROLL_BACKS, Action

PAGE = Path(__file__).parents[2] / "docs" / "health.md"
SOUND = {"loss": 0.1, "reward/mean": 0.3, "policy/entropy": 0.5, "ratio/approx_kl_k3": 0.01}
MOVES = SOUND | {"ratio/approx_kl_k3": 0.2}  # too far, for which a lower learning rate is a cure
SETTLED = SOUND | {"policy/entropy": 0.001}  # it is none for a policy that has stopped to explore


@pytest.fixture
def optimized():
    """What a module has of an optimizer: rates 0.5 and 0.25, half way down a linear schedule."""

    def attributes():
        groups = [
            {"params": [torch.zeros(1, requires_grad=True)], "name": name, "lr": rate}
            for name, rate in (("actor", 0.5), ("critic", 0.25))
        ]
        optimizer = torch.optim.SGD(groups)
        scheduler = LambdaLR(optimizer, [lambda step: 1 - step / 100] * 2)
        for _ in range(50):
            optimizer.step()
            scheduler.step()
        return {"raw_optimizer": optimizer, "scheduler": scheduler}

    return attributes


def rates(run):
    return [group["lr"] for group in run.module.raw_optimizer.param_groups]


def test_by_default_a_run_goes_on(watched):
    run = watched(HealthMonitor())
    run.iterate(*[MOVES] * 10)
    assert run.monitor.rung == ["update_kl"]
    assert not run.trainer.should_stop


def test_stop_ends_the_run_at_any_alarm(watched):
    run = watched(HealthMonitor(action="stop"))
    run.iterate(*[SETTLED] * 4)
    assert not run.trainer.should_stop
    run.iterate(SETTLED)
    assert run.trainer.should_stop


def test_a_run_that_goes_on_behind_its_stop_does_not_stop_for_the_same_again(watched):
    run = watched(HealthMonitor(action="stop"))
    run.iterate(*[SETTLED] * 5)
    resumed = watched(HealthMonitor(action="stop"))
    resumed.monitor.load_state_dict(run.monitor.state_dict())
    resumed.iterate(*[SETTLED] * 20)
    assert not resumed.trainer.should_stop
    resumed.iterate(*[MOVES] * 5)
    assert resumed.trainer.should_stop


def test_a_lower_learning_rate_follows_the_schedule_and_is_that_of_the_policy(watched, optimized):
    run = watched(HealthMonitor(action="lower_learning_rate"), **optimized())
    assert rates(run) == [0.25, 0.125]  # half way
    run.iterate(*[MOVES] * 5)
    assert rates(run) == [0.125, 0.125]
    for _ in range(25):
        run.module.raw_optimizer.step()
        run.module.scheduler.step()
    # A quarter of the way is left: 0.5 * 0.5 / 4 and 0.25 / 4.
    assert rates(run) == [0.0625, 0.0625]


def test_it_is_lowered_again_while_it_lasts_with_one_warning(watched, optimized, recwarn):
    monitor = HealthMonitor(action="lower_learning_rate", learning_rate_factor=0.1)
    run = watched(monitor, **optimized())
    run.iterate(*[MOVES] * 9)
    assert rates(run) == [pytest.approx(0.025), 0.125]
    run.iterate(MOVES)
    assert rates(run) == [pytest.approx(0.0025), 0.125]
    assert len(recwarn.list) == 1
    run.iterate(*[SOUND] * 20)
    assert rates(run) == [pytest.approx(0.0025), 0.125]


def test_an_alarm_of_another_cause_leaves_the_learning_rate(watched, optimized):
    run = watched(HealthMonitor(action="lower_learning_rate"), **optimized())
    run.iterate(*[SETTLED] * 20)
    assert run.monitor.rung == ["entropy_collapse"]
    assert rates(run) == [0.25, 0.125]


def test_a_resumed_run_has_the_lowered_rate_although_its_settings_were_restored(watched, optimized):
    run = watched(HealthMonitor(action="lower_learning_rate"), **optimized())
    run.iterate(*[MOVES] * 5)
    resumed = watched(HealthMonitor(action="lower_learning_rate"), **optimized())
    resumed.monitor.load_state_dict(run.monitor.state_dict())
    assert rates(resumed) == [0.25, 0.125]
    resumed.monitor.on_train_batch_start(resumed.trainer, resumed.module, None, 0)
    assert rates(resumed) == rates(run) == [0.125, 0.125]


@pytest.mark.parametrize("at", [2, 7, 12, 22])
def test_a_resumed_run_rings_as_the_uninterrupted_one(watched, optimized, at):
    """Counts, what is usual, the start, held-out points, what has rung and the learning rate."""
    rows = [SOUND | {"grad_norm": 0.1 * n, "response/length_mean": 10.0} for n in range(1, 21)]
    rows += [MOVES | {"grad_norm": 60.0, "response/length_mean": 10.0}]
    rows += [MOVES | {"grad_norm": 1.0, "response/length_mean": 40.0}] * 6

    def run(monitor, rows, done=0):
        course = watched(monitor, **optimized())
        course.module.iteration = done
        for row in rows:
            course.iterate(row)
            if course.module.iteration % 5 == 0:
                course.validate(0.9 if course.module.iteration < 20 else 0.5)
        return course

    whole = run(HealthMonitor(action="lower_learning_rate"), rows)
    first = run(HealthMonitor(action="lower_learning_rate"), rows[:at])
    monitor = HealthMonitor(action="lower_learning_rate")
    monitor.load_state_dict(first.monitor.state_dict())
    second = run(monitor, rows[at:], done=at)
    assert second.monitor.state_dict() == whole.monitor.state_dict()
    assert rates(second) == rates(whole)
    assert whole.monitor.rung == ["held_out", "grad_norm", "update_kl", "length"]


def test_a_checkpoint_of_other_alarms_is_no_hindrance(watched):
    run = watched(HealthMonitor())
    run.iterate(*[MOVES] * 4)
    resumed = watched(HealthMonitor(max_update_kl=None))
    resumed.monitor.load_state_dict(run.monitor.state_dict())
    resumed.iterate(*[MOVES] * 5)
    assert resumed.monitor.rung == []


def documented():
    """The rows of docs/health.md: alarm, argument, default, when, whether it lowers the rate."""
    lines = re.findall(r"^\| `.*$", PAGE.read_text(), re.M)
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[2:] for row in cells if len(row) == 6}


def test_the_table_in_the_documentation_has_every_alarm_and_every_threshold():
    parameters = inspect.signature(HealthMonitor.__init__).parameters
    table, alarms = documented(), {alarm.name: alarm for alarm in HealthMonitor().alarms}
    assert table.keys() == {*alarms, "held_out"}
    for argument, default, _, _ in table.values():
        assert argument == default == "-" or float(default) == parameters[argument].default
    arguments = {row[0] for row in table.values()} - {"-"}
    assert arguments == {name for name in parameters if name.startswith(("min_", "max_"))}


def test_the_table_says_which_alarms_wait_and_which_lower_the_learning_rate():
    table = documented()
    for alarm in HealthMonitor().alarms:
        _, _, rings, lowers = table[alarm.name]
        assert (rings == "at once") == (alarm.patience == 1)
        assert (lowers == "yes") == alarm.too_fast
    assert "patience (5)" in PAGE.read_text().replace("`", "")


THRESHOLDS = [
    "min_entropy",
    "max_entropy_factor",
    "max_reference_kl",
    "max_update_kl",
    "max_clip_fraction",
    "max_truncated_fraction",
    "max_length_factor",
    "min_explained_variance",
    "max_grad_norm_factor",
    "max_sampler_difference",
]


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_threshold_that_is_null_switches_one_alarm_off(threshold):
    names = {alarm.name for alarm in HealthMonitor().alarms}
    without = {alarm.name for alarm in HealthMonitor(**{threshold: None}).alarms}
    assert len(names) == 12
    assert len(names - without) == 1


@pytest.mark.usefixtures("without_type_checks")
def test_an_unknown_action_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'restart' of HealthMonitor is unknown; choose warn"):
        HealthMonitor(action="restart")


def test_every_action_stands_in_the_documentation():
    text = PAGE.read_text()
    assert all(f"| `{action}` |" in text for action in get_args(Action))
    assert f"the {MAX_ROLL_BACKS + 1}th time" in text


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"learning_rate_factor of HealthMonitor is 1\.5"):
        HealthMonitor(learning_rate_factor=1.5)
    with pytest.raises(ValueError, match="patience is 0 iterations"):
        HealthMonitor(patience=0)


def test_metrics_that_nothing_logs_are_named_at_the_start(trainer, recwarn):
    trainer.callbacks = [RewardMetrics(), CriticMetrics(), HealthMonitor()]
    HealthMonitor().setup(trainer, SimpleNamespace(), "fit")
    (warning,) = recwarn.list
    assert "reads metrics of RatioMetrics, which is not there" in str(warning.message)
    trainer.callbacks.append(RatioMetrics())
    HealthMonitor().setup(trainer, SimpleNamespace(), "fit")
    assert len(recwarn.list) == 1
