import pytest
import torch

from lit_rl.advantages import GroupNormalized, group_normalized


def normalized(rewards, group_size, epsilon=1e-6, dtype=torch.float64):
    rewards = torch.tensor(rewards, dtype=dtype)
    valid = torch.ones(len(rewards), dtype=torch.bool)
    return group_normalized(rewards, group_size, valid=valid, epsilon=epsilon)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Mean 1/4, squares 9/16 + 3/16 = 3/4, divided by 3: std 1/2.
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        # Mean 1/2, squares 1/2, divided by 1: std 0.7071. (Divided by 2 it would give +-1.)
        ([1.0, 0.0], [2**-0.5, -(2**-0.5)]),
    ],
)
def test_the_standard_deviation_is_that_of_a_sample(rewards, expected):
    result = normalized(rewards, len(rewards))
    torch.testing.assert_close(result.tolist(), expected, rtol=0, atol=1e-5)


def test_epsilon_is_added_to_the_standard_deviation():
    # 0.75 / (0.5 + 1e-4) and -0.25 / (0.5 + 1e-4).
    result = normalized([1.0, 0.0, 0.0, 0.0], 4, epsilon=1e-4)
    expected = torch.tensor([1.4997000600, -0.4999000200, -0.4999000200, -0.4999000200])
    torch.testing.assert_close(result, expected.double(), rtol=0, atol=1e-7)


def test_the_default_epsilon_is_that_of_the_docstring():
    assert GroupNormalized().epsilon == 1e-6


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, float("nan")])
def test_an_epsilon_that_is_not_above_zero_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        GroupNormalized(epsilon=epsilon)


def test_a_group_is_measured_by_its_own_mean_and_deviation():
    result = normalized([1.0, 0.0, 5.0, 5.0, 100.0, 300.0], 2)
    # The scale of the third group does not reach the first: +-1/sqrt(2) in both.
    half = 2**-0.5
    torch.testing.assert_close(
        result.tolist(), [half, -half, 0.0, 0.0, -half, half], rtol=0, atol=1e-5
    )
