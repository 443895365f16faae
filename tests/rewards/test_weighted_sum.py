import pytest
import torch

from lit_rl.rewards import ExactAnswer, Failed, Length, PythonFunction, RegexFormat, WeightedSum


def by_column(given):
    return given


@pytest.fixture
def nested():
    inner = WeightedSum({"digits": RegexFormat(r"\d+"), "short": Length(1)}, {"short": 0.5})
    return WeightedSum({"answer": ExactAnswer(), "form": inner}, {"form": 0.1, "answer": 2.0})


def test_parts_are_named_and_weighted_and_nested_sums_are_dissolved(nested, rollout_of):
    scored = nested(rollout_of(["8", "9", "x"], ["8"] * 3, lengths=[1, 1, 2]))
    assert list(scored.reward_parts) == ["answer", "digits", "short"]
    # 2 * answer + 0.1 * digits + 0.05 * short
    assert scored.rewards.tolist() == pytest.approx([2.15, 0.15, 0.0])
    assert scored.reward_parts["short"].tolist() == [1.0, 1.0, 0.0]


def test_a_part_that_does_not_apply_adds_nothing_and_a_row_without_parts_is_missing(rollout_of):
    reward = WeightedSum({"answer": ExactAnswer(), "given": PythonFunction(by_column)})
    rollout = rollout_of(["8", "8", "8"], ["8", "", ""], columns={"given": (None, 3.0, None)})
    with pytest.warns(UserWarning, match=r"weighted_sum applies to 1 of 3 .* row 2"):
        scored = reward(rollout)
    assert scored.rewards.tolist() == [1.0, 3.0, 0.0]
    assert scored.missing.tolist() == [False, False, True]
    assert scored.reward_parts["answer"].isnan().tolist() == [False, True, True]


def test_a_part_that_applies_to_no_response_keeps_its_name(rollout_of):
    reward = WeightedSum({"answer": ExactAnswer(), "given": PythonFunction(by_column)})
    scored = reward(rollout_of(["8"], ["8"], columns={"given": (None,)}))
    assert scored.rewards.tolist() == [1.0]
    assert scored.reward_parts["given"].isnan().all()


def test_the_values_of_a_sum_are_its_total(nested, rollout_of):
    rollout = rollout_of(["8", "9"], ["8", "8"])
    assert torch.tensor(nested.values(rollout)).equal(nested(rollout).rewards)


def test_errors_name_the_part(rollout_of):
    reward = WeightedSum({"answer": ExactAnswer(), "judge": PythonFunction(by_column)})
    with pytest.raises(ValueError, match="the reward judge must give 1 values"):
        reward(rollout_of(["8"], ["8"], columns={"given": ()}))


def test_wrong_weights_and_names_are_refused(nested):
    part = {"answer": ExactAnswer()}
    with pytest.raises(ValueError, match=r"weights are given for \['answerr'\].*\['answer'\]"):
        WeightedSum(part, {"answerr": 1.0})
    with pytest.raises(ValueError, match="must be finite"):
        WeightedSum(part, {"answer": float("nan")})
    with pytest.raises(ValueError, match="the parts are \\[\\]"):
        WeightedSum({})
    with pytest.raises(ValueError, match="two parts are called 'answer'"):
        WeightedSum({"sum": nested, "answer": ExactAnswer()})


def test_a_response_on_which_one_part_failed_is_missing_whatever_the_others_say(rollout_of):
    """Of three right answers, judging fails on the second: no 1 + 0 there."""
    given = ([0.5, None], Failed("no judge"), [0.25, 0.25])
    rollout = rollout_of(["8"] * 3, ["8"] * 3, lengths=[2] * 3, columns={"given": given})
    reward = WeightedSum({"answer": ExactAnswer(), "judge": PythonFunction(by_column)})
    with pytest.warns(UserWarning, match=r"failed on 1 of 3 .* first is row 1, '8': no judge"):
        scored = reward(rollout)
    assert scored.rewards.tolist() == [1.5, 0.0, 1.5]
    assert scored.token_rewards[1].tolist() == [0.0, 0.0]
    assert scored.step_rewards[1].isnan().all()
    assert scored.missing.tolist() == scored.failed.tolist() == [False, True, False]
    # Neither part counts in the metrics of parts.
    assert all(part[1].isnan() for part in scored.reward_parts.values())
    assert reward.values(rollout) == [1.5, Failed("no judge"), 1.5]
