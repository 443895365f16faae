"""Questions that reasoning-gym generates."""

import difflib
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count, islice
from typing import Any

from datasets import Dataset
from lightning.pytorch.utilities.seed import isolate_rng

from lit_rl.tasks.base import Task


@dataclass(frozen=True)
class ReasoningGym(Task):
    """Any data set of reasoning-gym by its name, such as `chain_sum`.

    Besides `prompt` and `answer` (empty where the data set has no single answer) there are the
    columns that `lit_rl.rewards.ReasoningGymScore` reads, as Python literals: `entry`, the entry
    of the data set, and `data_set`, its name and config.

    Args:
        name: name of the data set.
        num_train: questions to train on.
        num_held_out: questions to evaluate on, all different and none of them to train on.
        seed: seed of the questions, independent of the seed of a run.
        config: settings of the data set, such as `{"min_terms": 2, "max_terms": 3}`.

    Raises:
        ImportError: if reasoning-gym is not installed.
        ValueError: for an unknown name or setting, or a number of questions below 1.
    """

    name: str
    num_train: int
    num_held_out: int
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ImportError("ReasoningGym needs reasoning-gym: pip install 'lit-rl[reasoning]'")
        from reasoning_gym.factory import DATASETS

        if min(self.num_train, self.num_held_out) < 1:
            raise ValueError(
                f"num_train {self.num_train} and num_held_out {self.num_held_out} must be at "
                "least 1, such as 1000 and 100"
            )
        if self.name not in DATASETS:
            near = difflib.get_close_matches(self.name, DATASETS) or ["chain_sum"]
            raise ValueError(
                f"reasoning-gym has no data set {self.name!r}; near it are {', '.join(near)}"
            )
        known = {setting.name for setting in fields(DATASETS[self.name][1])} - {"seed", "size"}
        if unknown := self.config.keys() - known:
            raise ValueError(
                f"the data set {self.name} has no settings {sorted(unknown)}; "
                f"it has {', '.join(sorted(known))}"
            )

    def train(self) -> Dataset:
        """Return `num_train` questions; some data sets repeat theirs."""
        return self._data_set(self._train_entries)

    def held_out(self) -> Dataset:
        """Return `num_held_out` different questions.

        Raises:
            ValueError: if ten times as many draws do not hold that many.
        """
        seen = {entry["question"] for entry in self._train_entries}
        chosen = []
        with isolate_rng(include_cuda=False):
            for entry in islice(self._draws("held out"), 10 * self.num_held_out):
                if entry["question"] not in seen:
                    seen.add(entry["question"])
                    chosen.append(entry)
                if len(chosen) == self.num_held_out:
                    return self._data_set(chosen)
        raise ValueError(
            f"{10 * self.num_held_out} draws from {self.name} gave {len(chosen)} held-out "
            f"questions that differ from the {self.num_train} to train on, num_held_out asks for "
            f"{self.num_held_out}: ask for fewer of either, or change config"
        )

    @cached_property
    def _train_entries(self) -> list[dict[str, Any]]:
        with isolate_rng(include_cuda=False):
            return list(islice(self._draws("train"), self.num_train))

    def _draws(self, purpose: str) -> Iterator[dict[str, Any]]:
        import reasoning_gym

        # Entry i of a data set comes from its seed + i: neighbouring seeds would share entries.
        seed = random.Random(f"{self.seed} {purpose}").getrandbits(31)
        data_set = reasoning_gym.create_dataset(self.name, seed=seed, **self.config)
        return (data_set[index] for index in count())

    def _data_set(self, entries: list[dict[str, Any]]) -> Dataset:
        answers = [entry["answer"] for entry in entries]
        settings = repr({"name": self.name, "config": self.config})
        return Dataset.from_dict(
            {
                "prompt": [str(entry["question"]) for entry in entries],
                "answer": ["" if answer is None else str(answer) for answer in answers],
                "entry": [repr(plain(entry)) for entry in entries],
                "data_set": [settings] * len(entries),
            }
        )


def plain(value: Any) -> Any:
    """Return a value in Python's own types, whose `repr` is a literal that reads as the value.

    JSON would turn tuples into lists and the keys of a dict into text, and some scorers of
    reasoning-gym then refuse right answers.

    Raises:
        ValueError: if the value holds anything but dicts, lists, tuples, sets, texts, numbers and
            None.

    Example:
        >>> import numpy as np
        >>> plain({1: (np.float64(0.5), np.str_("a"))})
        {1: (0.5, 'a')}
    """
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(plain(entry) for entry in value)
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    raise ValueError(f"{value!r} of an entry is a {type(value).__name__}, which is no literal")
