"""Rewards that break their process, in workers.

What a response does to its worker stands in unsafe_rewards.py. The value of a response that does no
harm is its length.
"""

import csv
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from lit_rl.cli import RLCLI
from lit_rl.rewards import ExactAnswer, Failed, InWorkers, PythonFunction, Steps, WeightedSum

ROOT = Path(__file__).parents[2]
LIMITS = {"num_workers": 2, "timeout_seconds": 1.0, "memory_limit_mib": 128}


@pytest.fixture(scope="module")
def unsafe():
    """The module of rewards, importable here and in workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield importlib.import_module("unsafe_rewards")


@pytest.fixture(scope="module")
def reward(unsafe):
    reward = InWorkers(PythonFunction(unsafe.obeys), on_error="exclude", **LIMITS)
    yield reward
    reward.teardown()


@pytest.fixture
def values(reward, rollout_of, tmp_path):
    def of(*responses, reward=reward):
        columns = {"folder": (str(tmp_path),) * len(responses)}
        rollout = rollout_of(responses, columns=columns, lengths=[2] * len(responses))
        return reward.values(rollout)

    return of


def noted(folder):
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pids):
    def is_alive(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raises", r"it raised ValueError\('not\\x1b\[2J good'\)"),
        ("hangs", "it took longer than timeout_seconds 1.0"),
        ("hangs in C", "it took longer than timeout_seconds 1.0"),
        ("grows", "it needs more than memory_limit_mib 128"),
        ("exits", "its process ended with exit code 3"),
        ("leaves", r"it raised SystemExit\(\)"),
        ("aborts", "its process ended with signal 6"),
        ("text", "it gave '1.0'; a value is a finite number"),
        ("NaN", "it gave nan; a value is a finite number"),
        ("two", r"it gave \[1.0, 2.0\] for one response, not a list of one value"),
        ("none", r"it gave \[\] for one response"),
        ("number", "it gave 1.0 for one response"),
        ("pid", "it gave <built-in function getpid>; a value is"),
    ],
)
def test_only_the_response_that_fails_is_affected_and_the_next_batch_works(
    values, response, reason, tmp_path
):
    first, failed, last = values("a", response, "bcd")
    assert (first, last) == (1.0, 3.0)
    assert isinstance(failed, Failed)
    assert re.search(reason, failed.reason)
    assert values("ab", "abcd") == [2.0, 4.0]
    assert alive(noted(tmp_path)) == []


def test_every_failure_at_once_leaves_the_others_their_values(values):
    bad = ["raises", "exits", "grows", "text", "aborts", "leaves", "two"]
    mixed = [text for response in bad for text in (response, "ok")]
    given = values(*mixed)
    assert given[1::2] == [2.0] * len(bad)
    assert all(isinstance(value, Failed) for value in given[::2])


def test_values_come_in_the_order_of_the_responses(values):
    # The first ones are ready last.
    responses = ["sleeps", "sleeps", *("x" * n for n in range(1, 20))]
    assert values(*responses) == [float(len(text)) for text in responses]


def test_rollouts_are_judged_before_their_values_are_asked_for(reward, rollout_of, tmp_path):
    """The first two are judged while nobody waits; what was begun first need not be read first."""
    begun = [
        reward.begin(
            rollout_of(responses, columns={"folder": (str(tmp_path),) * 2}, lengths=[2, 2])
        )
        for responses in (["notes", "ab"], ["notes", "raises"], ["sleeps", "abc"])
    ]
    deadline = time.monotonic() + 20
    while len(noted(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(noted(tmp_path)) == 2
    assert begun[2]() == [6.0, 3.0]
    assert begun[0]() == [5.0, 2.0]
    first, failed = begun[1]()
    assert first == 5.0
    assert isinstance(failed, Failed)


@pytest.mark.slow
def test_what_was_begun_before_the_workers_ended_is_an_error(unsafe, rollout_of, tmp_path):
    """It cannot be waited for: other workers would never answer."""
    reward = InWorkers(PythonFunction(unsafe.obeys), **LIMITS)
    rollout = rollout_of(["sleeps"], columns={"folder": (str(tmp_path),)}, lengths=[2])
    begun = reward.begin(rollout)
    reward.teardown()
    with pytest.raises(ValueError, match="the process that keeps the workers has ended"):
        begun()
    assert reward.values(rollout) == [6.0]
    reward.teardown()


def test_none_and_steps_pass_through(values):
    assert values("not applicable", "steps") == [None, Steps(positions=[0], values=[0.5])]


def test_children_end_when_the_response_is_judged(values, reward, tmp_path):
    # 3 children, 3 grandchildren in sessions of their own, 1 program.
    assert values("forks") == [5.0]
    assert values("a", "b") == [1.0, 1.0]  # whoever forked has been replaced by now
    deadline = time.monotonic() + 5
    while alive(noted(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(noted(tmp_path)) == []
    assert len(noted(tmp_path)) >= 1
    assert len(keeper_of(reward).children(recursive=True)) == LIMITS["num_workers"]


def keeper_of(reward):
    return psutil.Process(reward._pool._keeper.process.pid)


def test_a_child_that_returns_as_well_says_nothing(values):
    responses = ["forks and returns twice", "a", "bc"] * 5
    assert values(*responses) == [float(len(text)) for text in responses]


def test_memory_that_is_kept_from_response_to_response_fails_none_of_them(values):
    # 20 times 40 MiB are more than the 128 MiB of any number of workers here.
    assert values(*["keeps 40 MiB"] * 20) == [12.0] * 20


def test_what_asks_the_run_to_stop_does_not_stop_a_worker(values, reward):
    keeper = keeper_of(reward)
    keeper.send_signal(signal.SIGTERM)
    keeper.send_signal(signal.SIGINT)
    assert values("terminates itself", "ab") == [17.0, 2.0]
    assert keeper.is_running()


def test_raise_names_row_and_response(rollout_of, unsafe):
    reward = InWorkers(PythonFunction(unsafe.obeys), **LIMITS)
    rollout = rollout_of(["a", "b", "exits"], columns={"folder": ("",) * 3})
    message = (
        r"the reward obeys raised RuntimeError: judging failed on 1 of 3 responses; the first is "
        r"row 2, 'exits': its process ended with exit code 3"
    )
    with pytest.raises(RuntimeError, match=message):
        reward(rollout)
    # The next one is as if nothing had been.
    assert reward(rollout.select(rollout.mask.sum(1)[:2] * 0)).rewards.tolist() == [1.0, 1.0]
    keeper = keeper_of(reward)
    processes = [keeper, *keeper.children(recursive=True)]
    assert len(processes) == 3
    reward.teardown()
    assert not any(process.is_running() for process in processes)


def test_a_failure_is_missing_and_warned_of_once(reward, rollout_of):
    rollout = rollout_of(["a", "raises", "not applicable"], columns={"folder": ("",) * 3})
    message = r"obeys failed on 1 of 3 responses, .* the first is row 1, 'raises': it raised Value"
    with (
        pytest.warns(UserWarning, match=message),
        pytest.warns(UserWarning, match="no part of the reward obeys applies to 1 of 3 responses"),
    ):
        scored = reward(rollout)
    assert scored.failed.tolist() == [False, True, False]
    assert scored.missing.tolist() == [False, True, True]
    assert scored.rewards.tolist() == [1.0, 0.0, 0.0]


def test_a_lambda_is_refused_with_what_to_do():
    reward = InWorkers(PythonFunction(lambda responses: [0.0]))
    with pytest.raises(ValueError, match=r"<lambda> cannot be sent .* importable by name") as error:
        reward.setup()
    assert "\n" not in str(error.value)


def test_a_reward_that_is_not_importable_in_the_worker_is_an_error_at_the_start(unsafe):
    reward = InWorkers(PythonFunction(unsafe.NeverReady()))
    with pytest.raises(ValueError, match=r"reward NeverReady is not ready .*invalid literal"):
        reward.setup()


@pytest.mark.slow
def test_models_of_the_reward_are_those_that_the_workers_have_read(unsafe, rollout_of, tmp_path):
    """A worker that takes the place of another must not judge with other weights."""
    weights = tmp_path / "weights"
    weights.write_text("1" * 64)
    reward = InWorkers(unsafe.Judge(str(weights)), on_error="exclude")
    reward.setup()
    assert reward.models == {"judge": "1" * 64}
    weights.write_text("2" * 64)
    rollout = rollout_of(["exits", "ab"], columns={"folder": ("",) * 2})
    with pytest.raises(ValueError, match=r"weights of \['judge'\] changed while the run went on"):
        reward.values(rollout)
    reward.setup()
    assert reward.models == {"judge": "2" * 64}
    reward.teardown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0, must be at least 1"),
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0.0, must be above 0"),
        ({"timeout_seconds": math.inf}, "timeout_seconds is inf"),
        ({"timeout_seconds": math.nan}, "timeout_seconds is nan"),
        ({"memory_limit_mib": 0}, "memory_limit_mib is 0, must be at least 1"),
        ({"reward": WeightedSum({"a": ExactAnswer()})}, "let the parts of the sum be InWorkers"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        InWorkers(**{"reward": ExactAnswer(), **settings})


MAIN = """
import sys
import torch
import unsafe_rewards
from lit_rl.rewards import InWorkers, PythonFunction
from lit_rl.types import Rollout

