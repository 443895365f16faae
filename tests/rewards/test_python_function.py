import asyncio

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from lit_rl.rewards import InWorkers, PythonFunction, Reward, WeightedSum


def lengths(responses):
    return [len(response) for response in responses]


def everything(**columns):
    assert columns == {
        "prompts": ["p", "q"],
        "responses": ["a", "bb"],
        "answers": ["x", "y"],
        "finished": [True, False],
        "response_ids": [[0], [0]],
        "level": [1, 2],
        "given": [None, 4.0],
    }
    return columns["given"]


def named(given, responses, level=0, other="default"):
    assert other == "default"
    return [value * level[0] for value in level]


async def awaited(responses):
    await asyncio.sleep(0)
    return [float(len(response)) for response in responses]


def typo(all_responses):
    return all_responses


class LongerThan:
    def __init__(self, limit: int):
        self.limit = limit

    def __call__(self, responses):
        return [len(response) > self.limit for response in responses]


@pytest.fixture
def two(rollout_of):
    columns = {"level": (1, 2), "given": (None, 4.0)}
    return rollout_of(
        ["a", "bb"], ["x", "y"], prompts=["p", "q"], columns=columns, finished=[True, False]
    )


def test_a_function_receives_the_columns_that_it_names(two):
    assert PythonFunction(lengths)(two).rewards.tolist() == [1.0, 2.0]
    assert PythonFunction(named)(two).rewards.tolist() == [1.0, 2.0]


def test_a_function_with_keyword_arguments_receives_every_column(two):
    with pytest.warns(UserWarning, match="everything applies to 1 of 2"):
        assert PythonFunction(everything)(two).rewards.tolist() == [0.0, 4.0]


def test_a_column_cannot_shadow_an_argument(rollout_of):
    rollout = rollout_of(["abc"], columns={"responses": ("x",)})
    assert PythonFunction(lengths).values(rollout) == [3]


def test_the_name_is_the_name_of_the_function_or_of_the_class_of_an_object():
    assert PythonFunction(lengths).name == "lengths"
    assert PythonFunction(LongerThan(1)).name == "LongerThan"


def test_an_object_with_settings_can_be_called(two):
    assert PythonFunction(LongerThan(1))(two).rewards.tolist() == [0.0, 1.0]


def test_an_async_function_is_awaited(two):
    assert PythonFunction(awaited)(two).rewards.tolist() == [1.0, 2.0]


def test_an_async_function_is_awaited_where_a_loop_already_runs(two):
    async def notebook():
        return PythonFunction(awaited)(two)

    assert asyncio.run(notebook()).rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_parameter_that_nothing_fills_shows_in_the_names_of_the_columns(wrapped):
    def by_level(level):
        return level

    def build(function):
        reward = PythonFunction(function)
        return WeightedSum({"part": InWorkers(reward)}) if wrapped else reward

    for function in (by_level, named, everything):
        build(function).check_columns(["level", "given"])
    with pytest.raises(ValueError, match=r"parameter level, but .* finished, given, prompts, resp"):
        build(by_level).check_columns(["given"])


def test_a_parameter_that_nothing_fills_is_is_an_error_with_the_near_name(two):
    with pytest.raises(RuntimeError, match=r"parameter all_responses.*did you mean responses\?"):
        PythonFunction(typo)(two)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "must give 2 values, one per response, in a list; got 1 values"),
        ([1.0, float("nan")], r"gave nan for row 1, whose response is 'bb'"),
    ],
)
def test_wrong_values_are_errors_that_name_the_function(two, values, message):
    def own_judge():
        return values

    with pytest.raises(ValueError, match=f"own_judge {message}"):
        PythonFunction(own_judge)(two)


def test_a_function_that_raises_is_named_with_its_exception(two):
    def own_judge():
        raise ZeroDivisionError("by nought")

    with pytest.raises(RuntimeError, match="own_judge raised ZeroDivisionError: by nought"):
        PythonFunction(own_judge)(two)


@pytest.fixture
def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Reward)
    return parser


def test_a_config_names_a_function_by_its_import_path(parser, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def always(responses):\n    return [1.0, 1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = {
        "class_path": "lit_rl.rewards.WeightedSum",
        "init_args": {
            "parts": {
                "mine": {
                    "class_path": "lit_rl.rewards.PythonFunction",
                    "init_args": {"function": "my_rewards.always"},
                },
                "short": {"class_path": "lit_rl.rewards.Length", "init_args": {"maximum": 4}},
            },
            "weights": {"short": 0.5},
        },
    }
    parsed = parser.parse_object({"reward": config})
    reward = parser.instantiate(parsed).reward
    assert reward.rewards["mine"].function.__name__ == "always"
    assert reward.weights == {"mine": 1.0, "short": 0.5}
    # What is written to a run's folder reads back as the same configuration.
    assert parser.parse_string(parser.dump(parsed)) == parsed


def test_a_wrong_import_path_is_an_error_when_the_config_is_read(parser):
    config = {
        "class_path": "lit_rl.rewards.PythonFunction",
        "init_args": {"function": "math.no_such_function"},
    }
    with pytest.raises(ArgumentError, match="no_such_function"):
        parser.parse_object({"reward": config})
