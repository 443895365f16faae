"""Text on the terminal, which what a model or a data set says cannot deface."""

import rich
from rich.console import Console
from rich.text import Text


def console() -> Console:
    """Return the console that everything here prints to, so that tables and bar do not collide."""
    return rich.get_console()


def visible(text: str) -> str:
    r"""Return a text with everything that is not a visible character or a plain space escaped.

    Newlines, other control characters, terminal escape sequences, marks that reverse the reading
    direction, zero-width characters and lone surrogates come out as in a Python string literal.
    Backslashes stay as they are, since mathematics is full of them.

    Example:
        >>> print(visible("a\nb \x1b[2J \u202e"))
        a\nb \x1b[2J \u202e
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def cell(text: str, limit: int) -> Text:
    """Return the text as a table shows it: visible, without markup, cut in the middle.

    Args:
        text: any text.
        limit: the most characters that are shown.
    """
    encoding = console().encoding
    shown = visible(text).encode(encoding, "backslashreplace").decode(encoding)
    if len(shown) > limit:
        head = (limit - 3) // 2
        shown = f"{shown[:head]}...{shown[len(shown) - (limit - 3 - head) :]}"
    return Text(shown)