zeros = torch.zeros(2, 1)
rollout = Rollout(
    prompt_ids=zeros.long(), prompt_mask=zeros == 0, response_ids=zeros.long(), mask=zeros == 0,
    sampler_log_probs=zeros, finished=zeros[:, 0] == 0, prompts=("", ""), responses=("", ""),
    answers=(sys.argv[1],) * 2, columns={}, group_size=1,
)
reward = InWorkers(PythonFunction(unsafe_rewards.hangs_with_a_child), 2, timeout_seconds=100.0)
reward.values(rollout)
"""


@pytest.mark.slow
def test_no_process_outlives_a_run_that_is_killed(tmp_path):
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    main = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    while len(noted(tmp_path)) < 2 and main.poll() is None:
        time.sleep(0.1)
    processes = psutil.Process(main.pid).children(recursive=True)
    # A keeper, two workers, two programs.
    assert len(processes) == 5
    main.kill()
    main.wait()
    assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.mark.slow
def test_a_configuration_trains_and_validates_with_workers(tmp_path, monkeypatch, unsafe):
    monkeypatch.chdir(tmp_path)
    in_workers = {
        "reward": {
            "class_path": "lit_rl.rewards.PythonFunction",
            "init_args": {"function": "unsafe_rewards.fails_on_four"},
        },
        "num_workers": 2,
        "timeout_seconds": 5.0,
        "memory_limit_mib": 512,
        "on_error": "exclude",
    }
    reward = {"class_path": "lit_rl.rewards.InWorkers", "init_args": in_workers}
    config = {
        "trainer": {"limit_train_batches": 2, "max_epochs": 1, "limit_val_batches": 1},
        "model": {"init_args": {"reward": reward}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    before = set(psutil.Process().children())
    RLCLI(ROOT / "configs" / "base.yaml", ["fit", "--config", "run.yaml"])
    (metrics,) = tmp_path.rglob("metrics.csv")
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    errors = [float(row["reward/errors"]) for row in rows if row.get("reward/errors")]
    missing = [
        float(row["reward/missing_fraction"]) for row in rows if row.get("reward/missing_fraction")
    ]
    # The untrained policy says "4" now and then.
    assert len(errors) == 2
    assert sum(errors) > 0
    for number, fraction in zip(errors, missing, strict=True):
        assert 0 < number == pytest.approx(fraction * round(number / fraction))
    assert [row for row in rows if row.get("val/reward")]
    # The run is over, and so are its workers.
    assert set(psutil.Process().children()) <= before
