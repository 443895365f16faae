"""Runs every scenario in one process of one or two; the tests compare what the processes saw.

    WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT=... python worker.py FOLDER STRATEGY/SCENARIO ...

writes `FOLDER/2-0.pt`: by scenario what this process rolled out, trained and logged.
"""

import ctypes
import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.tensor import DTensor

from lit_rl.advantages import LeaveOneOut, MovingAverage, ReturnToGo
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import TokenMean
from lit_rl.algorithms import (
    DAPO,
    GRPO,
    PPO,
    TRPO,
    DrGRPO,
    PenalizedTRPO,
    PolicyGradient,
    Reinforce,
    ReinforcePlusPlus,
)
from lit_rl.callbacks import (
    AdaptiveKL,
    CriticMetrics,
    HuggingFaceExport,
    RatioMetrics,
    ReferenceSync,
    RewardMetrics,
    RLCallback,
    StopOnKL,
    Throughput,
)
from lit_rl.checkpoints import VerifiedCheckpointIO
from lit_rl.data import PromptDataModule
from lit_rl.evaluation import Evaluation
from lit_rl.functional import fingerprint
from lit_rl.generation import Generator, SamplingSettings
from lit_rl.kl_penalties import KLInReward
from lit_rl.models import (
    CriticSource,
    LoRA,
    PretrainedBackbone,
    PretrainedCausalLM,
    RandomCausalLM,
    SharedTrunk,
    policy,
)
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.rewards import PythonFunction, WeightedSum
from lit_rl.strategies import FSDP2, DeepSpeedOnCPU
from lit_rl.tasks import Task
from lit_rl.types import Rollout

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

from tiny_job import LLAMA, TRAINER, build_source, num_fives

LARGE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10}
"""26 million weights, 104 MB."""
WORLD_SIZE, RANK = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_RANK"))
# One process takes each minibatch whole, two of them in many small pieces.
MICRO_BATCH_TOKENS = 24 if WORLD_SIZE > 1 else 10_000
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Numbers(Task):
    """Prompts of one to three digits, so that ranks pad to different widths."""

    numbers: tuple[int, ...] = (3, 71, 502, 9, 640, 28, 555, 17, 4, 831, 66, 290)

    def train(self) -> Dataset:
        return self._data_set(self.numbers)

    def held_out(self) -> Dataset:
        return self._data_set((7, 12, 308, 68, 901))

    def _data_set(self, numbers: tuple[int, ...]) -> Dataset:
        texts = [str(number) for number in numbers]
        return Dataset.from_dict({"prompt": [f"{t}>" for t in texts], "answer": texts})


