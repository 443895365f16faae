import pytest
from datasets import Dataset

from lit_rl.tasks import ChatPrompt, PlainPrompt
from lit_rl.tasks.prompt_rows import PromptRow, collate, prompt_rows, within_limit

BOS = 1


def rows_of(prompts, tokenizer, prompt_format=PlainPrompt(), **columns):
    columns = {"prompt": prompts, "answer": ["a"] * len(prompts), **columns}
    return prompt_rows(Dataset.from_dict(columns), prompt_format, tokenizer, "training")


def test_a_plain_text_gets_the_begin_token_of_the_tokenizer(tokenizer):
    (row,) = rows_of(["12>"], tokenizer, level=[3])
    # Ids 0 to 2 are pad, begin and end; "0" has id 3, and ">" stands 12 places behind it.
    assert row == PromptRow([BOS, 4, 5, 15], "12>", "a", {"level": 3}, 0)


def test_a_plain_text_that_begins_with_the_begin_token_gets_no_second(tokenizer):
    (row,) = rows_of(["<bos>12>"], tokenizer)
    assert row.ids == [BOS, 4, 5, 15]


def test_a_chat_template_that_renders_the_begin_token_gets_no_second(chat_tokenizer):
    (row,) = rows_of(["12>"], chat_tokenizer, ChatPrompt())
    assert (
        row.ids
        == chat_tokenizer.apply_chat_template(
            [{"role": "user", "content": "12>"}], add_generation_prompt=True
        )["input_ids"]
    )
    assert row.ids.count(BOS) == 1


def test_a_chat_template_without_a_begin_token_gets_none(chat_tokenizer):
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.removeprefix("{{ bos_token }}")
    (row,) = rows_of(["12>"], chat_tokenizer, ChatPrompt())
    assert BOS not in row.ids


def test_bad_data_sets_are_refused(tokenizer):
    with pytest.raises(ValueError, match="there are no training prompts"):
        rows_of([], tokenizer)
    with pytest.raises(ValueError, match=r"no column 'answer', only \['prompt', 'x'\]"):
        prompt_rows(Dataset.from_dict({"prompt": ["a"], "x": [1]}), PlainPrompt(), tokenizer, "the")
    with pytest.raises(ValueError, match=r"training prompt 0 \('1', answer 7\) must have"):
        rows_of(["1"], tokenizer, answer=[7])


def test_a_prompt_without_a_token_is_refused(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"training prompt 1 \('', answer 'a'\) must have"):
        rows_of(["1", ""], chat_tokenizer, ChatPrompt())


@pytest.fixture
def lengths_3_and_5(tokenizer):
    return rows_of(["12", "1234"], tokenizer)


def test_prompts_within_the_limit_stay(lengths_3_and_5, tokenizer):
    assert within_limit(lengths_3_and_5, 5, "refuse", tokenizer, "training") == lengths_3_and_5


@pytest.mark.parametrize(
    ("overlong", "ids", "text"),
    [
        # "1234" is [begin, 4, 5, 6, 7]; the cut on the left keeps the begin token.
        ("cut_left", [BOS, 6, 7], "<bos>34"),
        ("cut_right", [BOS, 4, 5], "<bos>12"),
    ],
)
def test_longer_prompts_are_cut_on_the_chosen_side(lengths_3_and_5, tokenizer, overlong, ids, text):
    with pytest.warns(UserWarning, match=r"1 of 2 training prompts are longer than .* 3; .* 1, of"):
        kept = within_limit(lengths_3_and_5, 3, overlong, tokenizer, "training")
    assert kept[0] == lengths_3_and_5[0]
    assert (kept[1].ids, kept[1].text, kept[1].row_id) == (ids, text, 1)


def test_a_cut_to_one_token_and_a_cut_without_begin_token(lengths_3_and_5, tokenizer):
    with pytest.warns(UserWarning, match="2 of 2"):
        kept = within_limit(lengths_3_and_5, 1, "cut_left", tokenizer, "training")
    assert [row.ids for row in kept] == [[BOS], [BOS]]
    bare = [PromptRow([4, 5, 6], "123", "a", {}, 0)]
    with pytest.warns(UserWarning, match="1 of 1"):
        assert within_limit(bare, 2, "cut_left", tokenizer, "training")[0].ids == [5, 6]


def test_longer_prompts_are_dropped_and_keep_their_numbers(lengths_3_and_5, tokenizer):
    with pytest.warns(UserWarning, match=r"1 of 2 .* overlong is drop"):
        kept = within_limit(lengths_3_and_5[::-1], 3, "drop", tokenizer, "training")
    assert [row.row_id for row in kept] == [0]


def test_longer_prompts_are_refused_with_the_numbers(lengths_3_and_5, tokenizer):
    with pytest.raises(ValueError, match=r"1 of 2 held-out .* 4; the first is prompt 1, of 5 tok"):
        within_limit(lengths_3_and_5, 4, "refuse", tokenizer, "held-out")


@pytest.mark.filterwarnings("ignore:2 of 2")
def test_no_prompt_left_is_an_error(lengths_3_and_5, tokenizer):
    with pytest.raises(ValueError, match=r"2 of 2 .*: no prompt is left"):
        within_limit(lengths_3_and_5, 2, "drop", tokenizer, "training")


def test_a_batch_is_left_padded_and_its_mask_comes_from_lengths():
    # The pad token is the end token, 2, which also stands within the prompts.
    rows = [
        PromptRow([2, 9, 2, 4], "long", "a", {"level": 1}, 5),
        PromptRow([2], "short", "b", {"level": 2}, 3),
    ]
    batch = collate(rows, pad_id=2)
    assert batch.ids.tolist() == [[2, 9, 2, 4], [2, 2, 2, 2]]
    assert batch.mask.tolist() == [[True] * 4, [False, False, False, True]]
    assert (batch.texts, batch.answers) == (("long", "short"), ("a", "b"))
    assert (batch.columns, batch.row_ids) == ({"level": (1, 2)}, (5, 3))
