"""What every algorithm has: models, optimizer, checkpoint, held-out prompts."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import lightning as L
import torch
from jaxtyping import Int
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from lit_rl.algorithms.due_validation import validate_now
from lit_rl.algorithms.hooks import RLCallback
from lit_rl.algorithms.identity import check_identity, model_name, tokenizer_name
from lit_rl.algorithms.minibatches import micro_batch_rows
from lit_rl.algorithms.non_finite import check_finite_weights
from lit_rl.algorithms.optimization import check_trainer, hyperparameters, restore_hyperparameters
from lit_rl.algorithms.random_state import random_states, restore_random_states
from lit_rl.algorithms.schedules import Shape, schedule
from lit_rl.data import PromptDataModule, align_loop
from lit_rl.evaluation import Evaluation, HeldOutMetrics, sample_rows
from lit_rl.functional import fingerprint, minimum_over_ranks
from lit_rl.generation import CachedGenerator, Generator, SamplingSettings
from lit_rl.models import Adapter, CausalLMSource, Policy, evaluation_mode, frozen_copy
from lit_rl.models.adapters import (
    base_fingerprint,
    base_names,
    base_parameters,
    put_on_base,
    switch_adapter,
    without_base,
)
from lit_rl.models.response_states import ResponseReader, packing_fits
from lit_rl.rewards import Reward
from lit_rl.rewards.base import no_response
from lit_rl.strategies import Parallelism, parallelism_of
from lit_rl.types import PolicyOutput, Prompts, Rollout, Sequences

# First number after the run's seed, so that no two purposes share their random numbers.
ROLLOUT, VALIDATION, PREDICTION, SHUFFLE, REFILL = range(5)

T = TypeVar("T")


class RLModule(L.LightningModule):
    """A policy that answers prompts, is scored and optimized by hand. Loops are subclasses.

    Args:
        source: where the model and its tokenizer come from.
        reward: from responses to rewards.
        sampling: how responses are drawn.
        generator: what draws them.
        adapter: what is trained upon the frozen weights of the model; None: the weights themselves.
        optimizer: from parameter groups to an optimizer.
        lr_schedule: course of the learning rate after the warm-up, stepped once per optimizer step;
            `linear` and `cosine` fall to 0 at the end of the run.
        warmup_steps: optimizer steps over which the learning rate rises from 0.
        max_grad_norm: limit of the norm of the gradient; None for no limit.
        micro_batch_tokens: tokens of one forward and backward pass, prompts and padding included;
            bounds the memory and changes no result.
        packing: let all tokens of a pass form one row without padding, in which a prompt stands
            once for all its responses: the same numbers for less work. A comparison on the first
            rollouts switches it off, with a warning, for an architecture that it does not fit.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        activation_offload: keep activations, or those that checkpointing keeps, in host memory
            until the backward pass; for an accelerator.
        evaluation: how held-out prompts are scored.
        seed: seeds weights, shuffling and sampling; the CLI passes `seed_everything`.

    Raises:
        ValueError: for a setting outside its range.
    """

    def __init__(
        self,
        source: CausalLMSource,
        reward: Reward,
        sampling: SamplingSettings = SamplingSettings(),
        generator: Generator = CachedGenerator(),
        adapter: Adapter | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_schedule: Shape = "constant",
        warmup_steps: int = 0,
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int = 16384,
        packing: bool = True,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        evaluation: Evaluation = Evaluation(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.source = source
        self.reward = reward
        self.sampling = sampling
        self.generator = generator
        self.adapter = adapter
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.packing = packing
        self.packing_verified = False
        self.gradient_checkpointing = gradient_checkpointing
        self.activation_offload = activation_offload
        self.evaluation = evaluation
        self.seed = seed
        self.parallelism = Parallelism()
        self.iteration = 0
        self.planned_iterations: int | None = None
        self.training_begun = False
        self.validation_due = False
        self._validated_iteration = -1
        self._warned_of_no_reward = False
        self._random_states: list[dict[str, Any]] | None = None
        self.policy: Policy
        # In a list, so that it is no submodule: neither in the checkpoint nor in the optimizer.
        self._reference: list[Policy] | None = None
        self.reference_fingerprint: str | None = None
        self.reference_moved = False
        self.validation_samples: list[dict[str, Any]] = []
        if source.quantized and adapter is None:
            raise ValueError(
                "source.load_in_4bit freezes the weights: train an adapter upon them, such as "
                "--config configs/model/lora.yaml, or use load_in_4bit false"
            )
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}, must be above 0, such as 1.0; null for no limit"
            )

    @property
    @abstractmethod
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration, the same in every iteration."""

    @property
    @abstractmethod
    def uses_reference(self) -> bool:
        """Whether something needs the frozen reference."""

    @property
    def reference(self) -> Policy | None:
        """The frozen reference, if something needs it."""
        return self._reference[0] if self._reference else None

    @property
    def is_for_training(self) -> bool:
        """Whether the models are to be trained, not only to answer held-out prompts."""
        return self._trainer is None or self.trainer.state.fn == TrainerFn.FITTING

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return self.source.tokenizer()

    @property
    def max_context_tokens(self) -> int | None:
        """Tokens that the model can read, prompt and response together; None if unlimited."""
        return self.source.max_context_tokens()

    @property
    def num_iterations(self) -> int | None:
        """Iterations of the whole run as the Trainer bounds it; None for a run without end."""
        self.trainer.fit_loop.setup_data()
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        bounds = [
            self.trainer.num_training_batches * epochs if epochs not in (None, -1) else math.inf,
            math.ceil(steps / self.steps_per_iteration) if steps != -1 else math.inf,
        ]
        return None if math.isinf(min(bounds)) else int(min(bounds))

    def setup(self, stage: str) -> None:
        """Refuse settings that the loop cannot honour and rewards that are not there."""
        check_trainer(self.trainer)
        self.take_strategy()
        # A strategy that loads weights itself finds those of the critic, which answers do not need.
        self.strict_loading = stage == "fit" or not self.parallelism.saves_weights_itself
        if self.source.quantized and self.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "source.load_in_4bit needs an accelerator: on some CPUs bitsandbytes rearranges "
                "the weights while it samples, with which training then goes wrong. Use "
                "--model.source.load_in_4bit false, or --trainer.accelerator gpu"
            )
        if self.activation_offload and self.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "activation_offload moves activations from an accelerator to host memory, and this "
                "run has no accelerator: use --model.gradient_checkpointing true to save memory, "
                "or --trainer.accelerator gpu"
            )
        if stage != "predict":
            self.reward.setup()

    def teardown(self, stage: str) -> None:
        """Let the reward end what it has begun."""
        self.reward.teardown()

    def take_strategy(self) -> None:
        """Take what the strategy of the trainer asks for.

        Raises:
            ValueError: for a model that the strategy cannot put into shards, and for one that is
                in shards already.
        """
        if self.parallelism.strategy is not self.trainer.strategy:
            self.parallelism.check_free()
            self.parallelism = parallelism_of(self.trainer.strategy)
        if self.source.quantized and not self.parallelism.weights_are_whole:
            raise ValueError(
                "source.load_in_4bit makes weights that cannot be put into shards: use "
                "--trainer.strategy ddp, or --model.source.load_in_4bit false"
            )

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`: an engine around this module calls it for a pass."""
        return function(*arguments)

    def configure_model(self) -> None:
        """Build the models and put them where the strategy keeps them."""
        with self.parallelism.building():
            self.build_models()
        self.pack(self.packing)
        if self.adapter is not None and not self.parallelism.weights_are_whole:
            _ = self.base_fingerprint  # as long as the base is whole
        if self._reference:
            self.take_fingerprint(self._reference[0])
            self._reference = [self.parallelism.placed_reference(self._reference[0], self.policy)]
        self.parallelism.place(self.learners)

    def build_models(self) -> None:
        """Build the policy; to train it, also the reference where a KL term needs one."""
        initial: Policy | None = None
        if not hasattr(self, "policy"):
            initial = self.policy = self.initial_policy()
            if self.gradient_checkpointing:
                self.policy.enable_gradient_checkpointing()
            self.policy.offloads = self.activation_offload
        if self.is_for_training and self._reference is None:
            initial = initial or self.initial_policy()
            self._reference = [self.reference_to(initial)] if self.uses_reference else []

    def take_fingerprint(self, reference: Policy) -> None:
        """Keep a hash of what the reference does not share with the policy, before it is placed.

        A reference that is the base beneath an adapter has the hash of the base.
        """
        if self.reference_fingerprint is None:
            if self.adapter is not None and self.adapter.starts_at_base:
                self.reference_fingerprint = self.base_fingerprint
            else:
                shared = set(self.policy.parameters())
                own = {name: p for name, p in reference.named_parameters() if p not in shared}
                self.reference_fingerprint = fingerprint(own)

    def initial_policy(self) -> Policy:
        """Return a new policy, as it is before training."""
        model = self.source.model(self.seed, frozen=self.adapter is not None)
        if self.adapter is not None:
            self.adapter.inject(model, self.seed)
        return Policy(model)

    def reference_to(self, initial: Policy) -> Policy:
        """Return the frozen reference that is the initial policy, upon the base of the policy."""
        reference = frozen_copy(initial)
        if self.adapter is not None:
            put_on_base(reference, base_names(self.policy, base_parameters(self.policy)))
            if self.adapter.starts_at_base:
                switch_adapter(reference, on=False)
        return reference

    @property
    def learners(self) -> list[ResponseReader]:
        """The models that are trained."""
        return [self.policy]

    @property
    def readers(self) -> list[ResponseReader]:
        """The models that read responses."""
        return [self.policy, *(self._reference or [])]

    def pack(self, packs: bool) -> None:
        """Let every model read packed rows where it can, or none."""
        self.packing = packs and all(reader.can_pack for reader in self.readers)
        for reader in self.readers:
            reader.packs = self.packing

    def verify_packing(self, sequences: Sequences) -> None:
        """Once per process, compare packed and padded passes of every model on some of the rows.

        Where they differ, on any rank, all passes are padded from here on.
        """
        if self.packing and not self.packing_verified:
            count = len(sequences)
            rows = torch.tensor(sorted({0, min(1, count - 1), max(count - 2, 0), count - 1}))
            part = sequences.select(rows.to(self.device)).trimmed()
            fits = [self._packing_fits(reader, part) for reader in self.readers]
            if not minimum_over_ranks(torch.tensor(float(all(fits)), device=self.device)):
                self.pack(False)
                warnings.warn(
                    f"packed and padded passes of {type(self.policy.model).__name__} differ: its "
                    "passes are padded from here on, which takes longer. packing: false says so "
                    "from the start",
                    stacklevel=2,
                )
        self.packing_verified = True

    def _packing_fits(self, reader: ResponseReader, part: Sequences) -> bool:
        with self.parallelism.whole(reader) as model:
            return packing_fits(model, part)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return what the optimizer trains: named groups, with settings of their own if need be."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        return [{"params": parameters, "name": "actor"}]

    def schedules(self, total_steps: int | None) -> list[Callable[[int], float]]:
        """Return the course of the learning rate of each group, by optimizer step.

        Args:
            total_steps: optimizer steps of the whole run; None for a run without end.
        """
        return [schedule(self.lr_schedule, warmup_steps=self.warmup_steps, total_steps=total_steps)]

    def configure_optimizers(self) -> Any:
        """One optimizer with named groups, and their schedules over optimizer steps."""
        optimizer = self.optimizer(self.parameter_groups())
        horizon = self.planned_iterations = self.num_iterations
        total_steps = None if horizon is None else horizon * self.steps_per_iteration
        scheduler = LambdaLR(optimizer, self.schedules(total_steps))
        self._configured = hyperparameters(optimizer)
        return [optimizer], [scheduler]

    def on_fit_start(self) -> None:
        """Move the reference, which is no submodule, to the device."""
        if self.uses_reference and self.reference is None:
            raise ValueError(
                "a callback needs the reference, but the models were built without it: give the "
                "callbacks to the trainer that trains this module first"
            )
        if self.reference is not None:
            self.reference.to(self.device)

    def on_train_start(self) -> None:
        """Let the configured settings of the optimizer hold over those of a checkpoint.

        Random numbers go on as the checkpoint has them, whatever was drawn meanwhile. A validation
        that was to follow the checkpoint is made up for.
        """
        self.training_begun = True
        self.policy.train()
        # A run that is resumed with other updates per iteration is where its own plan has it.
        self.scheduler.last_epoch = self.iteration * self.steps_per_iteration
        restore_hyperparameters(self.raw_optimizer, self.scheduler, self._configured)
        if self._random_states is not None:
            restore_random_states(
                self._random_states,
                rank=self.global_rank,
                world_size=self.trainer.world_size,
                device=self.device,
            )
            self._random_states = None
        if self.validation_due:
            self.validation_due = False
            validate_now(self.trainer)

    @property
    def raw_optimizer(self) -> Any:
        """The optimizer itself, or the engine's; steps go through `optimizers()`."""
        (optimizer,) = self.trainer.strategy.optimizers
        return optimizer

    @property
    def scheduler(self) -> LambdaLR:
        """The schedule of the learning rate."""
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR)
        return scheduler

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the number of finished iterations, which seeds the sampling, and whose it is.

        Of a base beneath an adapter, which the source gives, only a hash is stored, unless the
        strategy stores weights in shards: then the base is among them.

        Raises:
            FloatingPointError: on every rank, if a trained weight is not finite.
        """
        check_finite_weights(self)
        checkpoint["lit_rl"] = {
            "iteration": self.iteration,
            "reference_moved": self.reference_moved,
            "identity": self.identity,
            "random": random_states(self.device),
            "validation_due": self.validation_due
            or (self.trainer.validating and self._validated_iteration != self.iteration),
        }
        if self.adapter is not None:
            checkpoint["lit_rl"]["base"] = self.base_fingerprint
        if self.adapter is not None and not self.parallelism.saves_weights_itself:
            checkpoint["state_dict"] = without_base(checkpoint["state_dict"], self.base_weights)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue counting iterations, and begin where the data begin.

        Raises:
            ValueError: if the checkpoint is not of this algorithm, model and tokenizer, or if its
                adapter stands upon another base.
        """
        if "lit_rl" not in checkpoint:
            raise ValueError("the checkpoint is not of an algorithm of lit_rl")
        own = dict(self.identity)
        if not self.is_for_training:  # weights alone are read
            del own["algorithm"]
        check_identity(checkpoint["lit_rl"].get("identity", {}), own)
        if self.adapter is not None:
            if checkpoint["lit_rl"].get("base") != self.base_fingerprint:
                raise ValueError(
                    f"the checkpoint is not of an adapter upon the weights of {self.source}: use "
                    "the source of the run that wrote it, or leave the adapter out if it had none"
                )
            self.add_base(checkpoint)
        self.iteration = checkpoint["lit_rl"]["iteration"]
        self._random_states = checkpoint["lit_rl"].get("random")
        self.validation_due = checkpoint["lit_rl"].get("validation_due", False)
        self.load_memory(checkpoint["lit_rl"])
        if self.reference_moved and self.reference is not None and not self._is_reference_restored:
            raise ValueError(
                "the checkpoint is of a run whose reference moved with the policy, but no callback "
                "of this run takes that reference over, so the KL would be to the initial policy: "
                "add lit_rl.callbacks.ReferenceSync, or set kl_coef to 0"
            )
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        position = checkpoint.get(type(datamodule).__qualname__)
        if isinstance(datamodule, PromptDataModule) and position:
            align_loop(checkpoint["loops"]["fit_loop"], position)

    def add_base(self, checkpoint: dict[str, Any]) -> None:
        """Put the weights beneath the adapters, which it does not hold, into a checkpoint."""
        if self.adapter is not None and not self.parallelism.saves_weights_itself:
            checkpoint["state_dict"].update(self.base_weights)

    def load_memory(self, stored: Mapping[str, Any]) -> None:
        """Take over what belongs to the weights of a checkpoint: neither counts nor positions.

        Args:
            stored: what `on_save_checkpoint` put into the checkpoint.
        """
        self.reference_moved = stored.get("reference_moved", False)

    def go_back_to(self, checkpoint: dict[str, Any]) -> None:
        """Take over weights, state of the optimizer and memory of an earlier iteration of this run.

        The number of the iteration, the data, the schedule and random numbers go on as they are.

        Args:
            checkpoint: one of this run, of a strategy that keeps the weights whole.
        """
        self.add_base(checkpoint)
        strategy = self.trainer.strategy
        strategy.load_model_state_dict(checkpoint, strict=self.strict_loading)
        strategy.load_optimizer_state_dict(checkpoint)
        restore_hyperparameters(self.raw_optimizer, self.scheduler, self._configured)
        self.load_memory(checkpoint["lit_rl"])

    @property
    def identity(self) -> dict[str, str]:
        """What a checkpoint of this run belongs to."""
        identity = {
            "algorithm": type(self).__name__,
            "model": model_name(self.policy.model),
            "tokenizer": tokenizer_name(self.tokenizer),
        }
        if self.reference_fingerprint is not None:
            identity["reference"] = f"weights {self.reference_fingerprint[:16]}"
        if self.is_for_training and (models := self.reward.models):
            identity["reward model"] = ", ".join(
                f"{name}, weights {weights[:16]}" for name, weights in models.items()
            )
        return identity

    @property
    def _is_reference_restored(self) -> bool:
        return any(
            isinstance(callback, RLCallback) and callback.moves_reference
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
        )

    @property
    def base_weights(self) -> dict[str, nn.Parameter]:
        """The frozen weights beneath the adapters, by their names in the whole module."""
        return base_names(self, base_parameters(self.policy))

    @cached_property
    def base_fingerprint(self) -> str:
        """A hash of the frozen weights beneath the adapters."""
        return base_fingerprint(self.policy)

    def sample(
        self,
        prompts: Prompts,
        sampling: SamplingSettings,
        *,
        group_size: int,
        seed: tuple[int, ...],
    ) -> Rollout:
        """Answer prompts with the policy; rows of one seed, row id and number are the same."""
        with self.parallelism.whole(self.policy) as policy:
            return self.generator(
                policy, self.tokenizer, prompts, sampling, group_size=group_size, seed=seed
            )

    def output(self, policy: Policy, sequences: Sequences) -> PolicyOutput:
        """Return log-probs and entropy of the responses at the sampling temperature."""
        output: PolicyOutput = policy(sequences, temperature=self.sampling.temperature)
        return output

    def micro_batch_rows(self, sequences: Sequences) -> list[Int[Tensor, " selected"]]:
        """Group the rows that share a forward pass, within the budget of tokens."""
        return micro_batch_rows(sequences, self.micro_batch_tokens, packs=self.policy.packs)

    @torch.no_grad()
    def output_under(self, policy: Policy, sequences: Sequences) -> PolicyOutput:
        """Return log-probs and entropy of all responses under a policy in evaluation mode."""
        dtype = torch.promote_types(torch.float32, next(policy.parameters()).dtype)
        log_probs = torch.zeros(sequences.mask.shape, dtype=dtype, device=self.device)
        entropy = torch.zeros_like(log_probs)
        with self.parallelism.whole(policy) as model, evaluation_mode(model):
            for rows in self.micro_batch_rows(sequences):
                part = sequences.select(rows).trimmed()
                output = self.output(model, part)
                log_probs[rows, : part.mask.shape[1]] = output.log_probs
                entropy[rows, : part.mask.shape[1]] = output.entropy
        return PolicyOutput(log_probs=log_probs, entropy=entropy)

    def on_validation_epoch_start(self) -> None:
        """Begin to collect."""
        self.held_out = HeldOutMetrics(self.evaluation, self.device)

    def validation_step(self, prompts: Prompts, batch_idx: int) -> None:
        """Score held-out prompts, greedy and sampled; always with the same random numbers."""
        seed = (self.seed, VALIDATION)
        greedy = self.reward(
            self.sample(prompts, self.sampling.as_greedy(), group_size=1, seed=seed)
        )
        self.held_out.update_greedy(greedy)
        if batch_idx == 0:
            self.validation_samples = sample_rows(greedy)
        if self.evaluation.num_samples:
            sampled = self.sample(
                prompts, self.sampling, group_size=self.evaluation.num_samples, seed=seed
            )
            self.held_out.update_sampled(self.reward(sampled))

    def on_validation_epoch_end(self) -> None:
        """Log the measures over all held-out prompts."""
        self._validated_iteration = self.iteration
        values = self.held_out.results()
        if math.isnan(values["val/reward"]):
            self.without_reward(f"the validation after iteration {self.iteration}")
        # They are the same on every rank; without a reduction Lightning warns of each of them.
        position = {"step": float(self.iteration), "iteration": float(self.iteration)}
        self.log_dict({**position, **values}, sync_dist=True)

    def without_reward(self, where: str) -> None:
        """Take note, on all ranks together, that the reward applied to no response.

        Args:
            where: names the responses, such as "iteration 3".

        Raises:
            ValueError: before a first iteration is over, since then the configuration is wrong.
                Later it is a matter of chance, and a warning says so once.
        """
        message = f"in {where} {no_response(self.reward)}"
        if not self.training_begun or self.iteration == 0:
            raise ValueError(message)
        if not self._warned_of_no_reward:
            self._warned_of_no_reward = True
            rank_zero_warn(f"{message}. Nothing is learnt from them, and the run goes on")

    def predict_step(self, prompts: Prompts, batch_idx: int) -> list[dict[str, Any]]:
        """Answer each prompt once, as `sampling` says."""
        rollout = self.sample(prompts, self.sampling, group_size=1, seed=(self.seed, PREDICTION))
        return sample_rows(rollout)
