"""A task whose prompts and answers are columns of data that people made."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from datasets import Dataset

from lit_rl.tasks.base import Task
from lit_rl.tasks.columns import split_by_prompt, task_data_set, warn_of_overlap


@dataclass(frozen=True, kw_only=True)
class ColumnTask(Task):
    """Prompts and answers in columns of one source, or of one to train on and one held out.

    Args:
        held_out_fraction: in place of a source of held-out prompts: share of the prompts to train
            on that is held out; None: a tenth. Rows with equal prompts stay on one side.
        prompt_column: name of the column of prompts: texts, or lists of chat messages.
        answer_column: name of the column of reference answers: texts or whole numbers. None: there
            are no answers.
        seed: seed of the choice of held-out prompts, independent of the seed of a run.
    """

    held_out_fraction: float | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    seed: int = 0

    @property
    @abstractmethod
    def sources(self) -> tuple[str, str | None]:
        """Where the prompts to train on stand, and the held-out ones unless a share is held out."""

    @abstractmethod
    def read(self, source: str) -> tuple[dict[str, list[Any]], list[str], str]:
        """Return the columns of a source, what to call its rows, and what to call the whole."""

    def train(self) -> Dataset:
        """Return the prompts to train on."""
        return self._sides[0]

    def held_out(self) -> Dataset:
        """Return the prompts to evaluate on."""
        return self._sides[1]

    @cached_property
    def _sides(self) -> tuple[Dataset, Dataset]:
        source, held_out_source = self.sources
        train = self._data_set(source)
        if held_out_source is None:
            fraction = 0.1 if self.held_out_fraction is None else self.held_out_fraction
            return split_by_prompt(train, fraction, self.seed)
        held_out = self._data_set(held_out_source)
        warn_of_overlap(train, held_out)
        return train, held_out

    def _data_set(self, source: str) -> Dataset:
        columns, rows, name = self.read(source)
        return task_data_set(
            columns,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            source=name,
            rows=rows,
        )
