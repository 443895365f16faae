import pytest
import torch

from lit_rl.advantages import WhitenedReturn


def test_returns_are_whitened_over_the_tokens_of_the_batch(make_scored):
    scored = make_scored([[0.0, 2.0], [0.0, 0.0]], lengths=[2, 1])
    # With gamma 1/2 the returns are 1, 2 and 0: mean 1, sample standard deviation 1.
    result = WhitenedReturn(gamma=0.5)(scored)
    torch.testing.assert_close(result, torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))


def test_a_long_response_weighs_more_than_a_short_one(make_scored):
    # Returns 1, 1, 1 and 5: mean 2, squares 1 + 1 + 1 + 9, divided by 3.
    result = WhitenedReturn()(make_scored([1.0, 5.0], lengths=[3, 1]))
    torch.testing.assert_close(result, torch.tensor([[-0.5, -0.5, -0.5], [1.5, 0.0, 0.0]]))


def test_equal_rewards_teach_nothing(make_scored):
    assert WhitenedReturn()(make_scored([0.1, 0.1, 0.1], lengths=[3, 1, 2])).eq(0).all()


@pytest.mark.parametrize("gamma", [-0.1, 1.1, torch.nan])
def test_a_discount_outside_the_unit_interval_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], for example 1.0"):
        WhitenedReturn(gamma=gamma)
