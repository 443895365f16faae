import pytest
import torch

from lit_rl.advantages import OptimalBaseline, group_centered, optimal_baseline

NAN = torch.nan


def test_the_baseline_is_the_mean_weighted_by_lengths():
    rewards, lengths = torch.tensor([1.0, 0.0, 0.0, 4.0]), torch.tensor([6, 2, 3, 1])
    # (6 * 1 + 2 * 0) / 8 and (3 * 0 + 1 * 4) / 4.
    result = optimal_baseline(rewards, 2, lengths=lengths)
    assert result.tolist() == [0.25, -0.75, -1.0, 3.0]


def test_equal_lengths_give_the_plain_mean():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = group_centered(rewards, 4, valid=torch.ones(4, dtype=torch.bool))
    assert torch.equal(optimal_baseline(rewards, 4, lengths=torch.full((4,), 3)), expected)


@pytest.mark.parametrize("group_size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(group_size):
    lengths = torch.arange(1, group_size + 1)
    assert optimal_baseline(torch.full((group_size,), 0.1), group_size, lengths=lengths).eq(0).all()


@pytest.mark.parametrize("anything", [NAN, torch.inf, 1e30])
def test_an_empty_response_is_in_no_group(anything):
    rewards, lengths = torch.tensor([1.0, 0.0, anything]), torch.tensor([3, 1, 0])
    assert optimal_baseline(rewards, 3, lengths=lengths).tolist() == [0.25, -0.75, 0.0]


def test_a_response_left_alone_in_its_group_has_no_advantage():
    rewards, lengths = torch.tensor([7.0, NAN]), torch.tensor([3, 0])
    assert optimal_baseline(rewards, 2, lengths=lengths).tolist() == [0.0, 0.0]


def test_lengths_are_counted_in_tokens_that_count(make_scored):
    scored = make_scored([1.0, 0.0, 9.0], lengths=[3, 1, 2], group_size=3, missing=[2])
    assert OptimalBaseline()(scored).tolist() == [[0.25] * 3, [-0.75, 0.0, 0.0], [0.0] * 3]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"group_size is 1.*at least 2"):
        optimal_baseline(torch.tensor([5.0]), 1, lengths=torch.tensor([2]))
    assert OptimalBaseline.min_group_size == 2
