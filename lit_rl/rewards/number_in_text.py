"""1 for a text whose first or last number is the reference's."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lit_rl.rewards.base import Reward, shown
from lit_rl.types import Rollout

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\].])[-+\u2212])?"
    r"(?P<numerator>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<denominator>0*[1-9]\d*))?",
    re.ASCII,
)
# Python refuses to read more than 4300 digits; a number of that length is nobody's answer.
_MAX_CHARACTERS = 1000


def numbers_in(text: str) -> list[Fraction]:
    """Return the numbers of a text, exactly, in their order.

    A number is a run of digits with, if any, a sign (not behind a letter, digit or bracket, where
    it is an operator), commas between thousands, a decimal point, and a whole denominator behind a
    slash. A percent sign, a unit and an exponent are not part of it. Numbers of more than 1000
    characters are left out.

    Example:
        >>> [str(number) for number in numbers_in("It is -1,234.50, or 3/4 of 8-2 (x=+.5).")]
        ['-2469/2', '3/4', '8', '2', '1/2']
    """
    matches = [m for m in _NUMBER.finditer(text) if len(m.group()) <= _MAX_CHARACTERS]
    return [_fraction(match) for match in matches]


def _fraction(match: re.Match[str]) -> Fraction:
    value = Fraction(match["numerator"].replace(",", "")) / int(match["denominator"] or 1)
    return -value if match["sign"] in ("-", "\u2212") else value


@dataclass(frozen=True)
class NumberInText(Reward):
    """1 where the chosen number of the response equals that of the reference answer, else 0.

    The comparison is exact: 0.5, .50 and 1/2 are equal, 0.33 and 1/3 are not. See `numbers_in`. A
    response without a number gets 0. The reward does not apply to a prompt whose answer is empty;
    an answer without a number is an error.

    Args:
        which: the number that counts, in the response and in the reference answer.
    """

    which: Literal["last", "first"] = "last"

    def __post_init__(self) -> None:
        if self.which not in ("last", "first"):
            raise ValueError(f"which is {self.which!r}, must be 'last' or 'first'")

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return 1, 0, or None where there is no answer."""
        pairs = zip(rollout.responses, rollout.answers, strict=True)
        return [self._value(response, answer) for response, answer in pairs]

    def _value(self, response: str, answer: str) -> float | None:
        if not answer.strip():
            return None
        expected = self._chosen(answer)
        if expected is None:
            raise ValueError(f"the reference answer {shown(answer)} holds no number such as '42'")
        return float(self._chosen(response) == expected)

    def _chosen(self, text: str) -> Fraction | None:
        numbers = numbers_in(text)
        if not numbers:
            return None
        return numbers[-1] if self.which == "last" else numbers[0]
