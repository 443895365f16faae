import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_rl.rewards import PythonFunction, Steps, WeightedSum

NAN = torch.nan


def by_column(given):
    return given


def after_each(response_ids):
    """A step of value 0.5 ends at each token 7."""
    positions = [[i for i, token in enumerate(ids) if token == 7] for ids in response_ids]
    return [Steps(found, [0.5] * len(found)) for found in positions]


@pytest.fixture
def scored(rollout_of):
    """`scored(lengths, *values)`: what a reward makes of these values."""

    def build(lengths, *given):
        names = [chr(ord("a") + row) for row in range(len(lengths))]
        rollout = rollout_of(names, lengths=lengths, columns={"given": given})
        return PythonFunction(by_column)(rollout)

    return build


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_the_value_of_a_step_stands_at_the_token_that_ends_it(scored):
    # A response of five tokens with steps up to its second and last one, and one of three tokens
    # that is rewarded as a whole: its number stands at its last token and is no step.
    both = scored([5, 3], Steps([1, 4], [0.25, 0.5]), 1.0)
    assert_equal(both.step_rewards, [[NAN, 0.25, NAN, NAN, 0.5], [NAN] * 5])
    assert_equal(both.token_rewards, [[0, 0.25, 0, 0, 0.5], [0, 0, 1.0, 0, 0]])
    # The reward of the response is the sum of its steps.
    assert_equal(both.rewards, [0.75, 1.0])
    assert_equal(both.reward_parts["by_column"], [0.75, 1.0])
    assert both.missing.tolist() == [False, False]


@pytest.mark.parametrize(
    "given",
    [
        [None, 0.25, None, -1, True],
        (None, 0.25, None, -1.0, np.float32(1.0)),
        Steps([1, 3, 4], [0.25, -1.0, 1.0]),
        Steps(np.array([1, 3, 4]).tolist(), np.array([0.25, -1, 1]).tolist()),
    ],
)
def test_a_list_says_the_same_as_steps(scored, given):
    one = scored([5], given)
    assert_equal(one.step_rewards, [[NAN, 0.25, NAN, -1.0, 1.0]])
    assert_equal(one.rewards, [0.25])


def test_an_array_with_a_number_per_token_is_a_list(scored):
    rows = scored([2, 1], torch.tensor([0.5, 0.25]), np.array([2]))
    assert_equal(rows.step_rewards, [[0.5, 0.25], [2.0, NAN]])


def test_a_step_of_value_0_is_a_step(scored):
    assert_equal(scored([2], Steps([0], [0.0])).step_rewards, [[0.0, NAN]])


@pytest.mark.parametrize("given", [Steps([], []), [None, None]])
def test_a_response_without_steps_has_reward_0_and_is_not_missing(scored, given):
    one = scored([2], given)
    assert_equal(one.rewards, [0.0])
    assert_equal(one.step_rewards, [[NAN, NAN]])
    assert not one.missing.any()


def test_a_missing_response_has_no_steps(scored):
    with pytest.warns(UserWarning, match="by_column applies to 1 of 2"):
        two = scored([2, 2], None, [0.5, 0.5])
    assert_equal(two.rewards, [0.0, 1.0])
    assert_equal(two.token_rewards, [[0, 0], [0.5, 0.5]])
    assert_equal(two.step_rewards, [[NAN, NAN], [0.5, 0.5]])
    assert two.missing.tolist() == [True, False]


def test_positions_count_the_tokens_of_the_policy(rollout_of):
    """Tokens that the policy did not sample, such as the output of a tool, are none of them."""
    rollout = rollout_of(["a"], lengths=[4], columns={"given": (Steps([0, 1], [0.25, 0.5]),)})
    rollout = replace(rollout, mask=torch.tensor([[True, False, True, True]]))
    one = PythonFunction(by_column)(rollout)
    assert_equal(one.step_rewards, [[0.25, NAN, 0.5, NAN]])


def test_a_function_finds_its_steps_in_the_ids_of_the_tokens_that_count(rollout_of):
    rollout = rollout_of(["a", "b"], lengths=[4, 2])
    ids = torch.tensor([[5, 7, 5, 7], [7, 5, 7, 7]])
    two = PythonFunction(after_each)(replace(rollout, response_ids=ids))
    assert_equal(two.step_rewards, [[NAN, 0.5, NAN, 0.5], [0.5, NAN, NAN, NAN]])


