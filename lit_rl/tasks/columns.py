"""From columns of files that people made to the data set of a task."""

import difflib
import random
from typing import Any

import pyarrow as pa
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_warn


def task_data_set(
    columns: dict[str, list[Any]],
    *,
    prompt_column: str,
    answer_column: str | None,
    source: str,
    rows: list[str],
) -> Dataset:
    """Return the data set of a task; the named columns become `prompt` and `answer`.

    Args:
        columns: the values by name of column, all equally many.
        prompt_column: texts, or lists of chat messages.
        answer_column: texts or whole numbers, which become texts. None: the answers are empty.
        source: what errors call the whole.
        rows: what errors call each row.

    Raises:
        ValueError: for no rows, a column that is not there, one that would be hidden, and a value
            that is not of the right type.
    """
    if not rows:
        raise ValueError(f"{source} has no rows")
    texts = _column(columns, prompt_column, source)
    for row, prompt in zip(rows, texts, strict=True):
        _check_prompt(prompt, f"{source}, {row}")
    answers = [""] * len(rows)
    if answer_column is not None:
        values = _column(columns, answer_column, source)
        pairs = zip(rows, values, strict=True)
        answers = [_answer(value, f"{source}, {row}") for row, value in pairs]
    others = {
        name: column
        for name, column in columns.items()
        if name not in (prompt_column, answer_column)
    }
    if hidden := sorted(others.keys() & {"prompt", "answer"}):
        raise ValueError(
            f"{source}: the column {hidden[0]!r} would be hidden, for prompt_column is "
            f"{prompt_column!r} and answer_column {answer_column!r}; rename or remove it"
        )
    return Dataset(_table({"prompt": texts, "answer": answers, **others}, source))


def _column(columns: dict[str, list[Any]], name: str, source: str) -> list[Any]:
    if name not in columns:
        near = difflib.get_close_matches(name, columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{source} has no column {name!r}, it has {sorted(columns)}{hint}")
    return columns[name]


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt and all(_is_message(entry) for entry in prompt):
        return
    raise ValueError(
        f"{where}: the prompt {_shown(prompt)} is neither text nor a list of chat messages such as "
        '[{"role": "user", "content": "2+3="}]'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _answer(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(
        f"{where}: the answer {_shown(value)} is of type {type(value).__name__}; it must be text "
        'or a whole number, such as "0.5" or 5'
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _table(columns: dict[str, list[Any]], source: str) -> pa.Table:
    arrays = {}
    for name, column in columns.items():
        try:
            arrays[name] = pa.array(column)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
            raise ValueError(
                f"{source}: the values of the column {name!r} do not make a column: {error}; "
                "they must be of one type, such as text"
            ) from error
    return pa.table(arrays)


def split_by_prompt(data_set: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Return the rows to train on and the held-out rows; equal prompts stay on one side.

    Args:
        data_set: the rows of both.
        fraction: share of the different prompts that is held out, rounded to whole prompts.
        seed: seed of the choice.

    Raises:
        ValueError: if one side would be empty.
    """
    keys = [repr(prompt) for prompt in data_set["prompt"]]
    prompts = list(dict.fromkeys(keys))
    num_held_out = round(len(prompts) * fraction)
    if not 0 < num_held_out < len(prompts):
        raise ValueError(
            f"held_out_fraction {fraction} of {len(prompts)} different prompts leaves one side "
            "empty; 0.1 of 100 prompts holds out 10"
        )
    held_out = set(random.Random(seed).sample(prompts, num_held_out))
    sides: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        sides[key in held_out].append(row)
    return data_set.select(sides[0]), data_set.select(sides[1])


def warn_of_overlap(train: Dataset, held_out: Dataset) -> None:
    """Warn of held-out prompts that are trained on."""
    seen = {repr(prompt) for prompt in train["prompt"]}
    shared = sum(repr(prompt) in seen for prompt in held_out["prompt"])
    if shared:
        rank_zero_warn(
            f"{shared} of {len(held_out)} held-out prompts stand among those to train on: "
            "the held-out accuracy is not one of unseen prompts"
        )


def check_held_out(name: str, value: str | None, fraction: float | None) -> None:
    """Check that there are not two ways to the held-out prompts.

    Raises:
        ValueError: if there are.
    """
    if value is not None and fraction is not None:
        raise ValueError(
            f"{name} is {value!r} and held_out_fraction is {fraction}: leave out one of the two"
        )
