from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from datasets import Dataset

from lit_rl.data import PromptDataModule, align_loop, prompt_data
from lit_rl.models.character_tokenizer import character_tokenizer
from lit_rl.tasks import LargestDigit, Task


@dataclass
class Reader(L.LightningModule):
    """Stands for an algorithm: reads prompts and learns nothing."""

    max_new_tokens: int = 4
    max_context_tokens: int | None = None
    seen: list = field(default_factory=list)
    validated: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer = character_tokenizer("0123456789>")
        self.sampling = SimpleNamespace(max_new_tokens=self.max_new_tokens)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint):
        align_loop(checkpoint["loops"]["fit_loop"], checkpoint["PromptDataModule"])

    def training_step(self, prompts, batch_idx):
        self.seen.append(prompts.row_ids)
        self.optimizers().step()

    def validation_step(self, prompts, batch_idx):
        self.validated.append(prompts)

    def predict_step(self, prompts, batch_idx):
        return prompts.row_ids

    __hash__ = object.__hash__


@dataclass
class Given(Task):
    """Prompts as given, on both sides."""

    columns: dict

    def train(self):
        return Dataset.from_dict(self.columns)

    held_out = train


def trainer(tmp_path, **options):
    return L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **options},
    )


def data(**options):
    options = {"batch_size": 4, "eval_batch_size": 8, "max_prompt_tokens": 8, **options}
    task = options.pop("task", LargestDigit(num_train=12, num_held_out=10))
    return PromptDataModule(task, **options)


def fit(tmp_path, *, ckpt_path=None, seed=0, **options):
    module = Reader()
    trainer(tmp_path, **options).fit(module, data(seed=seed), ckpt_path=ckpt_path)
    return module


def test_training_sees_each_prompt_once_an_epoch_in_new_orders(tmp_path):
    seen = fit(tmp_path, max_epochs=3).seen
    epochs = [seen[0:3], seen[3:6], seen[6:9]]
    for epoch in epochs:
        assert sorted(sum(epoch, ())) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_follows_the_seed_and_not_the_global_random_state(tmp_path):
    torch.manual_seed(0)
    first = fit(tmp_path, max_epochs=2).seen
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert fit(tmp_path, max_epochs=2).seen == first
    assert torch.equal(torch.get_rng_state(), state)
    assert fit(tmp_path, max_epochs=2, seed=1).seen != first


class StopAfter(L.Callback):
    """Writes a checkpoint after some batches and ends the run, in one of three places.

    `batch`: the process ends behind a batch; `validation`: behind the validation of that batch;
    `end`: the run ends in good order, within an epoch or not.
    """

    def __init__(self, place, batches, path):
        self.place, self.batches, self.path = place, batches, path

    def on_train_batch_end(self, trainer, module, *args):
        trainer.should_stop = self.place == "end" and self.is_due(module)
        self.save(trainer, module, "batch")

    def on_validation_end(self, trainer, module):
        self.save(trainer, module, "validation")

    def on_train_end(self, trainer, module):
        self.save(trainer, module, "end")

    def is_due(self, module):
        return len(module.seen) == self.batches

    def save(self, trainer, module, place):
        if place == self.place and self.is_due(module):
            trainer.save_checkpoint(self.path)
            if place != "end":
                raise CrashError


class CrashError(Exception):
    """As if the machine had failed."""


# An epoch has 3 batches, or 2 where they are limited.
@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("place", ["batch", "validation", "end"])
@pytest.mark.parametrize("stops", [(1, 2), (2, 4), (3, 6), (3, 4), (2, 3)])
def test_a_run_resumed_twice_sees_what_the_uninterrupted_one_sees(tmp_path, stops, place, limit):
    options = {
        "max_epochs": 4,
        "limit_train_batches": limit,
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
    }
    whole = fit(tmp_path, **options).seen
    seen, checkpoint = [], None
    for number, stop in enumerate(stops):
        part = Reader()
        callback = StopAfter(place, stop - len(seen), tmp_path / f"{number}.ckpt")
        with nullcontext() if place == "end" else pytest.raises(CrashError):
            trainer(tmp_path, **options, callbacks=[callback]).fit(
                part, data(), ckpt_path=checkpoint
            )
        seen += part.seen
        checkpoint = callback.path
    assert seen + fit(tmp_path, **options, ckpt_path=checkpoint).seen == whole


def test_a_run_is_continued_with_more_epochs(tmp_path):
    whole = fit(tmp_path, max_epochs=3).seen
    seen, checkpoint = [], None
    for epochs in (1, 2, 3):
        part = Reader()
        path = tmp_path / f"{epochs}.ckpt"
        ends = trainer(tmp_path, max_epochs=epochs, callbacks=[StopAfter("end", 3, path)])
        ends.fit(part, data(), ckpt_path=checkpoint)
        seen += part.seen
        checkpoint = path
    assert seen == whole


def test_a_position_in_other_batches_is_refused(tmp_path):
    fit(tmp_path, max_epochs=1, callbacks=[StopAfter("end", 1, tmp_path / "within.ckpt")])
    with pytest.raises(ValueError, match=r"12 training .* batch_size 4; .* 12 with batch_size 6"):
        trainer(tmp_path).fit(Reader(), data(batch_size=6), ckpt_path=tmp_path / "within.ckpt")


