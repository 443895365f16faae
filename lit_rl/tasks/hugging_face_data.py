"""Prompts in a data set of the Hugging Face kind."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from lit_rl.tasks.base import Task
from lit_rl.tasks.columns import check_held_out, split_by_prompt, task_data_set, warn_of_overlap


@dataclass(frozen=True, kw_only=True)
class HuggingFaceData(Task):
    """Prompts and answers in a data set of the Hugging Face hub, or of a local folder.

    Args:
        path: name on the hub, a folder that `save_to_disk` wrote, or a folder of data files.
        name: name of the configuration of the data set, where it has several.
        train_split: split to train on.
        held_out_split: split to evaluate on.
        held_out_fraction: instead of `held_out_split`: share of the prompts of `train_split` that
            is held out. Rows with equal prompts stay on one side.
        prompt_column: name of the column of prompts: texts, or lists of chat messages.
        answer_column: name of the column of reference answers: texts or whole numbers. None: there
            are no answers.
        seed: seed of the choice of held-out prompts, independent of the seed of a run.

    Raises:
        ValueError: unless exactly one of `held_out_split` and `held_out_fraction` is given.
    """

    path: str
    name: str | None = None
    train_split: str = "train"
    held_out_split: str | None = None
    held_out_fraction: float | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    seed: int = 0

    def __post_init__(self) -> None:
        check_held_out("held_out_split", self.held_out_split, self.held_out_fraction)

    def train(self) -> Dataset:
        """Return the prompts to train on."""
        return self._sides[0]

    def held_out(self) -> Dataset:
        """Return the prompts to evaluate on."""
        return self._sides[1]

    @cached_property
    def _sides(self) -> tuple[Dataset, Dataset]:
        train = self._read(self.train_split)
        if self.held_out_fraction is not None:
            return split_by_prompt(train, self.held_out_fraction, self.seed)
        assert self.held_out_split is not None
        held_out = self._read(self.held_out_split)
        warn_of_overlap(train, held_out)
        return train, held_out

    def _read(self, split: str) -> Dataset:
        data_set = self._load(split)
        return task_data_set(
            data_set.to_dict(),
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            source=f"{self.path}, split {split}",
            rows=[f"row {row}" for row in range(len(data_set))],
        )

    def _load(self, split: str) -> Dataset:
        if not any(Path(self.path, file).exists() for file in ("dataset_dict.json", "state.json")):
            return load_dataset(self.path, self.name, split=split)
        saved = load_from_disk(self.path)
        splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
        if split not in splits:
            raise ValueError(f"{self.path} has no split {split!r}, it has {sorted(splits)}")
        return splits[split]
