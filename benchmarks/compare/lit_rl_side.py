"""lit_rl on a workload, as a plain script around lightning's Trainer."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compare.clock import StageClock
from compare.fixed_rollout import perturb, response_ids
from compare.process import Job
from compare.workloads import (
    KL_COEF,
    LEARNING_RATE,
    Workload,
    check_lengths,
    planned_lengths,
    prompts,
    reward,
)
from lit_rl.advantages import GroupNormalized
from lit_rl.algorithms import GRPO, PPO, CurrentLogProbs
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.data import PromptDataModule
from lit_rl.generation import Generator, SamplingSettings
from lit_rl.generation.row_sampler import row_uniforms
from lit_rl.models import Policy, PretrainedCausalLM
from lit_rl.rewards import PythonFunction
from lit_rl.tasks import Task
from lit_rl.types import Experience, Prompts, Rollout, ScoredRollout, Update

STAGE_OF_METHOD = {
    "generate": "generate",
    "score": "score",
    "prepare": "log_probs",
    "update": "update",
}
LEAST_UNIFORM = 0.25
"""A random number of 0 draws the end token, the first of the vocabulary; from here on, none does:
its probability is far below."""


def rewards(responses: list[str]) -> list[float]:
    return [reward(text) for text in responses]


def slow_rewards(responses: list[str]) -> list[float]:
    """20 ms for each response."""
    time.sleep(0.02 * len(responses))
    return rewards(responses)


class PromptList(Task):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def train(self) -> Dataset:
        return Dataset.from_dict({"prompt": self.texts, "answer": [""] * len(self.texts)})

    def held_out(self) -> Dataset:
        return self.train().select([0])


class PlannedEnds:
    """In place of `row_uniforms`: random numbers with which each row draws its end as planned.

    The numbers alone are changed, so that whatever draws with them works as always.
    """

    def __init__(self, plan: Callable[[int], list[int]]) -> None:
        self.plan = plan
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        lengths = torch.tensor(self.plan(self.calls))
        self.calls += 1
        uniforms = LEAST_UNIFORM + (1 - LEAST_UNIFORM) * row_uniforms(*args, **kwargs)
        return uniforms.scatter(1, lengths[:, None] - 1, 0.0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the function in every module of lit_rl that has it."""
        users = [
            module
            for name, module in sys.modules.items()
            if name.startswith("lit_rl.") and vars(module).get("row_uniforms") is row_uniforms
        ]
        for module in users:
            vars(module)["row_uniforms"] = self
        try:
            yield
        finally:
            for module in users:
                vars(module)["row_uniforms"] = row_uniforms


class Measurement(RLCallback):
    """Times the methods of the module, and checks the lengths of the responses."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.clock: StageClock

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for method, part in STAGE_OF_METHOD.items():
            setattr(pl_module, method, self._timed(part, getattr(pl_module, method)))

    def _timed(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.stage(stage):
                return method(*args, **kwargs)

        return timed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock = StageClock()

    def on_rollout(
        self, trainer: L.Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        planned = planned_lengths(self.job.workload, self.job.seed, module.iteration)
        check_lengths(planned, scored.mask.sum(1).tolist(), "lit_rl")

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.end_iteration()


def _module(job: Job, **settings: Any) -> GRPO | PPO:
    """The work of `trl_side._settings`; generator and passes are the defaults of lit_rl."""
    workload = job.workload
    common = {
        "source": PretrainedCausalLM(job.folder),
        "reward": PythonFunction(rewards),
        "sampling": SamplingSettings(
            max_new_tokens=workload.max_new_tokens,
            min_new_tokens=0 if workload.ragged else workload.min_new_tokens,
        ),
        "group_size": workload.group_size,
        "kl_coef": KL_COEF,
        "update_epochs": 1,
        "num_minibatches": 1,
        "old_log_probs": CurrentLogProbs(),
        "optimizer": partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=True),
        **settings,
    }
    if job.micro_batch_tokens is not None:
        common["micro_batch_tokens"] = job.micro_batch_tokens
    if workload.algorithm == "PPO":
        return PPO(**common)
    return GRPO(advantage=GroupNormalized(epsilon=1e-4), **common)  # TRL's epsilon


def bare_trainer(callback: Callback, **settings: Any) -> L.Trainer:
    """Return a trainer of one epoch on one device that does nothing but train."""
    return L.Trainer(
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **settings,
    )


def _fit(job: Job, module: GRPO | PPO, iterations: int, callback: Callback) -> None:
    workload = job.workload
    texts = prompts(workload, module.tokenizer, iterations * workload.num_prompts)
    data = PromptDataModule(
        task=PromptList(texts),
        batch_size=workload.num_prompts,
        eval_batch_size=1,
        max_prompt_tokens=workload.prompt_tokens,
    )
    bare_trainer(callback, accelerator="cpu").fit(module, data)


def measure(job: Job) -> dict[str, Any]:
    """Train for some iterations and return what the clock says."""
    ends = PlannedEnds(partial(planned_lengths, job.workload, job.seed))
    measurement = Measurement(job)
    with ends.installed() if job.workload.ragged else nullcontext():
        _fit(job, _module(job), job.total_iterations, measurement)
    return measurement.clock.result(job.workload.warm_up)


class FixedRollout(Generator):
    """Returns the fixed responses, whatever the policy."""

    def __init__(self, workload: Workload, vocab: int) -> None:
        self.responses = response_ids(workload, vocab)

    def __call__(
        self,
        policy: Policy,
        tokenizer: Any,
        prompts: Prompts,
        sampling: SamplingSettings,
        *,
        group_size: int,
        seed: tuple[int, ...],
    ) -> Rollout:
        rows = [torch.tensor(ids) for row_id in prompts.row_ids for ids in self.responses[row_id]]
        ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return Rollout(
            prompt_ids=prompts.ids.repeat_interleave(group_size, dim=0),
            prompt_mask=prompts.mask.repeat_interleave(group_size, dim=0),
            response_ids=ids,
            mask=mask,
            sampler_log_probs=torch.zeros(mask.shape),
            finished=torch.zeros(len(rows), dtype=torch.bool),
            prompts=tuple(text for text in prompts.texts for _ in range(group_size)),
            responses=tuple(tokenizer.batch_decode(rows, skip_special_tokens=True)),
            answers=("",) * len(rows),
            columns={},
            group_size=group_size,
        )


class LossKeeper(RLCallback):
    """Moves the policy away from its reference, and keeps loss and gradient norm of the update."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        perturb(pl_module.policy.parameters())

    def on_minibatch(self, trainer: L.Trainer, module: Any, update: Update) -> None:
        self.result = {"loss": float(update.loss), "gradient norm": update.grad_norms["actor"]}


def agree(job: Job) -> dict[str, Any]:
    """Return loss and gradient norm of one update on the fixed rollout."""
    vocab = len(PretrainedCausalLM(job.folder).tokenizer())
    keeper = LossKeeper()
    _fit(job, _module(job, generator=FixedRollout(job.workload, vocab)), 1, keeper)
    return keeper.result
