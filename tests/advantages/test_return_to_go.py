import pytest
import torch

from lit_rl.advantages import BatchMean, MovingAverage, ReturnToGo, return_to_go

NAN = torch.nan


def test_a_discount_is_taken_for_each_token_until_the_reward():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    # 0.9^2, 0.9, 1; a response that fills the width has its reward at its last token.
    expected = [[0.81, 0.9, 1.0, 0.0, 0.0], [0.6561, 0.729, 0.81, 0.9, 1.0]]
    torch.testing.assert_close(return_to_go(rewards, mask, gamma=0.9), torch.tensor(expected))


def test_without_a_discount_the_first_token_has_the_reward_of_the_response():
    rewards = torch.tensor([[0.5, -1.0, 2.0]])
    # 0.5 - 1 + 2, -1 + 2, 2.
    result = return_to_go(rewards, torch.ones(1, 3, dtype=torch.bool), gamma=1.0)
    assert result.tolist() == [[1.5, 1.0, 2.0]]


def test_a_discount_of_zero_leaves_the_reward_of_the_token():
    rewards = torch.tensor([[0.5, -1.0, 2.0]])
    assert torch.equal(
        return_to_go(rewards, torch.ones(1, 3, dtype=torch.bool), gamma=0.0), rewards
    )


def test_a_token_that_is_not_the_policys_own_takes_no_discount_and_no_reward():
    rewards = torch.tensor([[1.0, 100.0, NAN, 4.0]])
    mask = torch.tensor([[True, False, False, True]])
    # 1 + 0.5 * 4, as if the two stood side by side.
    assert return_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 0.0, 0.0, 4.0]]


def test_each_rollout_may_have_its_own_discount():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    result = return_to_go(
        rewards, torch.ones(2, 2, dtype=torch.bool), gamma=torch.tensor([0.5, 0.25])
    )
    assert result.tolist() == [[0.5, 1.0], [0.25, 1.0]]


def test_without_columns_there_are_no_returns():
    empty = torch.zeros(2, 0)
    assert torch.equal(return_to_go(empty, empty.bool(), gamma=1.0), empty)


def test_the_mean_of_the_batch_is_deducted_from_every_return(make_scored):
    scored = make_scored([[0.0, 1.0], [4.0, 0.0]], lengths=[2, 1])
    # Returns 1, 1 and 4: mean 2.
    estimator = ReturnToGo(baseline=BatchMean())
    assert estimator(scored).tolist() == [[-1.0, -1.0], [2.0, 0.0]]


def test_the_average_of_earlier_iterations_is_deducted_from_every_return(make_scored):
    first = make_scored([[0.0, 1.0], [4.0, 0.0]], lengths=[2, 1])
    second = make_scored([[0.0, 5.0], [1.0, 0.0]], lengths=[2, 1])
    estimator = ReturnToGo(baseline=MovingAverage(decay=0.5))
    # Nothing is known before the first iteration: a baseline of 0.
    assert estimator(first).tolist() == [[1.0, 1.0], [4.0, 0.0]]
    estimator.observe(first)
    assert estimator(second).tolist() == [[3.0, 3.0], [-1.0, 0.0]]


def test_a_response_without_reward_is_not_observed(make_scored):
    scored = make_scored([[2.0], [100.0]], lengths=[1, 1], missing=[1])
    estimator = ReturnToGo(baseline=MovingAverage())
    estimator.observe(scored)
    assert estimator.state_dict() == {"average": 2.0}


def test_without_a_baseline_nothing_is_remembered(make_scored):
    estimator = ReturnToGo()
    estimator.observe(make_scored([[2.0]], lengths=[1]))
    assert estimator.state_dict() == {}


@pytest.mark.parametrize("gamma", [-0.1, 1.1, NAN])
def test_a_discount_outside_the_unit_interval_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], for example 1.0"):
        ReturnToGo(gamma=gamma)
