"""Tasks on strings of digits, small enough for a model that starts from random weights."""

import random
from abc import abstractmethod
from dataclasses import dataclass

from datasets import Dataset

from lit_rl.tasks.base import Task


@dataclass(frozen=True)
class DigitTask(Task):
    """Strings of digits, "482>", with an answer that depends on them alone.

    Args:
        num_digits: digits per prompt; all `10 ** num_digits` strings are possible.
        num_train: prompts to train on.
        num_held_out: prompts to evaluate on.
        seed: seed of the choice, independent of the seed of a run.

    Raises:
        ValueError: if there are fewer strings than prompts.
    """

    num_digits: int = 3
    num_train: int = 800
    num_held_out: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_digits <= 18:
            raise ValueError(f"num_digits is {self.num_digits}, must be in 1 to 18, such as 3")
        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train {self.num_train} and num_held_out {self.num_held_out} must be at "
                "least 1, such as 800 and 200"
            )
        available = 10**self.num_digits
        if self.num_train + self.num_held_out > available:
            raise ValueError(
                f"num_train {self.num_train} + num_held_out {self.num_held_out} = "
                f"{self.num_train + self.num_held_out} prompts, but {self.num_digits} digits make "
                f"only {available}; such as {available * 4 // 5} and {available // 5}"
            )

    @abstractmethod
    def answer(self, digits: str) -> str:
        """Return the answer to a string of digits."""

    def train(self) -> Dataset:
        """Return the first `num_train` of the shuffled strings."""
        return self._data_set(self._numbers()[: self.num_train])

    def held_out(self) -> Dataset:
        """Return the `num_held_out` strings behind them."""
        return self._data_set(self._numbers()[self.num_train :])

    def _numbers(self) -> list[int]:
        amount = self.num_train + self.num_held_out
        return random.Random(self.seed).sample(range(10**self.num_digits), amount)

    def _data_set(self, numbers: list[int]) -> Dataset:
        texts = [f"{number:0{self.num_digits}d}" for number in numbers]
        answers = [self.answer(text) for text in texts]
        return Dataset.from_dict({"prompt": [f"{text}>" for text in texts], "answer": answers})


@dataclass(frozen=True)
class LargestDigit(DigitTask):
    """Name the largest digit: "482>" is answered by "8"."""

    def answer(self, digits: str) -> str:
        """Return the largest digit."""
        return max(digits)


@dataclass(frozen=True)
class Copy(DigitTask):
    """Repeat the digits: "482>" is answered by "482"."""

    def answer(self, digits: str) -> str:
        """Return the digits."""
        return digits


@dataclass(frozen=True)
class Sort(DigitTask):
    """Sort the digits in ascending order: "482>" is answered by "248"."""

    def answer(self, digits: str) -> str:
        """Return the digits in ascending order."""
        return "".join(sorted(digits))
