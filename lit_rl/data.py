"""From a task to batches of prompts, in an order that a resumed run continues."""

import warnings
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import lightning as L
import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from lit_rl.rewards.python_function import ARGUMENTS
from lit_rl.tasks import PlainPrompt, PromptFormat, Task
from lit_rl.tasks.batches import EpochBatches, OrderedBatches
from lit_rl.tasks.prompt_rows import Overlong, PromptRow, collate, prompt_rows, within_limit
from lit_rl.types import Prompts

# What Lightning says of other loaders. These rows are tokenized already, so workers would only cost
# time; the data module resumes them; and the batches of predictions leave nothing out.
_BESIDE_THE_POINT = (
    r".*does not have many workers which may be a bottleneck",
    r".*your dataloader is not resumable",
    r"You are using a custom batch sampler .* for prediction",
)


@runtime_checkable
class Sampling(Protocol):
    """What the data need to know about the sampling."""

    @property
    def max_new_tokens(self) -> int:
        """Longest response, in tokens."""


@runtime_checkable
class PromptReader(Protocol):
    """What the data need to know about the module that reads the prompts, before its set-up."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""

    @property
    def max_context_tokens(self) -> int | None:
        """Tokens that the model can read, prompt and response together; None if unlimited."""

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""


def align_loop(fit_loop: dict[str, Any], position: dict[str, Any]) -> None:
    """Make the counters of Lightning's training loop agree with a position of the data.

    Lightning takes an epoch for finished when a run is stopped within it, and does not count the
    epoch that a run resumed at its beginning: from such a checkpoint it would train too few or too
    many epochs.

    Args:
        fit_loop: `checkpoint["loops"]["fit_loop"]`, which changes in place.
        position: what `PromptDataModule.state_dict` returned for this checkpoint.
    """
    epoch, batch = position["epoch"], position["first_batch"]
    begun = epoch + int(batch > 0)
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    fit_loop["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    batches = fit_loop["epoch_loop.batch_progress"]
    # The batch after the checkpoint is ready, but not started, when one is written before it.
    batches["total"] = dict.fromkeys(batches["total"], batches["total"]["started"])
    batches["current"] = dict.fromkeys(batches["current"], batch)
    batches["is_last_batch"] = False


class PromptDataModule(L.LightningDataModule):
    """Batches of prompts of a task, for the tokenizer of the module that is trained.

    All prompts are formatted and tokenized once, at the start. A batch to train on holds
    `batch_size` prompts over all ranks, in an order of `seed` and the epoch; held-out prompts keep
    their order, and each of them stands in one batch of one rank.

    Args:
        task: gives prompts and reference answers.
        batch_size: prompts per iteration over all ranks.
        eval_batch_size: held-out prompts per batch over all ranks, at most.
        max_prompt_tokens: longest prompt, in tokens.
        prompt_format: how a prompt becomes the text that the model reads.
        overlong: what happens to a longer prompt: `refuse`, `drop`, `cut_left` or `cut_right`, see
            `lit_rl.tasks.prompt_rows.within_limit`.
        seed: seed of the order of the prompts.

    Raises:
        ValueError: for a number that is too small.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        eval_batch_size: int,
        max_prompt_tokens: int,
        prompt_format: PromptFormat = PlainPrompt(),
        overlong: Overlong = "refuse",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.task = task
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.prompt_format = prompt_format
        self.overlong = overlong
        self.seed = seed
        self.train_rows: list[PromptRow] = []
        self.held_out_rows: list[PromptRow] = []
        self.train_batches: EpochBatches | None = None
        for name, least in (
            ("batch_size", 1),
            ("eval_batch_size", 1),
            ("max_prompt_tokens", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")

    @property
    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def _reader(self) -> PromptReader:
        return cast(PromptReader, self._trainer.lightning_module)

    @property
    def _ranks(self) -> dict[str, int]:
        # Ranks that compute the same prompts together, as in tensor parallelism, count as one.
        ranks = self._trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return {"rank": ranks["rank"], "world_size": ranks["num_replicas"]}

    def setup(self, stage: str) -> None:
        """Format and tokenize the prompts that a stage needs.

        Raises:
            ValueError: for prompts that cannot be read, do not fill a batch, or do not fit the
                context of the model, and for a batch that the ranks cannot share.
        """
        for message in _BESIDE_THE_POINT:
            warnings.filterwarnings("ignore", message)
        self._check_ranks()
        self.held_out_rows = self._rows(self.task.held_out(), "held-out")
        if stage == "fit":
            data_set = self.task.train()
            self.train_rows = self._rows(data_set, "training")
            self._check_batch_size(dropped=len(data_set) - len(self.train_rows))
            self.train_batches = EpochBatches(
                len(self.train_rows), self.batch_size, self.seed, **self._ranks
            )

    def _check_batch_size(self, dropped: int) -> None:
        left = len(self.train_rows)
        if left < self.batch_size:
            why = (
                f", since {dropped} of {dropped + left} were longer than max_prompt_tokens "
                f"{self.max_prompt_tokens} and overlong is drop"
            )
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are only {left} training prompts"
                f"{why * bool(dropped)}; set it to {left} or less"
                f"{', or allow longer prompts' * bool(dropped)}"
            )

    def _check_ranks(self) -> None:
        world_size = self._ranks["world_size"]
        if self.batch_size % world_size:
            valid = (self.batch_size // world_size + 1) * world_size
            raise ValueError(
                f"batch_size {self.batch_size} does not divide among {world_size} ranks; "
                f"{valid} would"
            )
        if world_size > 1 and self._trainer._accelerator_connector.use_distributed_sampler:
            raise ValueError(
                "the Trainer would deal the prompts out a second time, to each rank a part of its "
                "part; set trainer.use_distributed_sampler to false"
            )

    def _rows(self, data_set: Dataset, kind: str) -> list[PromptRow]:
        if shadowed := sorted(set(ARGUMENTS) & set(data_set.column_names)):
            raise ValueError(
                f"the {kind} prompts have a column {shadowed[0]!r}, a name that rewards know "
                f"otherwise; rename it, such as {shadowed[0]}_column"
            )
        tokenizer = self._reader.tokenizer
        rows = prompt_rows(data_set, self.prompt_format, tokenizer, kind)
        rows = within_limit(rows, self.max_prompt_tokens, self.overlong, tokenizer, kind)
        self._check_context(max(len(row.ids) for row in rows), kind)
        return rows

    def _check_context(self, longest: int, kind: str) -> None:
        limit, new = self._reader.max_context_tokens, self._reader.sampling.max_new_tokens
        if limit is not None and longest + new > limit:
            room = limit - new if new < limit else limit // 2
            if longest < limit:
                example = f"max_new_tokens {limit - longest}"
            elif room > 0:
                rest = f" and max_new_tokens {limit - room}" * (new >= limit)
                example = f"max_prompt_tokens {room} with overlong cut_left{rest}"
            else:
                example = f"a model that reads {longest + new}"
            raise ValueError(
                f"the longest of the {kind} prompts has {longest} tokens and a response up to "
                f"max_new_tokens {new}, together {longest + new}, but the model reads {limit}; "
                f"such as {example}"
            )

    def train_dataloader(self) -> DataLoader[Prompts]:
        """Batches of prompts to train on."""
        assert self.train_batches is not None
        return self._loader(self.train_rows, self.train_batches)

    def drawn_prompts(self, seed: tuple[int, ...]) -> Prompts:
        """Return `batch_size` training prompts over all ranks, the share of this rank.

        They are drawn without replacement and beside the order of the epochs, which goes on
        unchanged. Prompt i of the draw lies on rank i % world_size.

        Args:
            seed: numbers that seed the draw; the same on every rank.
        """
        drawn = np.random.default_rng(seed).choice(
            len(self.train_rows), self.batch_size, replace=False
        )
        rank, world_size = self._ranks["rank"], self._ranks["world_size"]
        rows = [self.train_rows[index] for index in drawn[rank::world_size]]
        return collate(rows, pad_id=self._reader.tokenizer.pad_token_id)

    def val_dataloader(self) -> DataLoader[Prompts]:
        """Batches of held-out prompts."""
        batches = OrderedBatches(len(self.held_out_rows), self.eval_batch_size, **self._ranks)
        return self._loader(self.held_out_rows, batches)

    def predict_dataloader(self) -> DataLoader[Prompts]:
        """Batches of held-out prompts."""
        return self.val_dataloader()

    def _loader(self, rows: list[PromptRow], batches: Sampler[list[int]]) -> DataLoader[Prompts]:
        pad_id = self._reader.tokenizer.pad_token_id
        # A list is a data set in all but its type.
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=partial(collate, pad_id=pad_id),
            # An iterator draws a number from its generator, by default from the global one.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch to train on, for a checkpoint.

        A module that trains also needs `align_loop` in its `on_load_checkpoint`.
        """
        if self.train_batches is None:
            return {}
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        # Not `ready`, which the next batch is already when a checkpoint is written before it.
        done = progress.started
        ended = done >= self._trainer.num_training_batches
        return {
            "epoch": self.train_batches.epoch + int(ended),
            "first_batch": 0 if ended else done,
            "batch_size": self.batch_size,
            "num_rows": len(self.train_rows),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was written.

        Raises:
            ValueError: if it was written within an epoch of other batches.
        """
        if self.train_batches is None or not state_dict:
            return
        then = (state_dict["batch_size"], state_dict["num_rows"])
        now = (self.batch_size, len(self.train_rows))
        if state_dict["first_batch"] and then != now:
            raise ValueError(
                f"the checkpoint was written within an epoch of {then[1]} training prompts with "
                f"batch_size {then[0]}; this run has {now[1]} with batch_size {now[0]}, so its "
                "position means nothing here. Keep both, or continue from the end of an epoch"
            )
        self.train_batches.resume(state_dict["epoch"], state_dict["first_batch"])


def prompt_data(trainer: L.Trainer) -> PromptDataModule | None:
    """Return the data of a trainer; None where it has none, or others than prompts of a task."""
    untyped: Any = trainer  # Lightning says nothing of this attribute
    return untyped.datamodule if isinstance(untyped.datamodule, PromptDataModule) else None