def given_column(name):
    """A reward that returns the column of this name."""

    def read(**columns):
        return columns[name]

    return PythonFunction(read)


def test_weights_apply_to_steps_and_steps_at_the_same_token_add_up(rollout_of):
    columns = {
        "judge": (Steps([0, 2], [1.0, 3.0]), None),
        "format": ([None, 0.5, 0.25, None], [1.0, None]),
        "answer": (2.0, None),
    }
    weights = {"judge": 0.5, "format": 2.0, "answer": 10.0}
    reward = WeightedSum({name: given_column(name) for name in columns}, weights)
    rollout = rollout_of(["a", "b"], lengths=[4, 2], columns=columns)
    two = reward(rollout)
    # 0.5 * 1; 2 * 0.5; 0.5 * 3 + 2 * 0.25; the second row has the step of one part alone.
    assert_equal(two.step_rewards, [[0.5, 1.0, 2.0, NAN], [2.0, NAN, NAN, NAN]])
    # The answer, 10 * 2, stands at the last token of the first row.
    assert_equal(two.token_rewards, [[0.5, 1.0, 2.0, 20.0], [2.0, 0, 0, 0]])
    assert_equal(two.rewards, [23.5, 2.0])
    assert reward.values(rollout) == [23.5, 2.0]
    # Parts are sums of steps before weighting.
    parts = [two.reward_parts[name] for name in columns]
    assert_equal(torch.stack(parts), [[4.0, NAN], [0.75, 1.0], [2.0, NAN]])


def test_an_outcome_at_the_token_of_a_step_is_no_step(rollout_of):
    reward = WeightedSum({"steps": given_column("steps"), "answer": given_column("answer")})
    columns = {"steps": (Steps([1], [0.5]),), "answer": (1.0,)}
    one = reward(rollout_of(["a"], lengths=[2], columns=columns))
    assert_equal(one.step_rewards, [[NAN, 0.5]])
    assert_equal(one.token_rewards, [[0, 1.5]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Steps([1, 3], [0.5, 1.0]), r"position 3 is wrong: .* below the 3 tokens"),
        (Steps([-1], [0.5]), r"position -1 is wrong: .* from 0"),
        (Steps([1, 1], [0.5, 1.0]), r"position 1 is wrong: .* each greater than the one before"),
        (Steps([2, 0], [0.5, 1.0]), r"position 0 is wrong: .* each greater than the one before"),
        (Steps([True], [0.5]), r"position True is wrong"),
        (Steps([1], [0.5, 1.0]), r"there are 1 positions and 2 values"),
        ([0.5, 1.0], r"each token of the response, which are 3, not 2"),
        ([0.5, 1.0, None, None], r"each token of the response, which are 3, not 4"),
    ],
)
def test_steps_that_the_response_does_not_have_are_refused_with_an_example(scored, given, message):
    # The longer first row: the positions would lie inside the tensor.
    name = r"the reward by_column gave .* for row 1, whose response is 'b'; .*"
    with pytest.raises(ValueError, match=f"{name}{message}") as caught:
        scored([6, 3], 0.0, given)
    assert "Steps(positions=[2], values=[0.5])" in str(caught.value)


@pytest.mark.parametrize("value", [NAN, torch.inf, 1e39])
def test_a_step_without_a_finite_value_is_refused_with_its_position(scored, value):
    shown = re.escape(str(value))
    message = rf"for row 1, .*'b'; the value at position 2 is {shown}, not a finite number such as"
    with pytest.raises(ValueError, match=message):
        scored([6, 3], 0.0, Steps([0, 2], [0.5, value]))
    with pytest.raises(ValueError, match=message):
        scored([6, 3], 0.0, [0.5, None, value])


def test_the_example_for_a_response_without_tokens_has_no_step(rollout_of):
    columns = {"given": (1.0, Steps([0], [0.5]))}
    rollout = rollout_of(["a", ""], lengths=[1, 0], columns=columns)
    with pytest.raises(ValueError, match=r"below the 0 tokens .* Steps\(positions=\[\], values="):
        PythonFunction(by_column)(rollout)


def test_steps_of_something_else_than_lists_are_refused(scored):
    steps = Steps([], [])
    object.__setattr__(steps, "positions", 5)  # past the type checks of the tests
    with pytest.raises(ValueError, match=r"row 0, .* 5 of Steps is no list, such as Steps\("):
        scored([2], steps)
