"""TRL's GRPOTrainer on a workload."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from compare.clock import StageClock
from compare.fixed_rollout import perturb, response_ids
from compare.process import Job
from compare.workloads import (
    END_ID,
    KL_COEF,
    LEARNING_RATE,
    check_lengths,
    planned_lengths,
    prompts,
    reward,
)


def rewards(completions: list[str], **kwargs: Any) -> list[float]:
    return [reward(text) for text in completions]


class PlannedEnds(LogitsProcessor):
    """Lets each row end at its planned length, and no row before."""

    def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.rows_by_length = {
            length: [row for row, own in enumerate(lengths) if own == length]
            for length in set(lengths)
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, END_ID] = -torch.inf
        rows = self.rows_by_length.get(input_ids.shape[1] - self.prompt_tokens + 1)
        if rows:
            scores[rows] = -torch.inf
            scores[rows, END_ID] = 0.0
        return scores


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer with a clock: nothing but the ends of the rows is done in another way."""

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(**settings)
        self.job = job
        self.clock = StageClock()

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.clock.stage("log_probs"):
            inputs = super()._prepare_inputs(generation_batch)
        self.clock.switch("update")
        return inputs

    def _generate(self, prompts: list[Any]) -> Any:
        job = self.job
        planned = planned_lengths(job.workload, job.seed, iteration=len(self.clock.iterations))
        with self.clock.stage("generate"):
            if job.workload.ragged:
                self.model.generate = _ending(self.model, planned, job.workload.prompt_tokens)
            generated = super()._generate(prompts)
        check_lengths(planned, [len(ids) for ids in generated[1]], "TRL")
        return generated

    def _calculate_rewards(self, *args: Any) -> Any:
        with self.clock.stage("score"):
            return super()._calculate_rewards(*args)


def _ending(model: PreTrainedModel, planned: list[int], prompt_tokens: int) -> Callable[..., Any]:
    ends = LogitsProcessorList([PlannedEnds(planned, prompt_tokens)])

    def generate(**inputs: Any) -> Any:
        return type(model).generate(model, **inputs, logits_processor=ends)

    return generate


class IterationEnds(TrainerCallback):
    def __init__(self, clock: StageClock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.end_iteration()


def _settings(job: Job, iterations: int) -> dict[str, Any]:
    """What a user who knows TRL would choose for this work on processors.

    All responses in one batch, no gradient checkpointing, AdamW in one fused kernel, no worker
    processes. The old log-probs need no pass, as there is one update.
    """
    workload = job.workload
    tokenizer = AutoTokenizer.from_pretrained(job.folder)
    texts = prompts(workload, tokenizer, iterations * workload.num_prompts)
    exactly = {} if workload.ragged else {"min_new_tokens": workload.min_new_tokens}
    config = GRPOConfig(
        output_dir=job.folder + "-trl",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=workload.num_rollouts,
        num_generations=workload.group_size,
        max_completion_length=workload.max_new_tokens,
        generation_kwargs=exactly,
        beta=KL_COEF,
        use_bias_correction_kl=False,  # plain k3, as in the paper
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        max_steps=iterations,
        shuffle_dataset=False,
        logging_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return {
        "model": job.folder,
        "reward_funcs": rewards,
        "args": config,
        "train_dataset": Dataset.from_dict({"prompt": texts}),
        "processing_class": tokenizer,
    }


def measure(job: Job) -> dict[str, Any]:
    """Train for some iterations and return what the clock says."""
    trainer = MeasuredTrainer(job, **_settings(job, job.total_iterations))
    trainer.add_callback(IterationEnds(trainer.clock))
    trainer.train()
    return trainer.clock.result(job.workload.warm_up)


class LossKeeper(GRPOTrainer):
    """Keeps the loss and the norm of its gradient, before clipping."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        self.loss = float(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.grad_norm = super()._get_grad_norm(*args, **kwargs)
        return self.grad_norm


def agree(job: Job) -> dict[str, Any]:
    """Return loss and gradient norm of one update on the fixed rollout."""
    settings = _settings(job, iterations=1)
    vocab = len(settings["processing_class"])
    completions = [ids for group in response_ids(job.workload, vocab) for ids in group]

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    trainer = LossKeeper(rollout_func=rollout, **settings)
    perturb(trainer.model.parameters())
    trainer.train()
    return {"loss": trainer.loss, "gradient norm": float(trainer.grad_norm)}