def test_other_batches_begin_where_an_epoch_ended(tmp_path):
    """After a whole epoch the position says nothing of batches: six rows each are two batches."""
    whole = fit(tmp_path, max_epochs=1, callbacks=[StopAfter("end", 3, tmp_path / "whole.ckpt")])
    assert len(whole.seen) == 3
    module = Reader()
    resumed = trainer(tmp_path, max_epochs=2)
    resumed.fit(module, data(batch_size=6), ckpt_path=tmp_path / "whole.ckpt")
    assert [len(row_ids) for row_ids in module.seen] == [6, 6]
    assert sorted(sum(module.seen, ())) == list(range(12))


def test_validation_and_prediction_see_each_held_out_prompt_once_in_order(tmp_path):
    module = Reader()
    trainer(tmp_path).validate(module, data())
    # Ten prompts in batches of at most 8 are two batches of 5.
    assert [prompts.row_ids for prompts in module.validated] == [
        tuple(range(5)),
        tuple(range(5, 10)),
    ]
    texts = sum((prompts.texts for prompts in module.validated), ())
    assert list(texts) == LargestDigit(num_train=12, num_held_out=10).held_out()["prompt"]
    assert trainer(tmp_path).predict(Reader(), data()) == [tuple(range(5)), tuple(range(5, 10))]


def set_up(module=None, *, ranks=None, use_distributed_sampler=False, stage="fit", **options):
    """Sets the data up for a Trainer that is described by what the data read of it."""
    datamodule = data(**options)
    datamodule.trainer = MagicMock(spec=L.Trainer)
    datamodule.trainer.lightning_module = module or Reader()
    datamodule.trainer.distributed_sampler_kwargs = ranks
    connector = SimpleNamespace(use_distributed_sampler=use_distributed_sampler)
    datamodule.trainer._accelerator_connector = connector
    datamodule.setup(stage)
    return datamodule


def test_ranks_get_different_prompts_of_a_batch():
    batches = []
    for rank in range(2):
        datamodule = set_up(ranks={"num_replicas": 2, "rank": rank})
        batches.append([prompts.row_ids for prompts in datamodule.train_dataloader()])
    assert [len(batch) for batch in batches[0]] == [2, 2, 2]
    assert sorted(sum(batches[0] + batches[1], ())) == list(range(12))


def test_a_batch_may_hold_one_prompt_or_all_of_them():
    assert len(set_up(batch_size=1).train_dataloader()) == 12
    assert len(set_up(batch_size=12).train_dataloader()) == 1


def test_evaluation_batches_know_nothing_of_the_training_batch(tmp_path):
    # The batch to train on has more prompts than there are.
    datamodule = set_up(batch_size=100, eval_batch_size=1, stage="validate")
    assert len(datamodule.val_dataloader()) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 13}, "batch_size is 13, but there are only 12 training prompts; set it"),
        (
            {"batch_size": 3, "ranks": {"num_replicas": 2, "rank": 0}},
            "batch_size 3 does not divide among 2 ranks; 4 would",
        ),
        (
            {"ranks": {"num_replicas": 2, "rank": 0}, "use_distributed_sampler": True},
            "set trainer.use_distributed_sampler to false",
        ),
        ({"max_prompt_tokens": 4}, "10 of 10 held-out prompts are longer than max_prompt_tokens 4"),
        (
            {"module": Reader(max_new_tokens=5, max_context_tokens=9)},
            "has 5 tokens and a response up to max_new_tokens 5, together 10, but the model reads 9"
            "; such as max_new_tokens 4$",
        ),
        # The begin token counts: 3, 5 and 4 tokens.
        (
            {
                "module": Reader(max_new_tokens=5, max_context_tokens=9),
                "task": Given({"prompt": ["1>", "123>", "12>"], "answer": ["1"] * 3}),
            },
            "the longest of the held-out prompts has 5 tokens",
        ),
        (
            {"task": Given({"prompt": ["1"] * 4, "answer": ["1"] * 4, "responses": [0] * 4})},
            "held-out prompts have a column 'responses'.* rename it, such as responses_column",
        ),
        ({"task": Given({"prompt": [], "answer": []})}, "there are no held-out prompts"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(options, message):
    with pytest.raises(ValueError, match=message):
        set_up(**options)


def test_too_few_prompts_after_a_drop_name_the_drop():
    task = Given({"prompt": ["1>", "123>", "234>"], "answer": ["1", "3", "4"]})
    message = (
        "batch_size is 3, but there are only 1 training prompts, since 2 of 3 were longer than "
        "max_prompt_tokens 4 and overlong is drop; set it to 1 or less, or allow longer prompts$"
    )
    with (
        pytest.warns(UserWarning, match="2 of 3 training prompts are longer"),
        pytest.raises(ValueError, match=message),
    ):
        set_up(task=task, batch_size=3, max_prompt_tokens=4, overlong="drop")


def test_a_prompt_that_just_fits_the_context_is_accepted():
    set_up(Reader(max_new_tokens=4, max_context_tokens=9))


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size", "max_prompt_tokens"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0, must be at least 1"):
        data(**{name: 0})


def test_the_data_of_a_trainer_are_those_of_prompts_or_none():
    trainer, own = L.Trainer(accelerator="cpu", logger=False), data()
    assert prompt_data(trainer) is None
    trainer.datamodule = L.LightningDataModule()
    assert prompt_data(trainer) is None
    trainer.datamodule = own
    assert prompt_data(trainer) is own
