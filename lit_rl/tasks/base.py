"""What every task is: prompts with reference answers, some to train on and some held out."""

from abc import ABC, abstractmethod

from datasets import Dataset


class Task(ABC):
    """Where prompts and their reference answers come from.

    Both data sets have the columns `prompt` (text, or a list of chat messages with `role` and
    `content`) and `answer` (text, empty where there is no reference answer); rewards receive any
    other column by its name. They are the same at every call, and no held-out prompt is one to
    train on.
    """

    @abstractmethod
    def train(self) -> Dataset:
        """Return the prompts to train on."""

    @abstractmethod
    def held_out(self) -> Dataset:
        """Return the prompts to evaluate on."""
