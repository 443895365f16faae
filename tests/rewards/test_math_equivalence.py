from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")
from lit_rl.rewards import MathEquivalence


@pytest.fixture(scope="module")
def reward():
    return MathEquivalence()


# Reference answer, response, value; decided by arithmetic.
CASES = [
    (r"\frac{1}{2}", "The answer is $0.5$.", 1),
    (r"\frac{1}{2}", r"\boxed{2/4}", 1),
    ("0.5", "1/2", 1),
    ("1,000", "it is 1000", 1),
    ("x^2+2x+1", "$(x+1)^2$", 1),
    ("$(1,2)$", "$(1,2)$", 1),
    ("4", "$2+3$", 0),
    (r"\sqrt{2}", "$1.41$", 0),
    ("4", "no idea", 0),
    ("4", "", 0),
    ("4", r"$\frac{4$", 0),
]


def test_equal_mathematics_is_right_however_it_is_written(reward, rollout_of):
    answers, responses, expected = zip(*CASES, strict=True)
    assert reward.values(rollout_of(responses, answers)) == list(expected)


def test_it_works_outside_the_main_thread(reward, rollout_of):
    rollout = rollout_of(["$2$", "$3$"], ["2", "2"])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward.values, rollout).result() == [1, 0]


def test_a_response_that_takes_for_ever_is_counted_and_the_others_are_judged(rollout_of):
    reward = MathEquivalence(timeout_seconds=1.0)
    rollout = rollout_of(["$2$", "$10^{10^{10}}$", "$2$"], ["2"] * 3)
    with pytest.warns(UserWarning, match=r"1 of 3 responses could not .* row 1.* within 1.0 s"):
        assert reward.values(rollout) == [1, 0, 1]


def test_an_answer_that_cannot_be_read_is_an_error_that_shows_it(reward, rollout_of):
    with pytest.raises(RuntimeError, match=r"cannot read the reference answer '\$\\\\frac\{\$'"):
        reward(rollout_of(["2", "2"], ["2", r"$\frac{$"]))


def test_a_prompt_without_an_answer_is_left_out(reward, rollout_of):
    assert reward.values(rollout_of(["2", "2"], ["", "2"])) == [None, 1]


def test_a_time_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"timeout_seconds is 0.0, must be above 0"):
        MathEquivalence(timeout_seconds=0.0)
