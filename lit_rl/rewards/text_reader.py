"""From prompts and responses to the token ids that a reward model reads."""

import string
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_rl.rewards.checked_scores import shown

CHAT = "chat"


def check_template(template: str) -> None:
    """Refuse what is neither "chat" nor a text with a place for the response."""
    try:
        # A name with its conversion and format, of which a place here has none.
        places = [place[1:] for place in string.Formatter().parse(template) if place[1] is not None]
        fields = {f"{name}{form}{conversion or ''}" for name, form, conversion in places}
    except ValueError:
        fields = set()
    if template != CHAT and not {"response"} <= fields <= {"prompt", "response"}:
        raise ValueError(
            f"template is {template!r}; it must be 'chat', or a text with the place {{response}} "
            "and no other place but {prompt}, such as '{prompt}{response}' (braces of the text "
            "itself are doubled)"
        )


class TextReader:
    """Writes prompt and response into a template and cuts the beginning of what is too long.

    Args:
        tokenizer: the reward model's.
        template: as in `RewardModel`.
        max_tokens: longest text, in tokens.

    Raises:
        ValueError: for a chat without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, max_tokens: int) -> None:
        if template == CHAT and tokenizer.chat_template is None:
            raise ValueError(
                "template is 'chat', but the tokenizer of the reward model has no chat template; "
                "such as '{prompt}{response}'"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.max_tokens = max_tokens
        self._begin_ids = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
        self._has_warned = False

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; none for a text without a token.

        Args:
            prompts: texts, or for a chat also lists of messages.
            responses: one per prompt.
        """
        texts = [self._text(*pair) for pair in zip(prompts, responses, strict=True)]
        # A chat template writes the special tokens itself.
        special = self.template != CHAT
        encoded: Any = self.tokenizer(texts, add_special_tokens=special, verbose=False)
        rows = [self._with_one_begin_token(row) for row in encoded["input_ids"]]
        self._warn(rows)
        return [self._cut(row) for row in rows]

    def _text(self, prompt: Any, response: str) -> str:
        if self.template == CHAT:
            is_text = isinstance(prompt, str)
            turns = [{"role": "user", "content": prompt}] if is_text else list(prompt)
            turns.append({"role": "assistant", "content": response})
            text: Any = self.tokenizer.apply_chat_template(turns, tokenize=False)
            return str(text)
        if not isinstance(prompt, str):
            raise ValueError(
                f"the prompt {shown(prompt)} is no text; with template 'chat' the reward model "
                "reads messages"
            )
        return self.template.format(prompt=prompt, response=response)

    def _with_one_begin_token(self, row: list[int]) -> list[int]:
        # The prompt may bring its own.
        twice = len(row) > 1 and row[0] == row[1] and row[0] in self._begin_ids
        return row[1:] if twice else row

    def _warn(self, rows: list[list[int]]) -> None:
        too_long = [number for number, row in enumerate(rows) if len(row) > self.max_tokens]
        if not too_long or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{len(too_long)} of {len(rows)} texts are longer than the {self.max_tokens} tokens "
            "that the reward model reads, and lose their beginning; the first is row "
            f"{too_long[0]}, of {len(rows[too_long[0]])} tokens. This is said once",
            stacklevel=2,
        )

    def _cut(self, row: list[int]) -> list[int]:
        if len(row) <= self.max_tokens:
            return row
        begin = row[:1] if row[0] in self._begin_ids else []
        return begin + row[len(row) - self.max_tokens + len(begin) :]
