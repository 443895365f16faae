"""Where responses end, recorded while they are generated and never guessed from token values."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, StoppingCriteria

# Tokenizers may drop a space in front of the first token that they decode: a few tokens more than
# a stop string can span keep that out of the text in which it is looked for.
_MARGIN = 4


class ResponseEnds:
    """Ends a row at an end token or at the token that completes a stop string.

    Only response tokens are looked at: a stop string never begins in the prompt.

    Args:
        tokenizer: decodes the tokens in which stop strings are looked for.
        end_ids: ids of the end tokens.
        stop_strings: texts that end a response.
        num_rollouts: number of rows.
        device: where the rows are.

    Attributes:
        lengths: tokens of each response so far, the one that ended it included.
        at_end_token: True where the last of them is an end token.
        at_stop_string: True where the last of them completes a stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: tuple[int, ...],
        stop_strings: Sequence[str],
        num_rollouts: int,
        device: torch.device,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = torch.tensor(end_ids, dtype=torch.long, device=device)
        self.stop_strings = tuple(stop_strings)
        completing = completing_ids(tokenizer, self.stop_strings)
        self.completing_ids = torch.tensor(completing, dtype=torch.long, device=device)
        # Every token that shows in a text holds at least one byte of it.
        self.span = max((len(s.encode()) for s in stop_strings), default=0) + _MARGIN
        self.lengths = torch.zeros(num_rollouts, dtype=torch.long, device=device)
        self.at_end_token = torch.zeros(num_rollouts, dtype=torch.bool, device=device)
        self.at_stop_string = torch.zeros(num_rollouts, dtype=torch.bool, device=device)
        self._num_read = 0

    @property
    def finished(self) -> Bool[Tensor, " rollouts"]:
        """True where a response has ended."""
        return self.at_end_token | self.at_stop_string

    def read(self, response_ids: Int[Tensor, "rollouts tokens"]) -> Bool[Tensor, " rollouts"]:
        """Read the tokens that are new since the last call, and return the rows that have ended.

        Args:
            response_ids: all tokens so far; what stands behind the end of a row is not read.
        """
        new = response_ids[:, self._num_read :]
        running = ~self.finished
        is_end = torch.isin(new, self.end_ids) & running[:, None]
        ends = is_end | self._completes(response_ids, new, running[:, None] & ~is_end)
        has_end, first = ends.any(dim=1), ends.int().argmax(dim=1)
        added = torch.where(has_end, first + 1, new.shape[1])
        self.lengths = self.lengths + torch.where(running, added, 0)
        by_token = is_end.gather(1, first[:, None])[:, 0]
        self.at_end_token = self.at_end_token | (has_end & by_token)
        self.at_stop_string = self.at_stop_string | (has_end & ~by_token)
        self._num_read = response_ids.shape[1]
        return self.finished

    def _completes(
        self,
        response_ids: Int[Tensor, "rollouts tokens"],
        new: Int[Tensor, "rollouts new"],
        asked: Bool[Tensor, "rollouts new"],
    ) -> Bool[Tensor, "rollouts new"]:
        completes = torch.zeros_like(asked)
        if not self.stop_strings:
            return completes
        places = (torch.isin(new, self.completing_ids) & asked).nonzero().tolist()
        ends = [self._num_read + column + 1 for _, column in places]
        tails = decoded(
            self.tokenizer,
            [
                response_ids[row, max(0, end - self.span) : end].tolist()
                for (row, _), end in zip(places, ends, strict=True)
            ],
        )
        for (row, column), tail in zip(places, tails, strict=True):
            completes[row, column] = any(stop in tail for stop in self.stop_strings)
        return completes

    def texts(self, response_ids: Int[Tensor, "rollouts tokens"]) -> tuple[str, ...]:
        """Return the texts, without special tokens and end token, cut before the stop string."""
        own = (self.lengths - self.at_end_token.long()).tolist()
        texts = decoded(
            self.tokenizer,
            [ids[:length] for ids, length in zip(response_ids.tolist(), own, strict=True)],
            skip_special_tokens=True,
        )
        stopped = self.at_stop_string.tolist()
        return tuple(
            self._cut(text) if cut else text for text, cut in zip(texts, stopped, strict=True)
        )

    def _cut(self, text: str) -> str:
        starts = [text.find(stop) for stop in self.stop_strings if stop in text]
        return text[: min(starts, default=len(text))]


class StopAtEnds(StoppingCriteria):
    """Tells `generate` where responses end.

    Args:
        ends: reads the responses.
        prompt_tokens: width of the prompts.
    """

    def __init__(self, ends: ResponseEnds, prompt_tokens: int) -> None:
        self.ends = ends
        self.prompt_tokens = prompt_tokens

    def __call__(
        self, input_ids: Int[Tensor, "rollouts positions"], scores: object, **kwargs: object
    ) -> Bool[Tensor, " rollouts"]:
        """Return the rows that have ended."""
        return self.ends.read(input_ids[:, self.prompt_tokens :])


def decoded(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the text of each row of ids, spaces untouched.

    `batch_decode` goes from row to row; the tokenizer beneath takes them all at once.
    """
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        backend: Any = tokenizer
        texts: list[str] = backend.backend_tokenizer.decode_batch(
            rows, skip_special_tokens=skip_special_tokens
        )
        return texts
    return tokenizer.batch_decode(
        rows, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


@lru_cache(maxsize=8)
def completing_ids(
    tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the ids of the tokens that may complete a stop string: they show its last letter.

    Args:
        tokenizer: gives the text of each token.
        stop_strings: the texts.
    """
    if not stop_strings:
        return ()
    last = {text[-1] for text in stop_strings}
    texts = decoded(tokenizer, [[number] for number in range(len(tokenizer))])
    if " " in last:  # which the text of a token alone may lack
        return tuple(range(len(texts)))
    if not all(letter.isascii() for letter in last):
        last.add("\ufffd")  # what stands for a part of a letter
    return tuple(number for number, text in enumerate(texts) if not last.isdisjoint(text))
