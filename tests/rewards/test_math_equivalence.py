from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")
from lit_rl.rewards import MathEquivalence


@pytest.fixture(scope="module")
def reward():
    reward = MathEquivalence()
    yield reward
    reward.teardown()


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


def test_a_response_that_takes_for_ever_is_left_out_and_the_others_are_judged(rollout_of):
    reward = MathEquivalence(timeout_seconds=1.0)
    rollout = rollout_of(["$2$", "$10^{10^{10}}$", "$3$"], ["2"] * 3)
    message = r"failed on 1 of 3 .* row 1, .* took longer than timeout_seconds 1.0"
    with pytest.warns(UserWarning, match=message):
        scored = reward(rollout)
    assert scored.rewards.tolist() == [1, 0, 0]
    assert scored.missing.tolist() == [False, True, False]
    assert scored.failed.tolist() == [False, True, False]


def test_the_run_can_be_made_to_end_instead(rollout_of):
    strict = MathEquivalence(timeout_seconds=1.0, on_error="raise")
    with pytest.raises(RuntimeError, match=r"the first is row 0, .* timeout_seconds 1.0"):
        strict(rollout_of(["$10^{10^{10}}$"], ["2"]))


def test_an_answer_that_cannot_be_read_is_an_error_that_shows_it(reward, rollout_of):
    with pytest.raises(RuntimeError, match=r"cannot read the reference answer '\$\\\\frac\{\$'"):
        reward(rollout_of(["2", "2"], ["2", r"$\frac{$"]))


def test_a_prompt_without_an_answer_is_left_out(reward, rollout_of):
    assert reward.values(rollout_of(["2", "2"], ["", "2"])) == [None, 1]


def test_a_time_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"timeout_seconds is 0.0, must be above 0"):
        MathEquivalence(timeout_seconds=0.0)
