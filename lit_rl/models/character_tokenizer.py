"""A tokenizer with one token per character, for models that start from random weights."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


class CharacterTokenizer(PreTrainedTokenizerFast):
    """One token per character; any other character is refused, never dropped or replaced.

    Ids 0, 1 and 2 are pad, begin and end; the characters follow in the order of the alphabet. A
    begin token stands before each text.
    """

    # With fewer arguments than the method has, which the others reach by their names.
    def _encode_plus(  # type: ignore[override]
        self, text: Any, text_pair: Any = None, **kwargs: Any
    ) -> Any:
        self._refuse_unknown(text)
        self._refuse_unknown(text_pair)
        return super()._encode_plus(text, text_pair, **kwargs)

    def _refuse_unknown(self, text: Any) -> None:
        if isinstance(text, list | tuple):
            for entry in text:
                self._refuse_unknown(entry)
            return
        characters = text or ""
        for special in (PAD, BOS, EOS):
            characters = characters.replace(special, "")
        unknown = sorted(set(characters) - set(self.get_vocab()))
        if unknown:
            alphabet = "".join(t for t in self.get_vocab() if len(t) == 1)
            raise ValueError(
                f"characters {unknown} of the text {text!r} are not in the model's alphabet "
                f"{''.join(sorted(alphabet))!r}"
            )


# The class that a saved folder names: it then loads where lit_rl is not installed.
CharacterTokenizer.__name__ = "TokenizersBackend"


def character_tokenizer(alphabet: str) -> CharacterTokenizer:
    """Return the tokenizer of `alphabet`.

    Args:
        alphabet: the characters that texts may hold, each once.

    Returns:
        A tokenizer with `len(alphabet) + 3` tokens.

    Raises:
        ValueError: if the alphabet is empty or holds a character twice.

    Example:
        >>> tokenizer = character_tokenizer("0123456789>")
        >>> tokenizer("482>").input_ids
        [1, 7, 11, 5, 13]
    """
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        raise ValueError(
            f"alphabet {alphabet!r} is empty or repeats {repeated}; an example is '0123456789>'"
        )
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, vocabulary[BOS])],
    )
    return CharacterTokenizer(tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS)
