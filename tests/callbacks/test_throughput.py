"""Seconds, tokens per second, and totals that survive a resume."""

import pytest

from lit_rl.callbacks import Throughput, throughput


@pytest.fixture
def run(trainer, make, monkeypatch):
    """Run an iteration that starts, ends its rollout, and ends at the given seconds."""

    def iteration(callback, *seconds, rounds=((4, 6),)):
        times = iter(seconds)
        monkeypatch.setattr(throughput, "perf_counter", lambda: next(times))
        module = make.module()
        callback.on_train_batch_start(trainer, module, None, 0)
        for lengths in rounds:
            scored = make.scored([0.0] * len(lengths), lengths=list(lengths))
            callback.on_scored(trainer, module, scored)
        callback.on_rollout(trainer, module, scored, make.experience([[1]]))
        callback.on_iteration_end(trainer, module)
        return module.logged

    return iteration


def test_times_and_tokens_by_hand(run):
    logged = run(Throughput(), 10.0, 12.0, 15.0)
    assert logged["time/iteration_seconds"] == 5.0
    assert logged["time/rollout_seconds"] == 2.0
    assert logged["time/update_seconds"] == 3.0
    # 4 + 6 tokens in 5 seconds.
    assert logged["throughput/tokens_per_second"] == 2.0


def test_tokens_of_every_round_of_sampling_count(run):
    callback = Throughput()
    logged = run(callback, 0.0, 3.0, 4.0, rounds=[(4, 6), (1, 1)])
    assert logged["throughput/tokens_per_second"] == 12 / 4
    # The next iteration counts its own, the total goes on.
    logged = run(callback, 4.0, 5.0, 6.0, rounds=[(2, 2)])
    assert logged["throughput/tokens_per_second"] == 4 / 2
    assert logged["total/tokens"] == 16
    assert logged["total/responses"] == 6


def test_totals_go_on_after_a_resume(run):
    first = Throughput()
    run(first, 0.0, 1.0, 4.0)
    resumed = Throughput()
    resumed.load_state_dict(first.state_dict())
    logged = run(resumed, 100.0, 101.0, 103.0)
    assert logged["total/tokens"] == 20
    assert logged["total/responses"] == 4
    assert logged["total/seconds"] == 7.0


def test_logged_once_per_iteration_beside_the_optimizer_steps(fit, tiny_module):
    trainer = fit(tiny_module(), Throughput(), iterations=3, limit_val_batches=0)
    # Two optimizer steps per iteration, two responses of two tokens each.
    assert trainer.callback_metrics["total/optimizer_steps"] == 6
    assert trainer.callback_metrics["total/tokens"] == 12
    assert trainer.callback_metrics["time/iteration_seconds"] > 0


def test_the_rollout_ends_when_the_slowest_rank_has_its_own(trainer, make, monkeypatch):
    """Here it comes at second 7: the seconds of waiting are no part of the update."""
    now = 0.0
    monkeypatch.setattr(throughput, "perf_counter", lambda: now)

    def wait():
        nonlocal now
        now = 7.0

    monkeypatch.setattr(trainer.strategy, "barrier", wait)
    callback, module = Throughput(), make.module()
    callback.on_train_batch_start(trainer, module, None, 0)
    scored = make.scored([0.0], lengths=[4])
    callback.on_rollout(trainer, module, scored, make.experience([[1]]))
    now = 9.0
    callback.on_iteration_end(trainer, module)
    assert module.logged["time/rollout_seconds"] == 7.0
    assert module.logged["time/update_seconds"] == 2.0
