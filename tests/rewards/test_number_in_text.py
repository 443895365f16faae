from fractions import Fraction

import pytest

from lit_rl.rewards import NumberInText
from lit_rl.rewards.number_in_text import numbers_in

# Each read by eye.
TEXTS = {
    "": [],
    "none": [],
    "The answer is 12.": [12],
    "1,234,567 or 1,234.5": [1234567, Fraction("1234.5")],
    "1,2,3": [1, 2, 3],
    "12,3456": [12, 3456],
    "-3 +4 \u22125": [-3, 4, -5],
    "8-2=6": [8, 2, 6],
    "x=-3, (-4)": [-3, -4],
    "(1)-2": [1, 2],
    "3.50 .5 0.25": [Fraction(7, 2), Fraction(1, 2), Fraction(1, 4)],
    "1/2 and -3 / 4": [Fraction(1, 2), Fraction(-3, 4)],
    "3/0": [3, 0],
    "$5 50% 007": [5, 50, 7],
    "9" * 5000 + " 3": [3],
    "\u0663": [],
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20])
def test_numbers_are_read_as_a_person_reads_them(text):
    assert numbers_in(text) == TEXTS[text]


def test_the_last_number_counts_or_the_first(rollout_of):
    responses = ["2+3=5", "5, not 6", "it is five", "-5"]
    rollout = rollout_of(responses, ["5"] * 4)
    assert NumberInText().values(rollout) == [1, 0, 0, 0]
    assert NumberInText(which="first").values(rollout) == [0, 1, 0, 0]


def test_numbers_are_equal_by_value(rollout_of):
    rollout = rollout_of(["1000", "0.5", "0.33"], ["He has 4.\n#### 1,000", "1/2", "1/3"])
    assert NumberInText().values(rollout) == [1, 1, 0]


def test_a_prompt_without_an_answer_is_left_out_and_one_without_a_number_is_an_error(rollout_of):
    assert NumberInText().values(rollout_of(["1", "1"], ["", "1"])) == [None, 1]
    with pytest.raises(RuntimeError, match="'four' holds no number"):
        NumberInText()(rollout_of(["1"], ["four"]))


def test_an_unknown_choice_is_refused():
    with pytest.raises((ValueError, TypeError), match="which"):
        NumberInText(which="middle")
