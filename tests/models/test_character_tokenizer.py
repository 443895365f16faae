import pickle

import pytest
from transformers import AutoTokenizer

from lit_rl.models.character_tokenizer import character_tokenizer


def test_one_begin_token_stands_before_the_characters():
    # Ids 0, 1, 2 are pad, begin and end; "0" is 3, so "4" is 7, "8" is 11, "2" is 5, ">" is 13.
    assert character_tokenizer("0123456789>")("482>").input_ids == [1, 7, 11, 5, 13]


def test_text_comes_back_without_spaces_between_characters():
    tokenizer = character_tokenizer("ab é\n")
    text = "a b\n é a"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["4a2", ["42", "4a2"]])
def test_a_character_outside_the_alphabet_is_named(text):
    with pytest.raises(ValueError, match=r"\['a'\] of the text '4a2'.*'0123456789>'"):
        character_tokenizer("0123456789>")(text)


def test_special_tokens_may_be_written_in_the_text():
    ids = character_tokenizer("0123456789>")("<bos>4<eos>", add_special_tokens=False).input_ids
    assert ids == [1, 7, 2]


@pytest.mark.parametrize("alphabet", ["", "0120"])
def test_an_empty_or_repeating_alphabet_is_refused(alphabet):
    with pytest.raises(ValueError, match="alphabet"):
        character_tokenizer(alphabet)


def test_a_saved_tokenizer_loads_as_one_of_transformers(tmp_path):
    tokenizer = character_tokenizer("0123456789>")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("482>").input_ids == [1, 7, 11, 5, 13]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_a_pickled_tokenizer_still_refuses():
    tokenizer = pickle.loads(pickle.dumps(character_tokenizer("0123456789>")))
    with pytest.raises(ValueError, match="alphabet"):
        tokenizer("x")
