"""Rows as JSON lines."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_rl.callbacks.run_folder import naming_file


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append each row as one line of JSON, making the folder where it is missing.

    The file is plain ASCII, so that nothing in a text can break a line or a terminal. JSON knows
    no NaN and no infinity: they become null.

    Args:
        path: the file.
        rows: dictionaries of text, numbers, booleans, None, and lists and dictionaries of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(path), path.open("a", encoding="ascii") as file:
        file.writelines(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
