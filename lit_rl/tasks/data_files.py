"""Prompts in files: JSON lines or Parquet."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from lit_rl.tasks.column_task import ColumnTask
from lit_rl.tasks.columns import check_held_out


@dataclass(frozen=True, kw_only=True)
class DataFiles(ColumnTask):
    """Prompts and answers in `.jsonl` files (one JSON object a line, UTF-8) or `.parquet` files.

    Args:
        train_file: the prompts to train on.
        held_out_file: the prompts to evaluate on.

    Raises:
        ValueError: if both `held_out_file` and `held_out_fraction` are given, and where prompts are
            read for a file that is not there.
    """

    train_file: str
    held_out_file: str | None = None

    def __post_init__(self) -> None:
        check_held_out("held_out_file", self.held_out_file, self.held_out_fraction)

    @property
    def sources(self) -> tuple[str, str | None]:
        """The two files."""
        return self.train_file, self.held_out_file

    def read(self, source: str) -> tuple[dict[str, list[Any]], list[str], str]:
        """Return the columns of a file, what to call its rows, and its path."""
        readers = {".jsonl": json_lines, ".parquet": parquet}
        suffix = Path(source).suffix
        if suffix not in readers:
            raise ValueError(
                f"{source} must end in one of {sorted(readers)}, such as prompts.jsonl"
            )
        if not Path(source).is_file():
            key = "train_file" if source == self.train_file else "held_out_file"
            raise ValueError(
                f"{key}: there is no file {source}; give a path such as my/prompts{suffix}"
            )
        return *readers[suffix](source), source


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
