"""The updates of an iteration end when the policy is too far from the one that sampled."""

import math
from types import SimpleNamespace

import pytest
import torch

from lit_rl.callbacks import StopOnKL, stop_on_kl

NAN = float("nan")


@pytest.fixture
def stops(make, trainer):
    """Run the minibatches until they are stopped; return how many ran, and what is logged."""

    def run(callback, *updates, steps=4):
        module = make.module(steps_per_iteration=steps)
        callback.on_rollout(trainer, module, make.scored([0.0]), make.experience([[1]]))
        module.stop_updates, taken = False, 0
        for update in updates:
            callback.on_minibatch(trainer, module, update)
            taken += 1
            if module.stop_updates:
                break
        callback.on_iteration_end(trainer, module)
        return taken, module.logged["update/stopped_early"]

    return run


def far(make, *differences, index=0, mask=None):
    """A minibatch of one row whose log-probs are these differences below the old ones."""
    mask = mask or [1] * len(differences)
    experience = make.experience([mask], old=[[0.0] * len(differences)])
    return make.update((experience, [[-difference for difference in differences]]), index=index)


def test_k3_by_hand_is_a_mean_over_the_tokens_that_count(make, stops):
    # d = new - old = -1 and 1: (exp(-1) - 1 + 1 + exp(1) - 1 - 1) / 2; the masked NaN is no token.
    kl = (math.exp(-1) + math.e - 2) / 2
    updates = [far(make, 1.0, -1.0, NAN, index=n, mask=[1, 1, 0]) for n in range(4)]
    assert stops(StopOnKL(kl * 1.001), *updates) == (4, 0.0)
    assert stops(StopOnKL(kl * 0.999), *updates) == (1, 1.0)


def test_k1_is_old_minus_new(make, stops):
    # Differences 0.5 and -0.25: mean 0.125.
    updates = [far(make, 0.5, -0.25, index=n) for n in range(4)]
    assert stops(StopOnKL(0.126, estimator="k1"), *updates) == (4, 0.0)
    assert stops(StopOnKL(0.124, estimator="k1"), *updates) == (1, 1.0)
    # A policy that became surer of every token has a negative k1, which passes no limit.
    sure = [far(make, -5.0, index=n) for n in range(4)]
    assert stops(StopOnKL(0.1, estimator="k1"), *sure) == (4, 0.0)


def test_the_minibatch_that_shows_it_is_the_last_one(make, stops):
    updates = [far(make, difference, index=n) for n, difference in enumerate((0.0, 2.0, 0.0, 0.0))]
    assert stops(StopOnKL(0.1), *updates) == (2, 1.0)


def test_nothing_is_left_out_behind_the_last_minibatch(make, stops):
    updates = [far(make, difference, index=n) for n, difference in enumerate((0.0, 0.0, 0.0, 2.0))]
    assert stops(StopOnKL(0.1), *updates) == (4, 0.0)


def test_the_next_iteration_begins_anew(make, stops):
    callback = StopOnKL(0.1)
    assert stops(callback, far(make, 2.0)) == (1, 1.0)
    assert stops(callback, *(far(make, 0.0, index=n) for n in range(4))) == (4, 0.0)


def test_micro_batches_add_up_and_a_rank_without_rows_has_none(make, stops):
    # KL 0 at three tokens and 1 at another: 1/4. The means of the two rows have mean 1/2.
    experience = make.experience([[1, 1, 1]], old=[[0.0] * 3])
    single = make.experience([[1]], old=[[0.0]])
    update = make.update((experience, [[0.0] * 3]), (single, [[-1.0]]))
    assert stops(StopOnKL(0.3, estimator="k1"), update) == (1, 0.0)
    assert stops(StopOnKL(0.2, estimator="k1"), update) == (1, 1.0)
    assert stops(StopOnKL(0.1), make.update()) == (1, 0.0)


def test_own_log_probs_are_the_old_ones_where_there_are_none(make, stops):
    experience = make.experience([[1]], sampler=[[0.0]])
    assert stops(StopOnKL(0.1), make.update((experience, [[-9.0]]))) == (1, 0.0)


def test_ranks_add_sums_and_counts_and_so_decide_alike(make, stops, monkeypatch):
    """This rank has one token with KL 1; the other one brings three tokens with KL 0."""
    near, far_away = torch.tensor([0.0, 3.0]), torch.tensor([12.0, 3.0])
    ranks = SimpleNamespace(other=near)
    monkeypatch.setattr(stop_on_kl, "sum_over_ranks", lambda values: values + ranks.other)
    update = far(make, 1.0)
    assert stops(StopOnKL(0.26, estimator="k1"), update) == (1, 0.0)
    assert stops(StopOnKL(0.24, estimator="k1"), update) == (1, 1.0)
    # And one that is near itself stops because the other is far away.
    ranks.other = far_away
    assert stops(StopOnKL(2.9, estimator="k1"), far(make, 0.0)) == (1, 1.0)


@pytest.mark.parametrize("limit", [0.0, -0.1, NAN])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit of StopOnKL is {limit}, must be above 0"):
        StopOnKL(limit)


def test_one_update_per_iteration_is_refused(make, trainer):
    with pytest.raises(ValueError, match="set update_epochs or num_minibatches above 1"):
        StopOnKL(0.1).setup(trainer, make.module(steps_per_iteration=1), "fit")
