"""Prompts in files: JSON lines or Parquet."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset

from lit_rl.tasks.base import Task
from lit_rl.tasks.columns import check_held_out, split_by_prompt, task_data_set, warn_of_overlap


@dataclass(frozen=True, kw_only=True)
class DataFiles(Task):
    """Prompts and answers in `.jsonl` files (one JSON object a line, UTF-8) or `.parquet` files.

    Args:
        train_file: the prompts to train on.
        held_out_file: the prompts to evaluate on.
        held_out_fraction: instead of `held_out_file`: share of the prompts of `train_file` that is
            held out. Rows with equal prompts stay on one side.
        prompt_column: name of the column of prompts: texts, or lists of chat messages.
        answer_column: name of the column of reference answers: texts or whole numbers. None: there
            are no answers.
        seed: seed of the choice of held-out prompts, independent of the seed of a run.

    Raises:
        ValueError: unless exactly one of `held_out_file` and `held_out_fraction` is given.
    """

    train_file: str
    held_out_file: str | None = None
    held_out_fraction: float | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    seed: int = 0

    def __post_init__(self) -> None:
        check_held_out("held_out_file", self.held_out_file, self.held_out_fraction)

    def train(self) -> Dataset:
        """Return the prompts to train on."""
        return self._sides[0]

    def held_out(self) -> Dataset:
        """Return the prompts to evaluate on."""
        return self._sides[1]

    @cached_property
    def _sides(self) -> tuple[Dataset, Dataset]:
        train = self._read(self.train_file)
        if self.held_out_fraction is not None:
            return split_by_prompt(train, self.held_out_fraction, self.seed)
        assert self.held_out_file is not None
        held_out = self._read(self.held_out_file)
        warn_of_overlap(train, held_out)
        return train, held_out

    def _read(self, file: str) -> Dataset:
        readers = {".jsonl": json_lines, ".parquet": parquet}
        suffix = Path(file).suffix
        if suffix not in readers:
            raise ValueError(f"{file} must end in one of {sorted(readers)}, such as prompts.jsonl")
        columns, rows = readers[suffix](file)
        return task_data_set(
            columns,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            source=file,
            rows=rows,
        )


def json_lines(file: str) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns of a file of JSON objects, one a line, and what to call its rows.

    Empty lines are passed over; a key that a row lacks is None in it.

    Raises:
        ValueError: naming the first line that is not UTF-8, or not a JSON object.
    """
    objects: dict[str, dict[str, Any]] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                objects[f"line {number}"] = _json_object(line, f"{file}, line {number}")
    names = dict.fromkeys(name for entry in objects.values() for name in entry)
    columns = {name: [entry.get(name) for entry in objects.values()] for name in names}
    return columns, list(objects)


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number too long, brackets too deep
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{where} is a JSON {type(value).__name__}, must be an object such as "
            '{"prompt": "2+3=", "answer": "5"}'
        )
    return value


def parquet(file: str) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns of a Parquet file, and what to call its rows.

    Raises:
        ValueError: if it is not a Parquet file.
    """
    try:
        table = pa.parquet.read_table(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    return table.to_pydict(), [f"row {row}" for row in range(table.num_rows)]
