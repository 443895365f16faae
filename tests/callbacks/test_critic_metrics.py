"""What the critic foresaw, from sums over the whole iteration."""

import math

import pytest

from lit_rl.callbacks import CriticMetrics
from lit_rl.value_losses import ClippedSquaredError

NAN = float("nan")


def test_by_hand_over_the_tokens_that_count(make, iterate):
    # Returns 1, 2, 3, 6: mean 3, squared distances 4 + 1 + 0 + 9 = 14.
    # Returns - values: 1, 0, 1, 2: mean 1, squared distances 0 + 1 + 0 + 1 = 2.
    experience = make.critic_experience(
        [[1, 1, 0], [1, 1, 0]],
        old_values=[[0.0, 2.0, NAN], [2.0, 4.0, 99.0]],
        returns=[[1.0, 2.0, 99.0], [3.0, 6.0, NAN]],
    )
    logged = iterate(CriticMetrics(), experience=experience)
    assert logged["critic/explained_variance"] == pytest.approx(1 - 2 / 14)
    assert logged["critic/value_mean"] == 8 / 4
    assert logged["critic/return_mean"] == 12 / 4


def test_perfect_constant_and_wrong_values(make, iterate):
    def explained(values):
        experience = make.critic_experience([[1, 1]], old_values=[values], returns=[[1.0, 3.0]])
        return iterate(CriticMetrics(), experience=experience)["critic/explained_variance"]

    assert explained([1.0, 3.0]) == 1.0
    # A constant is no part of a variance.
    assert explained([-4.0, -2.0]) == 1.0
    assert explained([7.0, 7.0]) == 0.0
    # Returns - values: -2 and 2, variance 4 times that of the returns.
    assert explained([3.0, 1.0]) == pytest.approx(-3.0)


def test_returns_without_variance_explain_nothing_and_say_so(make, iterate):
    """0.1 in float32 is no sum of powers of two: a rounded variance would divide by its error."""
    experience = make.critic_experience(
        [[1, 1, 1]], old_values=[[0.0, 0.5, 1.0]], returns=[[0.1, 0.1, 0.1]]
    )
    logged = iterate(CriticMetrics(), experience=experience)
    assert math.isnan(logged["critic/explained_variance"])
    assert logged["critic/return_mean"] == pytest.approx(0.1)


def test_value_loss_and_clip_fraction_are_over_the_tokens_of_all_updates(make, iterate):
    # Old value 0, clip 0.5. Errors: (V - R)^2 / 2 or that of V within 0.5 of 0, the larger one.
    # First step, V = 1: R = 2: max(1, 2.25) / 2, the clip binds; R = -1: max(4, 2.25) / 2.
    # Second step, V = 0, R = 2: 4 / 2.
    first = make.critic_experience(
        [[1, 1, 0]], old_values=[[0.0, 0.0, NAN]], returns=[[2.0, -1.0, NAN]]
    )
    second = make.critic_experience([[1]], old_values=[[0.0]], returns=[[2.0]])
    updates = [
        make.critic_update((first, [[1.0, 1.0, NAN]]), index=0),
        make.critic_update((second, [[0.0]]), index=1),
    ]
    module = make.module(value_loss=ClippedSquaredError(clip=0.5))
    logged = iterate(CriticMetrics(), *updates, experience=first, module=module)
    # Three tokens in rows of two and one: not the mean of the means.
    assert logged["critic/value_loss"] == pytest.approx((1.125 + 2.0 + 2.0) / 3)
    assert logged["critic/clip_fraction"] == pytest.approx(1 / 3)


def test_any_split_into_micro_batches_gives_the_same(make, iterate):
    rows = [
        (make.critic_experience([[1, 1]], [[0.0, 1.0]], [[2.0, 1.0]]), [[0.5, 0.0]]),
        (make.critic_experience([[1, 0]], [[0.0, NAN]], [[3.0, NAN]]), [[1.0, NAN]]),
    ]
    whole = make.critic_experience(
        [[1, 1], [1, 0]], [[0.0, 1.0], [0.0, NAN]], [[2.0, 1.0], [3.0, NAN]]
    )
    together = make.critic_update((whole, [[0.5, 0.0], [1.0, NAN]]))
    expected = iterate(CriticMetrics(), together, experience=whole)
    split = iterate(CriticMetrics(), make.critic_update(*rows), experience=whole)
    assert split == pytest.approx(expected, rel=1e-15)


def test_an_iteration_without_tokens_logs_the_same_keys(make, iterate):
    """As a rank may have: it takes part in the sums over ranks with nothing."""
    experience = make.critic_experience([[0]], old_values=[[NAN]], returns=[[NAN]])
    empty = iterate(CriticMetrics(), make.critic_update(), experience=experience)
    full = make.critic_experience([[1]], old_values=[[0.0]], returns=[[1.0]])
    assert list(empty) == list(iterate(CriticMetrics(), experience=full))
    assert all(math.isnan(value) for value in empty.values())


def test_iterations_do_not_mix(make, iterate):
    callback = CriticMetrics()
    for mean in (5.0, 1.0):
        experience = make.critic_experience([[1]], old_values=[[mean]], returns=[[mean]])
        logged = iterate(callback, experience=experience)
    assert logged["critic/value_mean"] == logged["critic/return_mean"] == 1.0


def test_an_algorithm_without_a_critic_logs_nothing(make, iterate):
    experience = make.experience([[1]], old=[[-1.0]])
    assert iterate(CriticMetrics(), make.update((experience, [[-1.0]]))) == {}
