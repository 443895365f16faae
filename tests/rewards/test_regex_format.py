import pytest

from lit_rl.rewards import RegexFormat

THINK = r"<think>.+</think>.*"


def test_the_whole_response_must_match(rollout_of):
    responses = ["<think>a\nb</think>c", "so <think>a</think>", "<think></think>", "<THINK>a"]
    assert RegexFormat(THINK).values(rollout_of(responses)) == [1, 0, 0, 0]
    assert RegexFormat(r"\d+").values(rollout_of(["12", "12a", "a12", ""])) == [1, 0, 0, 0]


def test_a_tag_that_the_prompt_opened_counts(rollout_of):
    rollout = rollout_of(
        ["x</think>y", "x</think>y", "<think>x</think>y", "x"],
        prompts=["q<think>\n", "q", "q", "q<think>\n"],
    )
    # Row 1: nobody opened the tag. Row 2: the response did. Row 3: nobody closed it.
    assert RegexFormat(THINK, prompt_tail="<think>\n").values(rollout) == [1, 0, 1, 0]


def test_a_wrong_pattern_is_refused():
    with pytest.raises(ValueError, match=r"pattern '\(a' is not a regular expression"):
        RegexFormat("(a")
