"""Where responses end, recorded while they are generated and never guessed from token values."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

# Tokenizers may drop a space in front of the first token that they decode: a few tokens more than
# a stop string can span keep that out of the text in which it is looked for.
_MARGIN = 4


class ResponseEnds(StoppingCriteria):
    """Ends a row at an end token or at the token that completes a stop string.

    Only response tokens are looked at: a stop string never begins in the prompt.

    Args:
        tokenizer: decodes the tokens in which stop strings are looked for.
        end_ids: ids of the end tokens.
        stop_strings: texts that end a response.
        prompt_tokens: width of the prompts.
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
        prompt_tokens: int,
        num_rollouts: int,
        device: torch.device,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = torch.tensor(end_ids, dtype=torch.long, device=device)
        self.stop_strings = tuple(stop_strings)
        # Every token that shows in a text holds at least one byte of it.
        self.span = max((len(s.encode()) for s in stop_strings), default=0) + _MARGIN
        self.prompt_tokens = prompt_tokens
        self.lengths = torch.zeros(num_rollouts, dtype=torch.long, device=device)
        self.at_end_token = torch.zeros(num_rollouts, dtype=torch.bool, device=device)
        self.at_stop_string = torch.zeros(num_rollouts, dtype=torch.bool, device=device)

    @property
    def finished(self) -> Bool[Tensor, " rollouts"]:
        """True where a response has ended."""
        return self.at_end_token | self.at_stop_string

    def __call__(
        self, input_ids: Int[Tensor, "rollouts positions"], scores: object, **kwargs: object
    ) -> Bool[Tensor, " rollouts"]:
        """Record the newest token of each running row and return the rows that have ended."""
        response_ids = input_ids[:, self.prompt_tokens :]
        running = ~self.finished
        self.lengths = self.lengths + running
        ended = running & torch.isin(response_ids[:, -1], self.end_ids)
        self.at_end_token = self.at_end_token | ended
        if self.stop_strings:
            self.at_stop_string = self.at_stop_string | self._completed(
                response_ids[:, -self.span :], running & ~ended
            )
        return self.finished

    def _completed(
        self, tail_ids: Int[Tensor, "rollouts span"], running: Bool[Tensor, " rollouts"]
    ) -> Bool[Tensor, " rollouts"]:
        rows = running.nonzero().squeeze(1)
        tails = self.tokenizer.batch_decode(
            tail_ids[rows].tolist(), clean_up_tokenization_spaces=False
        )
        found = [any(stop in tail for stop in self.stop_strings) for tail in tails]
        completed = torch.zeros_like(running)
        completed[rows] = torch.tensor(found, dtype=torch.bool, device=running.device)
        return completed

    def texts(self, response_ids: Int[Tensor, "rollouts tokens"]) -> tuple[str, ...]:
        """Return the texts, without special tokens and end token, cut before the stop string."""
        own = (self.lengths - self.at_end_token.long()).tolist()
        texts = self.tokenizer.batch_decode(
            [ids[:length] for ids, length in zip(response_ids.tolist(), own, strict=True)],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        stopped = self.at_stop_string.tolist()
        return tuple(
            self._cut(text) if cut else text for text, cut in zip(texts, stopped, strict=True)
        )

    def _cut(self, text: str) -> str:
        starts = [text.find(stop) for stop in self.stop_strings if stop in text]
        return text[: min(starts, default=len(text))]
