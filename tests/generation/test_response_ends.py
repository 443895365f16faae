import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lit_rl.generation.response_ends import ResponseEnds, StopAtEnds, completing_ids, decoded
from lit_rl.models.character_tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("abcdef\n ")
A, B, C, NEWLINE = 3, 4, 5, 9
END = 2


@pytest.fixture(params=[1, 3, 99], ids=["each token", "three at once", "all at once"])
def ends(request):
    """`ends(responses, ...)`: what is recorded of responses that are read some tokens at a time."""

    def read(responses, stop_strings=(), end_ids=(END,), prompt=(A,), tokenizer=TOKENIZER):
        record = ResponseEnds(
            tokenizer,
            end_ids=end_ids,
            stop_strings=stop_strings,
            num_rollouts=len(responses),
            device=torch.device("cpu"),
        )
        response_ids = torch.tensor(responses)
        ids = torch.cat([torch.tensor([prompt] * len(responses)), response_ids], dim=1)
        stop, longest = StopAtEnds(record, len(prompt)), response_ids.shape[1]
        for width in [*range(request.param, longest, request.param), longest]:
            assert torch.equal(stop(ids[:, : len(prompt) + width], None), record.finished)
        return record, record.texts(response_ids)

    return read


def test_a_row_ends_at_its_first_end_token(ends):
    record, texts = ends([[A, B, END, END], [A, B, C, A], [END, END, END, END]])
    assert record.lengths.tolist() == [3, 4, 1]
    assert record.finished.tolist() == [True, False, True]
    assert texts == ("ab", "abca", "")


def test_every_end_id_ends_a_row_and_leaves_the_text(ends):
    record, texts = ends([[A, NEWLINE, B], [A, B, END]], end_ids=(END, NEWLINE))
    assert record.lengths.tolist() == [2, 3]
    assert record.finished.tolist() == [True, True]
    assert texts == ("a", "ab")


def test_a_row_of_full_width_is_finished_by_its_end_token_alone(ends):
    record, _ = ends([[A, B, END], [A, B, C]])
    assert record.lengths.tolist() == [3, 3]
    assert record.finished.tolist() == [True, False]


def test_the_token_that_completes_a_stop_string_is_the_last(ends):
    record, texts = ends([[A, B, C, A], [B, A, B, B]], stop_strings=("bc", "bb"))
    assert record.lengths.tolist() == [3, 4]
    assert record.finished.tolist() == [True, True]
    assert texts == ("a", "ba")


def test_a_text_is_cut_before_the_first_of_several_stop_strings(ends):
    # "bc" and "c" are complete at the same token.
    for stop_strings in (("bc", "c"), ("c", "bc")):
        assert ends([[A, B, C]], stop_strings=stop_strings)[1] == ("a",)


def test_a_stop_string_does_not_begin_in_the_prompt(ends):
    record, texts = ends([[C, A, B, C]], stop_strings=("bc",), prompt=(A, B))
    assert record.lengths.tolist() == [4]
    assert texts == ("ca",)


def test_without_end_ids_and_stop_strings_no_row_ends(ends):
    record, texts = ends([[A, END, B]], end_ids=())
    assert not record.finished.any()
    assert texts == ("ab",)  # a special token that did not end the response is not shown


def test_tokens_after_the_end_are_not_text(ends):
    _, texts = ends([[A, END, B, C]])
    assert texts == ("a",)


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level tokens as in GPT-2: a character may take several, a token several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary["Ċx"] = len(vocabulary)  # a newline and the letter x
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "x")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_stop_string_may_end_within_a_token(ends, byte_tokenizer):
    ids = byte_tokenizer("13\nx+").input_ids
    assert len(ids) == 4
    record, texts = ends([ids], ("\n",), end_ids=(), prompt=(ids[0],), tokenizer=byte_tokenizer)
    assert record.lengths.tolist() == [3]
    assert texts == ("13",)


def test_a_stop_string_of_characters_of_several_tokens(ends, byte_tokenizer):
    ids = byte_tokenizer("zé→zé→").input_ids
    assert len(ids) == 12  # z takes one byte, é two, the arrow three
    record, texts = ends([ids], ("→z",), end_ids=(), prompt=(ids[0],), tokenizer=byte_tokenizer)
    assert record.lengths.tolist() == [7]
    assert texts == ("zé",)


def test_texts_are_not_cleaned_up(ends):
    tokenizer = character_tokenizer("ab. ")
    tokenizer.clean_up_tokenization_spaces = True  # turns " ." into "."
    ids = tokenizer("a . b", add_special_tokens=False).input_ids
    record, texts = ends([ids], (" .",), tokenizer=tokenizer)
    assert record.lengths.tolist() == [3]
    assert texts == ("a",)
    assert ends([ids], tokenizer=tokenizer)[1] == ("a . b",)


def test_tokens_that_show_the_last_letter_of_a_stop_string_may_complete_it():
    assert completing_ids(TOKENIZER, ("b\n", "ac")) == (C, NEWLINE)
    assert completing_ids(TOKENIZER, ()) == ()
    # The text of a token alone may lack a space at its end.
    assert completing_ids(TOKENIZER, ("a ",)) == tuple(range(len(TOKENIZER)))


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with a way of its own to decode."""

    def _decode(self, *arguments, **settings):
        return super()._decode(*arguments, **settings).upper()


@pytest.mark.parametrize("kind", [None, Shouting])
def test_texts_are_those_of_batch_decode(kind):
    """Byte-level pieces, half a letter, special tokens and empty rows included."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<end>"])
    backend.train_from_iterator(["one , two . é 漢字"], trainer)
    tokenizer = (kind or PreTrainedTokenizerFast)(tokenizer_object=backend, eos_token="<end>")
    whole = tokenizer("one , two . é 漢字 <end>")["input_ids"]
    rows = [whole, whole[:-3], [], whole[:1], [tokenizer.eos_token_id]]
    for skips in (True, False):
        assert decoded(tokenizer, rows, skip_special_tokens=skips) == tokenizer.batch_decode(
            rows, skip_special_tokens=skips, clean_up_tokenization_spaces=False
        )
    shown = "ONE , TWO . É 漢字 " if kind else "one , two . é 漢字 "
    assert decoded(tokenizer, rows, skip_special_tokens=True)[0] == shown
