import ast

import numpy as np
import pytest

pytest.importorskip("reasoning_gym")
from lit_rl.tasks import ReasoningGym
from lit_rl.tasks.reasoning_gym import plain

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_questions_come_with_answer_and_entry():
    row = ReasoningGym("chain_sum", 2, 2, config=SUMS).train()[0]
    entry = ast.literal_eval(row["entry"])
    assert row["prompt"] == entry["question"]
    assert row["answer"] == entry["answer"]
    # The question ends in "a + b." or "a - b.", whose value is the answer.
    assert eval(row["prompt"].split("=")[0].split(":")[-1]) == int(row["answer"])
    assert ast.literal_eval(row["data_set"]) == {"name": "chain_sum", "config": SUMS}


def test_no_held_out_question_is_one_to_train_on():
    # 180 different sums: 100 draws hold many of them, and 30 others are to be found.
    task = ReasoningGym("chain_sum", 100, 30, config=SUMS)
    train, held_out = task.train()["prompt"], task.held_out()["prompt"]
    assert (len(train), len(held_out), len(set(held_out))) == (100, 30, 30)
    assert not set(train) & set(held_out)


def test_held_out_questions_that_do_not_exist_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"draws from coin_flip gave 0 held-out .* 20000 to train"):
        held_out_of_few_questions()


def held_out_of_few_questions():
    return ReasoningGym("coin_flip", 20000, 1, config={"min_trials": 3, "max_trials": 3}).held_out()


def test_the_seed_decides_the_questions_and_neighbours_share_none():
    questions = [ReasoningGym("chain_sum", 50, 1, seed=s).train()["prompt"] for s in (0, 0, 1)]
    assert questions[0] == questions[1]
    assert not set(questions[0]) & set(questions[2])


def test_generating_leaves_the_global_random_state_alone():
    # pool_matrix seeds numpy's global generator.
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    ReasoningGym("pool_matrix", 2, 2).held_out()
    assert np.random.rand() == expected


def test_a_data_set_without_a_single_answer_has_empty_answers():
    assert ReasoningGym("graph_color", 1, 1).train()["answer"][0] == ""


def test_unknown_names_and_settings_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"no data set 'chain_sums'; near it are chain_sum"):
        ReasoningGym("chain_sums", 1, 1)
    with pytest.raises(ValueError, match=r"chain_sum has no settings \['min_term'\].*min_terms"):
        ReasoningGym("chain_sum", 1, 1, config={"min_term": 2})
    with pytest.raises(ValueError, match="num_train 0"):
        ReasoningGym("chain_sum", 0, 1)


def test_values_without_a_literal_are_refused():
    with pytest.raises(ValueError, match="is a object, which is no literal"):
        plain({"a": [object()]})
