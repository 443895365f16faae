"""Sums of two whole numbers."""

import random
from dataclasses import dataclass

from datasets import Dataset

from lit_rl.tasks.base import Task


@dataclass(frozen=True)
class Addition(Task):
    """Add two numbers: "12+7=" is answered by "19".

    The unordered pairs of operands are split, and both orders of a pair stand on its side: no
    held-out sum has its mirror among those to train on.

    Args:
        minimum: smallest operand.
        maximum: largest operand.
        held_out_fraction: share of the pairs that is held out, rounded to whole pairs.
        seed: seed of the split, independent of the seed of a run.

    Raises:
        ValueError: if one side would have no pair.
    """

    minimum: int = 1
    maximum: int = 12
    held_out_fraction: float = 1 / 3
    seed: int = 0

    def __post_init__(self) -> None:
        pairs = self._pairs()
        if not 0 < round(len(pairs) * self.held_out_fraction) < len(pairs):
            raise ValueError(
                f"held_out_fraction {self.held_out_fraction} of the {len(pairs)} pairs of numbers "
                f"from minimum {self.minimum} to maximum {self.maximum} leaves one side empty; "
                "an example is 0.33 of the pairs from 1 to 12"
            )

    def train(self) -> Dataset:
        """Return both orders of the pairs to train on."""
        return self._data_set(self._pairs()[self._num_held_out() :])

    def held_out(self) -> Dataset:
        """Return both orders of the held-out pairs."""
        return self._data_set(self._pairs()[: self._num_held_out()])

    def _num_held_out(self) -> int:
        return round(len(self._pairs()) * self.held_out_fraction)

    def _pairs(self) -> list[tuple[int, int]]:
        operands = range(self.minimum, self.maximum + 1)
        pairs = [(x, y) for x in operands for y in operands if x <= y]
        random.Random(self.seed).shuffle(pairs)
        return pairs

    @staticmethod
    def _data_set(pairs: list[tuple[int, int]]) -> Dataset:
        ordered = [sum_ for x, y in pairs for sum_ in dict.fromkeys([(x, y), (y, x)])]
        return Dataset.from_dict(
            {
                "prompt": [f"{x}+{y}=" for x, y in ordered],
                "answer": [str(x + y) for x, y in ordered],
            }
        )
