import pytest
import torch

from lit_rl.advantages import ProcessNormalized, process_normalized

NAN = torch.nan


def normalized(steps, mask=None, group_size=2):
    steps = torch.tensor(steps)
    mask = torch.ones_like(steps).bool() if mask is None else torch.tensor(mask)
    return process_normalized(steps, group_size, mask=mask, epsilon=1e-6)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_token_has_the_sum_of_the_steps_that_end_at_it_or_behind_it():
    # Steps 2, 0, 1 and -3 of a group: mean 0, squares 4 + 0 + 1 + 9 = 14, divided by 3.
    result = normalized([[2.0, NAN, 0.0, NAN], [NAN, 1.0, NAN, -3.0]])
    std = (14 / 3) ** 0.5
    expected = [[2 / std, 0.0, 0.0, 0.0], [-2 / std, -2 / std, -3 / std, -3 / std]]
    close(result, expected)


def test_one_step_at_the_end_of_each_response_is_outcome_supervision():
    # 1 and 0: mean 1/2, sample standard deviation 0.7071.
    half = 2**-0.5
    result = normalized([[NAN, 1.0], [0.0, NAN]], mask=[[True, True], [True, False]])
    close(result, [[half, half], [-half, 0.0]])


def test_groups_never_mix():
    together = normalized([[1.0, NAN], [0.0, NAN], [500.0, NAN], [100.0, NAN]])
    half = 2**-0.5
    close(together[:, 0], [half, -half, half, -half])


def test_equal_steps_give_exactly_zero():
    assert normalized([[0.1, 0.1, 0.1], [NAN, 0.1, 0.1]]).eq(0).all()


def test_a_response_without_steps_has_no_advantage_and_moves_no_mean():
    result = normalized([[1.0, 0.0], [NAN, NAN], [0.0, 1.0]], group_size=3)
    of_two = normalized([[1.0, 0.0], [0.0, 1.0]])
    assert torch.equal(result[[0, 2]], of_two)
    assert result[1].tolist() == [0.0, 0.0]


def test_a_step_that_ends_where_no_token_counts_is_not_read():
    mask = [[True, True, False], [True, False, False]]
    dirty = normalized([[1.0, NAN, 100.0], [0.0, -50.0, 3.0]], mask=mask)
    assert torch.equal(dirty, normalized([[1.0, NAN, NAN], [0.0, NAN, NAN]], mask=mask))


def test_a_reward_without_steps_is_warned_about(make_scored):
    scored = make_scored([1.0, 0.0], lengths=[2, 2], group_size=2)
    with pytest.warns(UserWarning, match="no response has a step, so all advantages are 0"):
        assert ProcessNormalized()(scored).eq(0).all()


def test_a_missing_response_leaves_its_group(make_scored):
    steps = [[1.0, NAN], [0.0, NAN], [9.0, 5.0]]
    scored = make_scored(
        [1.0, 0.0, 14.0], lengths=[2, 2, 2], group_size=3, missing=[2], step_rewards=steps
    )
    result = ProcessNormalized()(scored)
    assert torch.equal(result[:2], normalized(steps[:2]))
    assert result[2].tolist() == [0.0, 0.0]


def test_a_kl_in_the_reward_does_not_reach_the_steps():
    assert not ProcessNormalized.sees_final_reward


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, NAN])
def test_an_epsilon_that_is_not_above_zero_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        ProcessNormalized(epsilon=epsilon)


def test_rows_that_do_not_form_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"3 rollouts .* group_size 2; 2 or 4 would"):
        normalized([[1.0], [0.0], [1.0]])
    with pytest.raises(ValueError, match=r"group_size is 1.*at least 2"):
        normalized([[1.0]], group_size=1)
