import torch

from lit_rl.advantages import GroupCenteredWhitened, group_centered_whitened


def test_distances_from_the_mean_of_the_group_are_whitened_over_the_tokens_of_the_batch():
    rewards = torch.tensor([1.0, 0.0, 7.0, 5.0])
    mask = torch.tensor([[True, False], [True, False], [True, True], [True, True]])
    # Centered 1/2, -1/2, 1 (twice) and -1 (twice): mean 0, squares 4.5, divided by 5.
    scale = 0.9**-0.5
    expected = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [1.0, 1.0], [-1.0, -1.0]]) * scale
    torch.testing.assert_close(group_centered_whitened(rewards, 2, mask=mask), expected)


def test_a_group_of_equal_rewards_gets_what_the_mean_of_the_tokens_leaves_it(make_scored):
    # Centered 1/2, -1/2 (three times), 0 and 0: mean -1/6, squares 1 - 6/36, divided by 5.
    scored = make_scored([1.0, 0.0, 4.0, 4.0], lengths=[1, 3, 1, 1], group_size=2)
    result = GroupCenteredWhitened()(scored)
    torch.testing.assert_close(result[2:, 0], torch.full((2,), (1 / 6) * 6**0.5))


def test_equal_rewards_in_every_group_teach_nothing(make_scored):
    scored = make_scored([0.1, 0.1, 4.0, 4.0], lengths=[1, 3, 2, 1], group_size=2)
    assert GroupCenteredWhitened()(scored).eq(0).all()


def test_a_missing_response_is_in_no_group_and_in_no_deviation(make_scored):
    scored = make_scored([1.0, 0.0, 9.0], lengths=[1, 1, 3], group_size=3, missing=[2])
    of_two = make_scored([1.0, 0.0], lengths=[1, 1], group_size=2)
    result = GroupCenteredWhitened()(scored)
    assert torch.equal(result[:2, :1], GroupCenteredWhitened()(of_two))
    assert result[2].eq(0).all()
