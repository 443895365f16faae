"""Prompts in a data set of the Hugging Face kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from lit_rl.tasks.column_task import ColumnTask
from lit_rl.tasks.columns import check_held_out


@dataclass(frozen=True, kw_only=True)
class HuggingFaceData(ColumnTask):
    """Prompts and answers in a data set of the Hugging Face hub, or of a local folder.

    Args:
        path: name on the hub, a folder that `save_to_disk` wrote, or a folder of data files.
        name: name of the configuration of the data set, where it has several.
        train_split: split to train on.
        held_out_split: split to evaluate on.

    Raises:
        ValueError: if both `held_out_split` and `held_out_fraction` are given.
    """

    path: str
    name: str | None = None
    train_split: str = "train"
    held_out_split: str | None = None

    def __post_init__(self) -> None:
        check_held_out("held_out_split", self.held_out_split, self.held_out_fraction)

    @property
    def sources(self) -> tuple[str, str | None]:
        """The two splits."""
        return self.train_split, self.held_out_split

    def read(self, source: str) -> tuple[dict[str, list[Any]], list[str], str]:
        """Return the columns of a split, what to call its rows, and its name."""
        data_set = self._load(source)
        rows = [f"row {row}" for row in range(len(data_set))]
        return data_set.to_dict(), rows, f"{self.path}, split {source}"

    def _load(self, split: str) -> Dataset:
        if not any(Path(self.path, file).exists() for file in ("dataset_dict.json", "state.json")):
            return load_dataset(self.path, self.name, split=split)
        saved = load_from_disk(self.path)
        splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
        if split not in splits:
            raise ValueError(f"{self.path} has no split {split!r}, it has {sorted(splits)}")
        return splits[split]
