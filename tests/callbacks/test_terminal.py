"""Text that cannot deface a terminal."""

import io

import pytest
from rich.console import Console

from lit_rl.callbacks import terminal
from lit_rl.callbacks.terminal import cell, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("12>3", "12>3"),
        ("größer ≥ 数学", "größer ≥ 数学"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\u200b\ufeff\u2028\u00a0", r"\u200b\ufeff\u2028\xa0"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_what_is_not_visible_is_escaped(text, shown):
    assert visible(text) == shown


def test_long_texts_are_cut_in_the_middle():
    shown = cell("a" * 50 + "b" * 50, limit=11)
    assert shown.plain == "aaaa...bbbb"
    assert cell("short", limit=5).plain == "short"


def test_markup_is_text():
    assert cell("[red]7[/red] [link=x]", limit=99).plain == "[red]7[/red] [link=x]"


def test_characters_that_the_terminal_cannot_encode_are_escaped(monkeypatch):
    ascii_console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(terminal, "console", lambda: ascii_console)
    assert cell("数7", limit=99).plain == r"\u65707"
