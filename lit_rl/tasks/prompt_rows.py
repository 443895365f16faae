"""From the data set of a task to rows of token ids, and from rows to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lit_rl.tasks.prompt_format import PromptFormat
from lit_rl.types import Prompts

Overlong = Literal["refuse", "drop", "cut_left", "cut_right"]


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to be batched.

    Attributes:
        ids: its tokens.
        text: as the model reads it.
        answer: the reference answer.
        columns: the other columns of the data set.
        row_id: number of the row in the data set.
    """

    ids: list[int]
    text: str
    answer: str
    columns: dict[str, Any]
    row_id: int


def prompt_rows(
    data_set: Dataset, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase, kind: str
) -> list[PromptRow]:
    """Format and tokenize each prompt of a data set. A row begins with at most one begin token.

    Args:
        data_set: columns `prompt`, `answer` and any others.
        prompt_format: how a prompt becomes text.
        tokenizer: the model's.
        kind: what errors call these prompts.

    Raises:
        ValueError: for an empty data set, a column that is missing, an answer that is no text, and
            a prompt without a token.
    """
    if missing := {"prompt", "answer"} - set(data_set.column_names):
        raise ValueError(
            f"the {kind} prompts have no column {sorted(missing)[0]!r}, "
            f"only {sorted(data_set.column_names)}"
        )
    if not len(data_set):
        raise ValueError(f"there are no {kind} prompts: the data set is empty")
    entries: list[dict[str, Any]] = list(data_set)
    texts = [prompt_format.text(entry.pop("prompt"), tokenizer) for entry in entries]
    ids = tokenizer(texts, add_special_tokens=prompt_format.adds_special_tokens)["input_ids"]
    rows = []
    for number, (text, tokens, entry) in enumerate(zip(texts, ids, entries, strict=True)):
        answer = entry.pop("answer")
        if not tokens or not isinstance(answer, str):
            raise ValueError(
                f"{kind} prompt {number} ({text!r}, answer {answer!r}) must have at least one "
                "token, and text as its answer"
            )
        tokens = _with_one_begin_token(tokens, tokenizer)
        rows.append(PromptRow(tokens, text, answer, columns=entry, row_id=number))
    return rows


def _with_one_begin_token(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    begin = tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def within_limit(
    rows: list[PromptRow],
    max_prompt_tokens: int,
    overlong: Overlong,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
) -> list[PromptRow]:
    """Return the rows that have at most `max_prompt_tokens` tokens, and say how many had more.

    Args:
        rows: the prompts.
        max_prompt_tokens: the longest allowed prompt, in tokens.
        overlong: what happens to a longer one. `refuse`: it is an error; `drop`: it is left out;
            `cut_left`, `cut_right`: tokens are removed on that side until it fits. A begin token
            stays; a cut on the left removes a system prompt first.
        tokenizer: gives the text of a cut prompt.
        kind: what the message calls these prompts.

    Raises:
        ValueError: for a longer prompt if they are refused, and if no prompt is left.
    """
    too_long = [row for row in rows if len(row.ids) > max_prompt_tokens]
    if not too_long:
        longest = max(len(row.ids) for row in rows)
        rank_zero_info(f"{len(rows)} {kind} prompts, the longest of {longest} tokens")
        return rows
    found = (
        f"{len(too_long)} of {len(rows)} {kind} prompts are longer than max_prompt_tokens "
        f"{max_prompt_tokens}; the first is prompt {too_long[0].row_id}, of "
        f"{len(too_long[0].ids)} tokens"
    )
    if overlong == "refuse":
        raise ValueError(f"{found}. Allow more tokens, or set overlong to drop or cut_left")
    rank_zero_warn(f"{found}. overlong is {overlong}")
    if overlong == "drop":
        rows = [row for row in rows if len(row.ids) <= max_prompt_tokens]
        if not rows:
            raise ValueError(f"{found}: no prompt is left. Allow more tokens, or cut them")
        return rows
    return [_cut(row, max_prompt_tokens, overlong, tokenizer) for row in rows]


def _cut(
    row: PromptRow, limit: int, overlong: Overlong, tokenizer: PreTrainedTokenizerBase
) -> PromptRow:
    if len(row.ids) <= limit:
        return row
    ids = row.ids[:limit]
    if overlong == "cut_left":
        begin = row.ids[:1] if row.ids[0] == tokenizer.bos_token_id else []
        ids = begin + row.ids[len(row.ids) - limit + len(begin) :]
    text = tokenizer.decode(ids)
    assert isinstance(text, str)
    return replace(row, ids=ids, text=text)


def collate(rows: Sequence[PromptRow], pad_id: int) -> Prompts:
    """Return a batch, left-padded to its longest prompt; the mask comes from the lengths alone."""
    width = max(len(row.ids) for row in rows)
    return Prompts(
        ids=torch.tensor([[pad_id] * (width - len(row.ids)) + row.ids for row in rows]),
        mask=torch.tensor(
            [[column >= width - len(row.ids) for column in range(width)] for row in rows]
        ),
        texts=tuple(row.text for row in rows),
        answers=tuple(row.answer for row in rows),
        columns={name: tuple(row.columns[name] for row in rows) for name in rows[0].columns},
        row_ids=tuple(row.row_id for row in rows),
    )
