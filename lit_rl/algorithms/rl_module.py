"""What every algorithm has beside its models: optimizer, checkpoint, held-out prompts."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.algorithms.due_validation import validate_now
from lit_rl.algorithms.hooks import RLCallback, callbacks_of
from lit_rl.algorithms.identity import check_identity, model_name, tokenizer_name
from lit_rl.algorithms.non_finite import check_finite_weights
from lit_rl.algorithms.optimization import check_trainer, hyperparameters, restore_hyperparameters
from lit_rl.algorithms.policy_module import PolicyModule
from lit_rl.algorithms.random_state import random_states, restore_random_states
from lit_rl.algorithms.resumed_loop import take_resumed_loop
from lit_rl.algorithms.schedules import Shape, schedule
from lit_rl.data import align_loop, prompt_data
from lit_rl.evaluation import Evaluation, HeldOutMetrics, sample_rows
from lit_rl.models.adapters import without_base
from lit_rl.rewards import Reward
from lit_rl.rewards.base import no_response
from lit_rl.rewards.checked_scores import WrongValueError
from lit_rl.types import Prompts

# First number after the run's seed, so that no two purposes share their random numbers.
ROLLOUT, VALIDATION, PREDICTION, SHUFFLE, REFILL = range(5)


class RLModule(PolicyModule):
    """A policy that is scored and optimized by hand. Loops are subclasses.

    Args:
        reward: from responses to rewards.
        optimizer: from parameter groups to an optimizer.
        lr_schedule: course of the learning rate after the warm-up, stepped once per optimizer step;
            `linear` and `cosine` fall to 0 at the end of the run.
        warmup_steps: optimizer steps over which the learning rate rises from 0.
        max_grad_norm: limit of the norm of the gradient; None for no limit.
        evaluation: how held-out prompts are scored.
        models: the arguments of `PolicyModule`.

    Raises:
        ValueError: for a setting outside its range.
    """

    def __init__(
        self,
        reward: Reward,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_schedule: Shape = "constant",
        warmup_steps: int = 0,
        max_grad_norm: float | None = 1.0,
        evaluation: Evaluation = Evaluation(),
        **models: Any,
    ) -> None:
        super().__init__(**models)
        self.automatic_optimization = False
        self.reward = reward
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.evaluation = evaluation
        self.iteration = 0
        self.planned_iterations: int | None = None
        self.training_begun = False
        self.validation_due = False
        self._validated_iteration = -1
        self._warned_of_no_reward = False
        self._random_states: list[dict[str, Any]] | None = None
        self.reference_moved = False
        self.validation_samples: list[dict[str, Any]] = []
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}, must be above 0, such as 1.0; null for no limit"
            )

    @property
    @abstractmethod
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration, the same in every iteration."""

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
        super().setup(stage)
        if stage != "predict":
            self.reward.setup()
            data = prompt_data(self.trainer)
            for rows in (data.held_out_rows, data.train_rows) if data is not None else ():
                if rows:
                    self.reward.check_columns(rows[0].columns)

    def teardown(self, stage: str) -> None:
        """Let the reward end what it has begun."""
        self.reward.teardown()

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
        """One optimizer with named groups, and their schedules over optimizer steps.

        Raises:
            ValueError: for a setting that the optimizer refuses.
        """
        try:
            optimizer = self.optimizer(self.parameter_groups())
        except ValueError as error:
            raise ValueError(
                f"optimizer: {error}; examples are lr 0.0005, betas [0.9, 0.99], weight_decay 0.0"
            ) from error
        horizon = self.planned_iterations = self.num_iterations
        total_steps = None if horizon is None else horizon * self.steps_per_iteration
        scheduler = LambdaLR(optimizer, self.schedules(total_steps))
        self._configured = hyperparameters(optimizer)
        return [optimizer], [scheduler]

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
        if self.is_for_training:
            take_resumed_loop(self.trainer)
        data = prompt_data(self.trainer)
        if data is not None and (position := checkpoint.get(type(data).__qualname__)):
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
            "tokenizer": self._tokenizer_name,
        }
        if self.reference_fingerprint is not None:
            identity["reference"] = f"weights {self.reference_fingerprint[:16]}"
        if self.is_for_training and (models := self.reward.models):
            identity["reward model"] = ", ".join(
                f"{name}, weights {weights[:16]}" for name, weights in models.items()
            )
        return identity

    @cached_property
    def _tokenizer_name(self) -> str:
        return tokenizer_name(self.tokenizer)

    @property
    def _is_reference_restored(self) -> bool:
        return any(c.moves_reference for c in callbacks_of(self.trainer, RLCallback))

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
            WrongValueError: before a first iteration is over, since then the configuration is
                wrong. Later it is a matter of chance, and a warning says so once.
        """
        message = f"in {where} {no_response(self.reward)}"
        if not self.training_begun or self.iteration == 0:
            raise WrongValueError(message)
        if not self._warned_of_no_reward:
            self._warned_of_no_reward = True
            rank_zero_warn(f"{message}. Nothing is learnt from them, and the run goes on")

    def predict_step(self, prompts: Prompts, batch_idx: int) -> list[dict[str, Any]]:
        """Answer each prompt once, as `sampling` says."""
        rollout = self.sample(prompts, self.sampling, group_size=1, seed=(self.seed, PREDICTION))
        return sample_rows(rollout)
