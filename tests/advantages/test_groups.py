from functools import partial

import pytest
import torch

from lit_rl.advantages import (
    GroupCentered,
    GroupNormalized,
    LeaveOneOut,
    group_centered,
    group_normalized,
    leave_one_out,
)

NAN = torch.nan
ESTIMATORS = [GroupNormalized(), GroupCentered(), LeaveOneOut()]
over_estimators = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
over_functions = pytest.mark.parametrize(
    "function",
    [partial(group_normalized, epsilon=1e-6), group_centered, leave_one_out],
    ids=["group_normalized", "group_centered", "leave_one_out"],
)


@over_functions
def test_a_group_of_one_is_refused(function):
    with pytest.raises(ValueError, match=r"group_size is 1.*at least 2"):
        function(torch.tensor([5.0]), 1, valid=torch.tensor([True]))


@over_functions
def test_rows_that_do_not_form_whole_groups_are_refused(function):
    with pytest.raises(ValueError, match=r"7 rollouts .* group_size 3; 6 or 9 would"):
        function(torch.zeros(7), 3, valid=torch.ones(7, dtype=torch.bool))


@over_functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e-3, 1e6 + 0.1])
@pytest.mark.parametrize("group_size", [2, 3, 6, 7])
def test_equal_rewards_give_exactly_zero(function, dtype, reward, group_size):
    rewards = torch.full((2 * group_size,), reward, dtype=dtype)
    result = function(rewards, group_size, valid=torch.ones(len(rewards), dtype=torch.bool))
    assert result.eq(0).all()
    assert result.dtype == dtype


@over_functions
def test_groups_never_mix(function):
    valid = torch.ones(4, dtype=torch.bool)
    together = function(torch.tensor([1.0, 0.0, 5.0, 5.0]), 2, valid=valid)
    alone = function(torch.tensor([1.0, 0.0]), 2, valid=valid[:2])
    assert together.tolist() == [*alone.tolist(), 0.0, 0.0]
    assert alone.tolist()[0] == -alone.tolist()[1] > 0


@over_functions
@pytest.mark.parametrize("anything", [10.0, 1e30, NAN, torch.inf, -torch.inf])
def test_a_row_that_does_not_count_moves_no_baseline(function, anything):
    valid = torch.tensor([True, True, False])
    result = function(torch.tensor([1.0, 0.0, anything]), 3, valid=valid)
    of_two = function(torch.tensor([1.0, 0.0]), 2, valid=valid[:2])
    assert result.tolist() == [*of_two.tolist(), 0.0]


@over_functions
@pytest.mark.parametrize("num_valid", [0, 1])
def test_a_row_left_alone_in_its_group_has_no_advantage(function, num_valid):
    valid = torch.arange(3) < num_valid
    assert function(torch.tensor([7.0, NAN, NAN]), 3, valid=valid).tolist() == [0.0, 0.0, 0.0]


@over_functions
def test_nan_in_a_row_that_counts_is_not_hidden_and_stays_in_its_group(function):
    result = function(torch.tensor([1.0, NAN, 1.0, 0.0]), 2, valid=torch.ones(4, dtype=torch.bool))
    assert result.isnan().tolist() == [True, True, False, False]


@over_estimators
def test_an_advantage_stands_at_each_token_that_counts_and_nowhere_else(estimator, make_scored):
    advantages = estimator(make_scored([1.0, 0.0], lengths=[1, 3], group_size=2))
    # All three estimators are symmetric in a group of two, and positive for the winner.
    winner, loser = advantages[0, 0].item(), advantages[1, 0].item()
    assert winner == -loser > 0
    assert advantages.tolist() == [[winner, 0.0, 0.0], [loser, loser, loser]]


@over_estimators
def test_missing_and_empty_rows_leave_their_group(estimator, make_scored):
    scored = make_scored([1.0, 0.0, 10.0, 20.0], lengths=[2, 2, 2, 0], group_size=4, missing=[2])
    of_two = make_scored([1.0, 0.0], lengths=[2, 2], group_size=2)
    expected = [*estimator(of_two).tolist(), [0.0, 0.0], [0.0, 0.0]]
    assert estimator(scored).tolist() == expected


@over_estimators
def test_a_missing_reward_is_not_a_reward_of_zero(estimator, make_scored):
    scored = make_scored([1.0, 1.0, 0.0], lengths=[1, 1, 1], group_size=3, missing=[2])
    assert estimator(scored).eq(0).all()


@over_estimators
def test_two_responses_per_prompt_are_needed(estimator):
    assert estimator.min_group_size == 2