def after_long_prompts(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward without signal after short prompts."""
    values = zip(prompts, num_fives(responses), strict=True)
    return [value if len(prompt) == 4 else 0.0 for prompt, value in values]


def after_one_prompt(prompts: list[str], responses: list[str]) -> list[float | None]:
    """A part that applies to one of twelve prompts: to rows of one rank at a time, or to none."""
    return [float(len(r)) if p == "71>" else None for p, r in zip(prompts, responses, strict=True)]


def sometimes_missing(prompts: list[str], responses: list[str]) -> list[float | None]:
    """A reward that is missing for some responses, none of them to a held-out prompt."""
    return [
        None if {"4", "5"} & set(prompt) and "9" in response else value
        for prompt, response, value in zip(prompts, responses, num_fives(responses), strict=True)
    ]


class OneAndThreeTokens(Generator):
    """Answers the prompt of row 0 with one token and that of row 1 with three."""

    def __call__(self, policy, tokenizer, prompts, sampling, *, group_size, seed):
        mask = torch.tensor([[True, row == 1, row == 1] for row in prompts.row_ids])
        mask = mask.repeat_interleave(group_size, 0)
        repeated = {
            name: tuple(entry for entry in getattr(prompts, name) for _ in range(group_size))
            for name in ("texts", "answers")
        }
        return Rollout(
            prompt_ids=prompts.ids.repeat_interleave(group_size, 0),
            prompt_mask=prompts.mask.repeat_interleave(group_size, 0),
            response_ids=mask.long() * 5,
            mask=mask,
            sampler_log_probs=torch.zeros(mask.shape),
            finished=mask[:, 0],
            prompts=repeated["texts"],
            responses=tuple("5" * n for n in mask.sum(1).tolist()),
            answers=repeated["answers"],
            columns={},
            group_size=group_size,
        )


class Ones(AdvantageEstimator):
    """An advantage of 1 everywhere."""

    def __call__(self, scored):
        return scored.mask.float()


class FourAndOne(PolicyLoss):
    """A loss of 4 for the token of a response of one, and of 1 for each token of a longer one."""

    def __call__(self, log_probs, experience):
        value = torch.where(experience.mask.sum(1) == 1, 4.0, 1.0)[:, None] * experience.mask
        return value * (log_probs - log_probs.detach()).exp()


class NotFinite(PPO):
    """PPO whose first update is not finite on rank 1; gradients of the other rank are finite.

    Args:
        where: "loss", or "gradient" alone; None: there is no such update, only the others.
    """

    def __init__(self, where: str | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.where = where
        self.broken = False

    def minibatches(self, epoch: int) -> list[torch.Tensor]:
        rows = super().minibatches(epoch)
        return rows[1:] if self.where is None and self.iteration == epoch == 0 else rows

    def update(self, experience, rows, index):
        self.broken = RANK == 1 and self.where is not None and self.iteration == index == 0
        return super().update(experience, rows, index)

    def loss(self, output, experience, totals):
        if self.broken and self.where == "gradient":
            output.log_probs.register_hook(lambda gradient: gradient * math.nan)
        loss = super().loss(output, experience, totals)
        return loss * math.nan if self.broken and self.where == "loss" else loss


class Measured(PPO):
    """PPO that keeps how much the resident memory grew at most while models were built."""

    def configure_model(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        super().configure_model()
        self.peak = resident("VmHWM") - before


class NoCritic(CriticSource):
    """A critic that cannot be built."""

    def critic(self, policy, tokenizer):
        raise ValueError("there is no critic")


class Recorder(RLCallback):
    """Keeps what this process sees, and writes checkpoints after some iterations."""

    def __init__(self, checkpoints: Mapping[int, Path]) -> None:
        self.checkpoints = checkpoints
        self.seen: dict[str, list[Any]] = {
            name: [] for name in ("prompts", "responses", "parts", "backward", "updates", "metrics")
        }

    def on_rollout(self, trainer, module, scored, experience):
        self.seen["prompts"].append(scored.prompts)
        self.seen["responses"].append(scored.responses)
        self.seen["parts"].append(scored.reward_parts)

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen["backward"].append(loss.item())

    def on_minibatch(self, trainer, module, update):
        fingerprint = weights(module).double().sum().item()
        self.seen["updates"].append((len(update.micro_batches), fingerprint))

    def on_validation_end(self, trainer, pl_module):
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.seen["metrics"].append(metrics)
        if path := self.checkpoints.get(pl_module.iteration):
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer, pl_module):
        """Keep what this process has of the state of the optimizer."""
        optimizer = pl_module.raw_optimizer
        states = getattr(optimizer, "optimizer", optimizer).state.values()  # of an engine, within
        parts = [state[name] for state in states for name in sorted(state)]
        whole = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
        self.seen["optimizer"] = [part.detach().clone() for part in whole if torch.is_tensor(part)]
        if isinstance(trainer.strategy, DeepSpeedOnCPU) and trainer.strategy.stage == 3:
            gathering = trainer.strategy.deepspeed_engine.optimizer.parameter_offload
            order = gathering.get_param_coordinator()
            self.seen["knows_order"] = [order.is_complete_trace()]


def build_module(kind: type[PolicyGradient] = GRPO, **settings: Any) -> PolicyGradient:
    defaults = {
        "source": build_source(),
        "reward": PythonFunction(num_fives),
        "group_size": 4,
        "sampling": SamplingSettings(max_new_tokens=8),
        # AdamW would hide a wrong scale of the gradient.
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "kl_coef": 0.0,
        "update_epochs": 2,
        "num_minibatches": 2,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        "evaluation": Evaluation(num_samples=2, pass_at=(2,)),
    }
    return kind(**{**defaults, **settings})


def build_data(**settings: Any) -> PromptDataModule:
    defaults = {
        "task": Numbers(),
        "batch_size": 6,
        "eval_batch_size": 4,
        "max_prompt_tokens": 8,
    }
    return PromptDataModule(**{**defaults, **settings})


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": partial(DDPStrategy, process_group_backend="gloo", timeout=TIMEOUT),
    "fsdp2": partial(FSDP2, timeout=TIMEOUT),
    "fsdp2_file": partial(FSDP2, save_distributed_checkpoint=False, timeout=TIMEOUT),
    # A threshold of 0 keeps no weight whole: these models are smaller than any other.
    **{
        f"deepspeed_{stage}": partial(
            DeepSpeedOnCPU, stage=stage, persistence_threshold=0, timeout=TIMEOUT
        )
        for stage in (1, 2, 3)
    },
}


def build_strategy(name: str) -> Strategy:
    if WORLD_SIZE == 1 and name == "ddp":
        return SingleDeviceStrategy(torch.device("cpu"))
    return STRATEGIES[name]()


def build_trainer(strategy: str = "ddp", **settings: Any) -> L.Trainer:
    defaults = {
        **TRAINER,
        "devices": WORLD_SIZE,
        "strategy": build_strategy(strategy),
        "plugins": [VerifiedCheckpointIO()],
        "val_check_interval": 1,
        "check_val_every_n_epoch": None,
    }
    return L.Trainer(**{**defaults, **settings})


def weights(module: PolicyGradient) -> torch.Tensor:
    """Return all weights, whole, in the order of `module.parameters()`."""
    parts = []
    for learner in module.learners:
        with module.parallelism.whole(learner) as model:
            parts += [p.detach().flatten().clone() for p in model.parameters()]
    return torch.cat(parts)


def train(
    iterations: int = 3,
    data: dict[str, Any] | None = None,
    checkpoints: Mapping[int, Path] = MappingProxyType({}),
    resume: Path | None = None,
    export: Path | None = None,
    controllers: tuple[RLCallback, ...] = (),
    strategy: str = "ddp",
    precision: str = "32-true",
    validate_first: bool = False,
    built_before: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train and return what this process saw."""
    exports = [HuggingFaceExport(str(export.absolute()))] if export else []
    module, recorder = build_module(**settings), Recorder(checkpoints if WORLD_SIZE == 2 else {})
    whole = module if built_before else build_module(**settings)
    whole.configure_model()
    initial = weights(whole)
    trainer = build_trainer(
        strategy,
        precision=precision,
        num_sanity_val_steps=-1 if validate_first else 0,
        max_steps=iterations * module.steps_per_iteration,
        callbacks=[
            RewardMetrics(),
            RatioMetrics(),
            CriticMetrics(),
            Throughput(),
            *controllers,
            *exports,
            recorder,
        ],
    )
    trainer.fit(module, build_data(**(data or {})), ckpt_path=resume)
    return {**recorder.seen, "initial": initial, "weights": weights(module)}


def built(strategy: str = "ddp", **settings: Any) -> dict[str, Any]:
    """Build models and return hashes of their weights, their bytes and the memory it took."""
    module: Any = build_module(Measured, **settings)
    build_trainer(strategy, max_steps=0).fit(module, build_data())
    models = [*module.learners, module.reference]
    hashes, size = [], 0
    for model in models:
        with module.parallelism.whole(model) as whole:
            hashes.append(fingerprint(dict(whole.named_parameters())))
            size += sum(p.numel() * p.dtype.itemsize for p in whole.parameters())
    of_reference = module.reference_fingerprint
    return {"hashes": hashes, "bytes": size, "peak": module.peak, "reference": of_reference}


def resident(name: str) -> int:
    """Return a number of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def predict(checkpoint: Path | None = None, strategy: str = "ddp") -> list[tuple[str, str]]:
    """Return prompt and response of each prediction of this process."""
    trainer = build_trainer(strategy)
    module = build_module(GRPO if checkpoint is None else PPO)
    batches = trainer.predict(module, build_data(), ckpt_path=checkpoint)
    return [(row["prompt"], row["response"]) for batch in batches for row in batch]


def refusal(
    data: dict[str, Any],
    trainer: dict[str, Any],
    resume: Path | None = None,
    strategy: str = "ddp",
    **settings: Any,
) -> str:
    """Return the error that ends a run."""
    module = build_module(**settings)
    try:
        run = build_trainer(strategy, max_steps=4, **trainer)
        run.fit(module, build_data(**data), ckpt_path=resume)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def damaged(checkpoint: Path, strategy: str = "ddp", **settings: Any) -> str:
    """Return the error that ends a run which is to go on from a checkpoint with a changed byte.

    The largest file of a folder has it, in the middle.
    """
    path = checkpoint.with_name(f"damaged-{checkpoint.name}")
    if RANK == 0:  # with which the other rank connects behind this
        (shutil.copytree if checkpoint.is_dir() else shutil.copy)(checkpoint, path)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    return refusal({}, {}, resume=path, strategy=strategy, **settings)


def scenarios(folder: Path, strategy: str) -> dict[str, Callable[[], Any]]:
    """What is run, by name: most of it with one and with two processes."""
    grpo = partial(train, kl_coef=0.1, entropy_coef=0.01)
    parts = {"fives": PythonFunction(num_fives), "rare": PythonFunction(after_one_prompt)}
    grpo_file, ppo_file, trained_file, sync_file = (
        folder / f"{name}-{strategy}.ckpt" for name in ("grpo", "ppo", "trained", "sync")
    )
    trained_folder = folder / "ppo-fsdp2-2"
    adamw_files = [folder / f"adamw-{strategy}-{n}.ckpt" for n in (1, 2)]
    ppo = partial(train, kind=PPO, kl_coef=0.1, critic_lr=0.05)
    adamw = partial(ppo, critic_lr=1e-3, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    skipping = partial(ppo, kind=NotFinite, iterations=2, kl_coef=0.0)
    adaptive = partial(AdaptiveKL, target=0.01, unit="nats_per_token", horizon=100)
    both: dict[str, Callable[[], Any]] = {
        "grpo": partial(grpo, checkpoints={1: grpo_file}),
        # Few and long responses: the longest of one rank is not that of the other.
        "uneven": partial(
            grpo,
            iterations=2,
            group_size=2,
            seed=1,
            sampling=SamplingSettings(max_new_tokens=24),
            prompts_at_a_time=2,
        ),
        "token_mean": partial(
            train,
            aggregation=TokenMean(),
            reward=PythonFunction(sometimes_missing),
            max_grad_norm=None,
        ),
        "dr_grpo": partial(train, kind=DrGRPO, gradient_checkpointing=True),
        "kl_in_reward": partial(train, kl=KLInReward(), kl_coef=0.1, advantage=LeaveOneOut()),
        "skip_zero_advantages": partial(
            train, skip_zero_advantages=True, reward=PythonFunction(after_long_prompts)
        ),
        "reward_parts": partial(train, reward=WeightedSum(parts, {"rare": 0.1})),
        "ppo": partial(
            ppo,
            critic_warmup=1,
            controllers=(adaptive(0.1),),
            checkpoints={1: ppo_file, 3: trained_file},
            export=folder / f"ppo-{strategy}-{WORLD_SIZE}",
        ),
        # Its weight is that of the checkpoint, not the one it would begin with.
        "ppo_resumed": partial(ppo, critic_warmup=1, controllers=(adaptive(0.9),), resume=ppo_file),
        # Several passes without the critic come before the first with it.
        "ppo_validated": partial(ppo, iterations=1, validate_first=True),
        "ppo_shared_trunk": partial(ppo, critic=SharedTrunk(), controllers=(adaptive(0.1),)),
        "ppo_lora": partial(
            ppo,
            adapter=LoRA(rank=4),
            gradient_checkpointing=True,
            export=folder / f"ppo_lora-{strategy}-{WORLD_SIZE}",
        ),
        "bfloat16": partial(ppo, precision="bf16-mixed"),
        "ppo_adamw": partial(adamw, checkpoints=dict(enumerate(adamw_files, start=1))),
        "ppo_adamw_resumed_1": partial(adamw, resume=adamw_files[0]),
        "ppo_adamw_resumed_2": partial(adamw, resume=adamw_files[1]),
        # No iteration is left.
        "ppo_adamw_over": partial(
            adamw,
            iterations=2,
            resume=adamw_files[1],
            export=folder / f"over-{strategy}-{WORLD_SIZE}",
        ),
        "skipped_loss": partial(skipping, where="loss"),
        "skipped_gradient": partial(skipping, where="gradient"),
        "nothing_skipped": partial(skipping, where=None),
        "skipped_in_bfloat16": partial(skipping, where="gradient", precision="bf16-mixed"),
        "reference_sync": partial(
            train,
            kl_coef=0.1,
            controllers=(ReferenceSync(1, weight=0.5),),
            checkpoints={1: sync_file},
        ),
        "reference_sync_resumed": partial(
            train, kl_coef=0.1, controllers=(ReferenceSync(1, weight=0.5),), resume=sync_file
        ),
        # The second minibatch of an iteration shows a KL beyond any limit: the updates end there.
        "ppo_stopped": partial(train, kind=PPO, kl_coef=0.0, controllers=(StopOnKL(limit=1e-12),)),
        "dapo": partial(
            train,
            kind=DAPO,
            reward=PythonFunction(after_long_prompts),
            filter_truncated=False,
            max_rounds=3,
            top_entropy_fraction=0.5,
        ),
        "trpo": partial(
            train,
            kind=TRPO,
            max_kl=0.02,
            cg_iterations=5,  # more of them amplify rounding
            fisher_one_in=3,
            entropy_coef=0.01,
            critic_lr=0.05,
            gradient_checkpointing=True,
        ),
        "trpo_penalty": partial(
            train, kind=PenalizedTRPO, beta=2.0, target_kl=0.001, critic_lr=0.05
        ),
        "reinforce_plus_plus": partial(train, kind=ReinforcePlusPlus, kl_coef=0.1),
        "reinforce": partial(
            train,
            kind=Reinforce,
            advantage=ReturnToGo(baseline=MovingAverage(0.5)),
            update_epochs=1,
            num_minibatches=1,
        ),
        "same_prompt": partial(train, iterations=1, data={"task": Numbers(numbers=(71,) * 6)}),
        "one_and_three_tokens": partial(
            train,
            iterations=1,
            data={"task": Numbers(numbers=(3, 4)), "batch_size": 2},
            kind=PolicyGradient,
            generator=OneAndThreeTokens(),
            advantage=Ones(),
            policy_loss=FourAndOne(),
            aggregation=TokenMean(),
            group_size=1,
            update_epochs=1,
            num_minibatches=1,
        ),
        "resumed": partial(grpo, resume=grpo_file),
        "built": partial(
            built,
            kl_coef=0.1,
            source=RandomCausalLM(alphabet="0123456789>", config=LARGE),
        ),
        "built_before": partial(grpo, built_before=True),
        "tied": partial(
            grpo,
            source=RandomCausalLM(
                alphabet="0123456789>", config={**LLAMA, "tie_word_embeddings": True}
            ),
        ),
        "pretrained": partial(
            ppo,
            source=PretrainedCausalLM(str(trained_folder)),
            critic=PretrainedBackbone(str(trained_folder)),
        ),
        "predict": predict,
        "predict_resumed": partial(predict, trained_file),
    }
    only_two: dict[str, Callable[[], Any]] = {
        "grpo again": grpo,
        "odd batch": partial(refusal, {"batch_size": 5}, {}),
        "two samplers": partial(refusal, {}, {"use_distributed_sampler": True}),
        "trpo refused": partial(refusal, {}, {}, kind=TRPO),
        "adapter refused": partial(refusal, {}, {}, adapter=LoRA(target_modules=["nowhere"])),
        "critic refused": partial(refusal, {}, {}, kind=PPO, critic=NoCritic()),
        "damaged": partial(damaged, adamw_files[0], kind=PPO),
    }
    return both | only_two | {"resume refused": partial(refusal, {}, {}, resume=grpo_file)}


def main() -> None:
    """Run all scenarios and write what this process saw."""
    torch.set_num_threads(1)
    folder, *names = sys.argv[1:]
    # Few tokens share a pass of the head, so that ranks differ in the number of its passes.
    if WORLD_SIZE > 1:
        policy.token_log_probs_and_entropy = partial(
            policy.token_log_probs_and_entropy, chunk_tokens=8
        )
    results = {}
    for name in names:
        strategy, _, scenario = name.partition("/")
        print("scenario", name, flush=True)
        results[name.removeprefix("ddp/")] = scenarios(Path(folder), strategy)[scenario](
            **({} if strategy == "ddp" else {"strategy": strategy})
        )
    torch.save(results, Path(folder) / f"{WORLD_SIZE}-{RANK}.pt")


if __name__ == "__main__":
    main()
