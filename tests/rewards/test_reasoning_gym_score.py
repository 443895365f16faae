import pytest

pytest.importorskip("reasoning_gym")
from lit_rl.rewards import ReasoningGymScore
from lit_rl.tasks import ReasoningGym


@pytest.fixture
def of_data_set(rollout_of):
    """The rollout in which a response answers the first question of a data set."""

    def build(name, responses, config=None):
        rows = ReasoningGym(name, 1, 1, config=config or {}).train()
        responses = [rows["answer"][0] if text is None else text for text in responses]
        columns = {column: (rows[column][0],) * len(responses) for column in ("entry", "data_set")}
        return rollout_of(responses, columns=columns)

    return build


def test_the_answer_of_the_data_set_has_value_1_with_white_space_too(of_data_set):
    rollout = of_data_set("chain_sum", [None, "nonsense"])
    assert ReasoningGymScore().values(rollout) == [1.0, 0.0]
    padded = of_data_set("chain_sum", [f" {rollout.responses[0]}\n"])
    assert ReasoningGymScore().values(padded) == [1.0]


def test_an_entry_with_tuples_is_scored_right(of_data_set):
    # rearc keeps its grids in tuples, and gives a right answer 0.05 where they became lists.
    assert ReasoningGymScore().values(of_data_set("rearc", [None])) == [1.0]


def test_scores_of_wrong_texts_are_those_of_reasoning_gym(of_data_set):
    # The scorer of game_of_life_halting gives 1 to anything but an empty text, puzzle24 0.01.
    halting = of_data_set("game_of_life_halting", ["", "nonsense"])
    assert ReasoningGymScore().values(halting) == [0.0, 1.0]
    assert ReasoningGymScore().values(of_data_set("puzzle24", ["nonsense"])) == [0.01]


def test_the_scorer_has_the_settings_of_the_questions(of_data_set):
    # 8+8+4+4 makes 24, but puzzle24 refuses numbers above its max_value, 10 by default.
    assert ReasoningGymScore().values(of_data_set("puzzle24", ["8+8+4+4"])) == [1.0]
    small = of_data_set("puzzle24", ["8+8+4+4", "6+6+6+6"], {"max_value": 6})
    assert ReasoningGymScore().values(small) == [0.01, 1.0]


def test_a_response_on_which_the_scorer_raises_is_left_out_and_counted(of_data_set):
    rollout = of_data_set("prime_factorization", ["two times three", None, "x"])
    message = r"failed on 2 of 3 responses.*row 0, 'two times three': its scorer raised ValueError"
    with pytest.warns(UserWarning, match=message):
        scored = ReasoningGymScore()(rollout)
    assert scored.missing.tolist() == scored.failed.tolist() == [True, False, True]
    assert scored.rewards[1] == 1.0


def test_it_ends_the_run_where_that_is_asked_for(of_data_set):
    rollout = of_data_set("prime_factorization", [None, "two times three"])
    with pytest.raises(RuntimeError, match=r"1 of 2 responses; the first is row 1, 'two times"):
        ReasoningGymScore(on_error="raise")(rollout)


@pytest.mark.usefixtures("without_type_checks")
def test_another_policy_is_refused():
    with pytest.raises(ValueError, match="on_error is 'zero', must be 'raise' or 'exclude'"):
        ReasoningGymScore(on_error="zero")


def test_other_prompts_are_refused(rollout_of):
    with pytest.raises(RuntimeError, match=r"no column 'data_set'.*ReasoningGym makes it"):
        ReasoningGymScore()(rollout_of(["1"]))
