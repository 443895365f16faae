from lit_rl.rewards import ExactAnswer


def test_only_the_answer_itself_is_right(rollout_of):
    rollout = rollout_of(["8", " 8\n", "88", "", "x"], ["8", "8", "8", "8", "X"])
    # By default white space at the ends does not count, and case does.
    assert ExactAnswer().values(rollout) == [1, 1, 0, 0, 0]


def test_strip_and_case_are_choices(rollout_of):
    rollout = rollout_of(["8", " 8\n", "x"], ["8", "8", "X"])
    assert ExactAnswer(strip=False).values(rollout) == [1, 0, 0]
    assert ExactAnswer(ignore_case=True).values(rollout) == [1, 1, 1]


def test_a_prompt_without_an_answer_is_not_rewarded_for_silence(rollout_of):
    assert ExactAnswer().values(rollout_of(["", "8"], ["", "8"])) == [None, 1]
