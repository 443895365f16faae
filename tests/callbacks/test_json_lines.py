"""Rows as JSON lines."""

import json

from lit_rl.callbacks.json_lines import append_json_lines


def test_every_row_is_one_ascii_line_and_comes_back_equal(tmp_path):
    rows = [{"text": "a\nb\u2028\x1b[2J \ud800 数"}, {"values": [1, 2.5, True, None]}]
    path = tmp_path / "new" / "rows.jsonl"
    append_json_lines(path, rows[:1])
    append_json_lines(path, rows[1:])
    content = path.read_bytes()
    assert content.count(b"\n") == 2
    assert content.isascii()
    assert b"\x1b" not in content
    assert [json.loads(line) for line in content.splitlines()] == rows


def test_numbers_that_json_lacks_become_null(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_json_lines(path, [{"a": float("nan"), "b": {"c": [float("inf"), 1.0]}, "d": (1, 2)}])
    assert json.loads(path.read_text()) == {"a": None, "b": {"c": [None, 1.0]}, "d": [1, 2]}
