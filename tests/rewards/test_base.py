import math

import numpy as np
import pytest
import torch

from lit_rl.rewards import Reward

NAN = math.nan


class GivenValues(Reward):
    """Returns what it was given."""

    def __init__(self, given):
        self.given = given

    def values(self, rollout):
        return self.given


class FailingReward(Reward):
    def values(self, rollout):
        raise KeyError("no such thing")


@pytest.fixture
def four(rollout_of):
    return rollout_of(["a", "b", "c", "d"])


def test_the_name_is_the_class_in_snake_case():
    assert GivenValues([]).name == "given_values"


@pytest.mark.parametrize(
    "given",
    [
        [0, 1.5, True, -2],
        (0.0, 1.5, 1.0, -2.0),
        np.array([0, 1.5, 1, -2]),
        list(np.array([0, 1.5, 1, -2], dtype=np.float32)),
        torch.tensor([0, 1.5, 1, -2], dtype=torch.float64),
    ],
)
def test_one_number_per_response_becomes_float32(four, given):
    scored = GivenValues(given)(four)
    # The numbers as given; True counts as 1.
    assert scored.rewards.tolist() == [0.0, 1.5, 1.0, -2.0]
    assert scored.rewards.dtype == torch.float32
    assert scored.reward_parts["given_values"].tolist() == [0.0, 1.5, 1.0, -2.0]
    assert not scored.missing.any()


def test_the_rollout_comes_along_unchanged(four):
    scored = GivenValues([0, 0, 0, 1])(four)
    assert scored.responses == four.responses
    assert scored.mask is four.mask


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_wrong_number_of_values_is_refused_and_never_broadcast(four, count):
    with pytest.raises(ValueError, match=rf"given_values must give 4 values.* got {count} values"):
        GivenValues([1.0] * count)(four)


@pytest.mark.parametrize("given", [1.0, None, {"a": 1.0}, torch.tensor(1.0), iter([1.0])])
def test_what_is_no_list_is_refused(four, given):
    with pytest.raises(ValueError, match="given_values must give 4 values, one per response"):
        GivenValues(given)(four)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 1e39, 10**400, "1.0", {1.0}, 1j])
def test_a_value_that_is_no_finite_number_is_refused_with_its_response(four, value):
    with pytest.raises(ValueError, match=r"given_values gave .* for row 2, whose response is 'c'"):
        GivenValues([0, 0, value, 0])(four)


def test_a_long_response_is_cut_in_the_error(rollout_of):
    with pytest.raises(ValueError, match=r"gave nan") as caught:
        GivenValues([NAN])(rollout_of(["x" * 10_000]))
    assert len(str(caught.value)) < 500


def test_none_is_a_missing_row_with_a_warning_that_names_the_first(four):
    message = r"no part of the reward given_values applies to 2 of 4 .* first is row 1, 'b'"
    with pytest.warns(UserWarning, match=message):
        scored = GivenValues([1.0, None, 3.0, None])(four)
    # The value of a missing row is 0 and marked; its part is NaN.
    assert scored.rewards.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert scored.missing.tolist() == [False, True, False, True]
    assert scored.reward_parts["given_values"].isnan().tolist() == [False, True, False, True]


def test_none_for_all_responses_leaves_them_all_missing(four):
    """An error only where it holds on all ranks, which the algorithm knows."""
    with pytest.warns(UserWarning, match="applies to 4 of 4"):
        scored = GivenValues([None] * 4)(four)
    assert scored.missing.all()


def test_an_exception_surfaces_with_the_name_of_the_reward_and_its_own_type(four):
    with pytest.raises(RuntimeError, match="failing_reward raised KeyError: 'no such") as caught:
        FailingReward()(four)
    assert isinstance(caught.value.__cause__, KeyError)
