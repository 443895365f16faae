"""The loop with a critic, which says what a response was expected to earn."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.advantages.base import CriticEstimator
from lit_rl.aggregations import Aggregation, Totals
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.algorithms.schedules import Shape, schedule
from lit_rl.algorithms.setting_checks import check_actor_critic
from lit_rl.models import Critic, CriticSource, PolicyBackbone, evaluation_mode
from lit_rl.models.critic import Values
from lit_rl.models.response_states import ResponseReader
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.types import (
    ActorCriticOutput,
    CriticExperience,
    CriticOutput,
    Experience,
    ModelOutput,
    ScoredRollout,
    Sequences,
    Update,
    ValuedRollout,
)
from lit_rl.value_losses import ClippedSquaredError, ValueLoss


class ActorCritic(PolicyGradient):
    """Policy gradient with a critic. An algorithm is a subclass that names its choices.

    One optimizer trains both, as two groups with a learning rate, a weight decay, a schedule and a
    gradient norm each, on one loss per micro-batch: the policy's plus `value_coef` times the
    critic's, under the same aggregation.

    Args:
        advantage: from rewards and values to advantages and to the targets of the values.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, for both losses.
        value_loss: from values and their targets to a loss per token.
        critic: where the critic comes from.
        value_coef: weight of the value loss. It matters where the critic shares the policy's trunk,
            and to optimizers that do not scale gradients themselves.
        critic_lr: learning rate of the critic; None: that of the policy.
        critic_weight_decay: weight decay of the critic.
        critic_lr_schedule: course of the critic's learning rate, stepped once per optimizer step.
        critic_lr_warmup_steps: optimizer steps over which the critic's learning rate rises from 0:
            AdamW's first steps are as large as the learning rate, whatever the gradient.
        critic_warmup: iterations in which the critic alone is trained; the policy's own schedule
            begins behind them. A critic with a backbone of its own is then trained without a pass
            of the policy.
        loop: the arguments of `PolicyGradient`.

    Raises:
        ValueError: for a setting outside its range.
    """

    provides: ClassVar[type[ScoredRollout]] = ValuedRollout
    advantage: CriticEstimator

    def __init__(
        self,
        advantage: CriticEstimator,
        policy_loss: PolicyLoss,
        aggregation: Aggregation,
        value_loss: ValueLoss = ClippedSquaredError(),
        critic: CriticSource = PolicyBackbone(),
        value_coef: float = 1.0,
        critic_lr: float | None = None,
        critic_weight_decay: float = 0.0,
        critic_lr_schedule: Shape = "constant",
        critic_lr_warmup_steps: int = 0,
        critic_warmup: int = 0,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage, policy_loss=policy_loss, aggregation=aggregation, **loop
        )
        self.value_loss = value_loss
        self.critic_source = critic
        self.value_coef = value_coef
        self.critic_lr = critic_lr
        self.critic_weight_decay = critic_weight_decay
        self.critic_lr_schedule = critic_lr_schedule
        self.critic_lr_warmup_steps = critic_lr_warmup_steps
        self.critic_warmup = critic_warmup
        self.policy_rests = False
        self.critic: Critic
        check_actor_critic(self)

    @property
    def trains_policy(self) -> bool:
        """Whether the warm-up of the critic is over."""
        return self.iteration >= self.critic_warmup

    def build_models(self) -> None:
        """Build the policy; to train it, also the critic."""
        super().build_models()
        if self.is_for_training and not hasattr(self, "critic"):
            self.critic = self.parallelism.of_rank_0(
                lambda: self.critic_source.critic(self.policy, self.tokenizer), shared=self.policy
            )

    @property
    def learners(self) -> list[ResponseReader]:
        """The models that are trained."""
        return [*super().learners, *([self.critic] if hasattr(self, "critic") else [])]

    @property
    def readers(self) -> list[ResponseReader]:
        """The models that read responses."""
        own = hasattr(self, "critic") and self.critic.backbone is not None
        return [*super().readers, *([self.critic] if own else [])]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the actor's group and the critic's."""
        critic = {
            "params": [p for p in self.critic.parameters() if p.requires_grad],
            "name": "critic",
            "weight_decay": self.critic_weight_decay,
            **({} if self.critic_lr is None else {"lr": self.critic_lr}),
        }
        return [*super().parameter_groups(), critic]

    def schedules(self, total_steps: int | None) -> list[Callable[[int], float]]:
        """Return the course of the learning rate of the actor, and of the critic."""
        actor = schedule(
            self.lr_schedule,
            warmup_steps=self.warmup_steps,
            total_steps=total_steps,
            first_step=self.critic_warmup * self.steps_per_iteration,
        )
        critic = schedule(
            self.critic_lr_schedule,
            warmup_steps=self.critic_lr_warmup_steps,
            total_steps=total_steps,
        )
        return [actor, critic]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the weights of the critic out where held-out prompts are answered without it."""
        super().on_load_checkpoint(checkpoint)
        if not hasattr(self, "critic") and not self.parallelism.saves_weights_itself:
            weights = checkpoint["state_dict"].items()
            checkpoint["state_dict"] = {
                name: weight for name, weight in weights if not name.startswith("critic.")
            }

    def on_train_start(self) -> None:
        """Put the critic into training mode, too."""
        super().on_train_start()
        self.critic.train()

    @torch.no_grad()
    def values_under(self, sequences: Sequences) -> Values:
        """Return the values of all responses under the critic in evaluation mode."""
        values = torch.zeros(sequences.mask.shape, dtype=torch.float32, device=self.device)
        end_values = values.new_zeros(len(sequences))
        reading: ResponseReader = self.policy if self.critic.backbone is None else self.critic
        with (
            self.parallelism.whole(reading) as reader,
            self.parallelism.whole(self.critic) as critic,
            evaluation_mode(reader),
            evaluation_mode(critic),
        ):
            for rows in self.micro_batch_rows(sequences):
                part = sequences.select(rows).trimmed()
                states = reader.states(part, with_end=True)
                output = critic.with_end_values(states, part.mask)
                values[rows, : part.mask.shape[1]] = output.values.to(values)
                end_values[rows] = output.end_values.to(values)
        return Values(values, end_values)

    def experience(
        self, scored: ScoredRollout, sequences: Sequences, **log_probs: Tensor | None
    ) -> CriticExperience:
        """Return what the update reads, the critic's values and their targets included."""
        values, end_values = self.values_under(sequences)
        valued = scored.extended(ValuedRollout, values=values, end_values=end_values)
        experience = super().experience(valued, sequences, **log_probs)
        return experience.extended(
            CriticExperience, old_values=values, returns=self.advantage.returns(valued)
        )

    def moves_policy(self, index: int) -> bool:
        """Return whether an update of the iteration under way moves the policy.

        Args:
            index: its number within the iteration, from 0.
        """
        return self.trains_policy

    def update(self, experience: Experience, rows: Tensor, index: int) -> Update:
        """Take one optimizer step on the given rows, of the critic alone where the policy rests."""
        self.policy_rests = self.critic.backbone is not None and not self.moves_policy(index)
        return super().update(experience, rows, index)

    def forward_pass(self, experience: Experience) -> CriticOutput:
        """Return what policy and critic, or the critic alone, say of a micro-batch."""
        if self.policy_rests:
            states = self.critic.states(experience)
            return CriticOutput(values=self.critic(states, experience.mask))
        states = self.policy.states(experience)
        output = self.policy.score(
            states,
            experience,
            temperature=self.sampling.temperature,
            entropy_gradient=self.entropy_coef != 0,
        )
        if self.critic.backbone is not None:
            states = self.critic.states(experience)
        return output.extended(ActorCriticOutput, values=self.critic(states, experience.mask))

    def loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the joint loss of an optimizer step; parts of one step add up."""
        if self.policy_rests:
            actor = self.parallelism.left_out(self.policy.parameters())
        else:
            actor = self.actor_loss(output, experience, totals)
        return actor + self.value_coef * self.critic_loss(output, experience, totals)

    def actor_loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the policy's loss of an optimizer step."""
        return super().loss(output, experience, totals)

    def critic_loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the value loss of an optimizer step."""
        assert isinstance(output, CriticOutput)
        assert isinstance(experience, CriticExperience)
        per_token = self.value_loss(output.values, experience)
        return self.aggregation(per_token, experience.mask, totals)

    @property
    def resting_groups(self) -> frozenset[str]:
        """The actor, while the critic alone is trained."""
        return frozenset() if self.trains_policy else frozenset({"actor"})
