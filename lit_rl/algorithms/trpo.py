"""Trust region policy optimization: the constrained step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.advantages import GAE
from lit_rl.advantages.base import CriticEstimator
from lit_rl.aggregations import Aggregation, TokenMean, Totals
from lit_rl.algorithms.actor_critic import ActorCritic
from lit_rl.algorithms.minibatches import minibatch_rows
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.algorithms.rl_module import SHUFFLE
from lit_rl.algorithms.setting_checks import check_trpo
from lit_rl.algorithms.trust_region import TrustRegion
from lit_rl.data import prompt_data
from lit_rl.functional import sum_over_ranks
from lit_rl.functional.trust_region import (
    LineSearchStep,
    conjugate_gradient,
    longest_step,
)
from lit_rl.models.adapters import adapter_layers
from lit_rl.models.fisher import plain_attention
from lit_rl.policy_losses import Surrogate
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.types import Experience, Update

CG_TOLERANCE = 1e-5
"""Residual of the conjugate gradient, relative to the gradient, at which it ends early."""

NO_STEP = LineSearchStep(fraction=0.0, improvement=0.0, kl=0.0)


@dataclass(frozen=True, kw_only=True)
class TrustRegionUpdate(Update):
    """An update whose policy is moved by a step of its own.

    Attributes:
        policy_step: the step of the policy; None: it was the critic's turn alone.
    """

    policy_step: LineSearchStep | None


class TRPO(ActorCritic):
    """Trust region policy optimization (arXiv:1502.05477, section 6 and appendix C).

    The policy takes the step that raises the surrogate most while the mean KL(old || new) over the
    response tokens, exact over the vocabulary, stays within `max_kl`: the direction x solves
    (F + damping) x = gradient by conjugate gradient, with F the Fisher information of the policy on
    the rows of the update; its length is sqrt(2 max_kl / x^T F x); a backtracking line search takes
    the longest fraction of it that improves and keeps the limit. If none does, the policy stays.
    What is improved is the whole loss of the policy, an entropy bonus and a KL to the reference in
    the loss included. Decisions are taken over all micro-batches and ranks, alike on every rank.

    The policy takes a step in each update of the first epoch, one with `num_minibatches` 1; further
    epochs train the critic alone. The limit holds for each step, from the policy before it. The
    critic is trained by the optimizer, which never moves the policy: learning rate, schedule,
    weight decay and gradient limit of the policy have no effect.

    A step takes `cg_iterations` + 1 products with F, each at the price of three to four gradients
    on the same rows. It holds a copy of the policy and some vectors of its size, and its attention
    needs memory in the square of the positions.

    Args:
        advantage: from rewards and values to advantages and to the targets of the values.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, for policy and critic.
        max_kl: the size of the trust region, in nats per token.
        damping: what is added to the diagonal of F for the direction; 0 follows the paper's
            formula, and more turns the step from the natural gradient to the plain one.
        cg_iterations: the most iterations of the conjugate gradient.
        line_search_steps: the number of fractions that the line search tries.
        backtrack_coef: ratio of a fraction to the one before it.
        accept_ratio: share of the improvement expected of a linear objective that a step must
            reach.
        fisher_one_in: the Fisher information is taken of one row in so many, which must divide the
            rows of an update; the paper's experiments use a tenth. The line search sees all rows.
        update_epochs: passes over the rollouts of an iteration.
        loop: the arguments of `ActorCritic`.

    Raises:
        ValueError: for a setting outside its range, and for models and precisions with which the
            step would be wrong.
    """

    def __init__(
        self,
        advantage: CriticEstimator = GAE(),
        policy_loss: PolicyLoss = Surrogate(),
        aggregation: Aggregation = TokenMean(),
        max_kl: float = 0.01,
        damping: float = 0.1,
        cg_iterations: int = 10,
        line_search_steps: int = 10,
        backtrack_coef: float = 0.5,
        accept_ratio: float = 0.1,
        fisher_one_in: int = 1,
        update_epochs: int = 4,
        **loop: Any,
    ) -> None:
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            update_epochs=update_epochs,
            **loop,
        )
        self.max_kl = max_kl
        self.damping = damping
        self.cg_iterations = cg_iterations
        self.line_search_steps = line_search_steps
        self.backtrack_coef = backtrack_coef
        self.accept_ratio = accept_ratio
        self.fisher_one_in = fisher_one_in
        check_trpo(self)

    def setup(self, stage: str) -> None:
        """Refuse a trainer with which the step cannot be computed."""
        super().setup(stage)
        if stage == "fit" and not self.parallelism.weights_are_whole:
            raise ValueError(
                f"trainer.strategy {type(self.trainer.strategy).__name__} keeps the policy in "
                "parts, which the step of TRPO would have to move as one vector and back. Use "
                "--trainer.strategy ddp or auto, or another algorithm, such as PPO"
            )
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision {self.trainer.precision} is too coarse for the second "
                "derivatives of the KL, of which the step of TRPO is made. Use --trainer.precision "
                "32-true"
            )
        if stage == "fit" and (data := prompt_data(self.trainer)) is not None:
            num_rows = data.batch_size * self.group_size // self.num_minibatches
            if num_rows % self.fisher_one_in:
                valid = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
                nearest = min(valid, key=lambda n: abs(n - self.fisher_one_in))
                raise ValueError(
                    f"fisher_one_in {self.fisher_one_in} does not divide the {num_rows} rows of an "
                    f"update; {nearest} would do"
                )

    def build_models(self) -> None:
        """Build policy and critic, which must not share trained weights.

        Raises:
            ValueError: if they do, or if the policy has no second derivative.
        """
        super().build_models()
        if any(layer.lora_magnitude_vector for layer in adapter_layers(self.policy).values()):
            raise ValueError(
                f"adapter {type(self.adapter).__name__} is DoRA, whose gradient takes the norms of "
                "rows as constants: its derivative is not the curvature of which the step of TRPO "
                "is made. Use LoRA with use_dora false, or another algorithm"
            )
        if self.is_for_training and self.critic.backbone is None:
            raise ValueError(
                f"critic {type(self.critic_source).__name__} reads the policy's own hidden states, "
                "but the value loss may not move the policy out of its trust region; use "
                "lit_rl.models.PolicyBackbone"
            )

    @property
    def resting_groups(self) -> frozenset[str]:
        """The actor: the policy is left to its own step."""
        return frozenset({"actor"})

    def moves_policy(self, index: int) -> bool:
        """Return whether an update is one of the first epoch, behind the warm-up of the critic."""
        return super().moves_policy(index) and index < self.num_minibatches

    def update(self, experience: Experience, rows: Tensor, index: int) -> TrustRegionUpdate:
        """Take one optimizer step of the critic, and in the first epoch the step of the policy."""
        update = super().update(experience, rows, index)
        step = None
        if self.moves_policy(index):
            step = self.policy_step(experience, rows, self.fisher_rows(index))
        return TrustRegionUpdate(**vars(update), policy_step=step)

    def fisher_rows(self, index: int) -> Tensor:
        """Return the rows of an update of the first epoch that the Fisher information is taken of.

        A finer deal of the same permutation: the first part of the minibatch on all ranks.
        """
        parts = minibatch_rows(
            self.prompt_ranks,
            self.group_size,
            self.num_minibatches * self.fisher_one_in,
            seed=(self.seed, SHUFFLE, self.iteration, 0),
            rank=self.global_rank,
        )
        return parts[index * self.fisher_one_in]

    def micro_batches(self, experience: Experience, rows: Tensor) -> list[Experience]:
        """Return the given rows in groups that share a pass."""
        chosen = experience.select(rows.to(experience.mask.device))
        groups = self.micro_batch_rows(chosen)
        return [chosen.select(group).trimmed() for group in groups]

    def policy_step(
        self, experience: Experience, rows: Tensor, fisher_rows: Tensor
    ) -> LineSearchStep:
        """Move the policy within the trust region; it stays where no step is accepted."""
        counts = Totals.of(experience.mask[rows.to(experience.mask.device)])
        totals = Totals(*sum_over_ranks(torch.stack(counts)))
        if not totals.tokens:
            return NO_STEP
        region = TrustRegion(
            policy=self.policy,
            micro_batches=self.micro_batches(experience, rows),
            totals=totals,
            fisher_micro_batches=self.micro_batches(experience, fisher_rows),
            temperature=self.sampling.temperature,
            loss=partial(PolicyGradient.loss, self),
        )
        with plain_attention():
            loss, gradient = region.loss_and_gradient()
            direction = conjugate_gradient(
                lambda vector: region.fisher_product(vector) + self.damping * vector,
                -gradient,
                iterations=self.cg_iterations,
                tolerance=CG_TOLERANCE,
            )
            step = longest_step(direction, region.fisher_product(direction), max_kl=self.max_kl)
            expected_improvement = float(-gradient @ step)
            if not expected_improvement > 0:
                return NO_STEP
            return region.search(
                step,
                loss=loss,
                expected_improvement=expected_improvement,
                max_kl=self.max_kl,
                accept_ratio=self.accept_ratio,
                backtrack_coef=self.backtrack_coef,
                max_steps=self.line_search_steps,
            )

    def norms_and_rates(self, updates: list[Update]) -> dict[str, float]:
        """Return those of the critic: the policy is not moved by the optimizer."""
        values = super().norms_and_rates(updates)
        return {name: value for name, value in values.items() if name.startswith("critic/")}

    def finish(self, updates: list[Update]) -> None:
        """Count the iteration and log the steps of the policy, too."""
        steps = [update.policy_step for update in updates if isinstance(update, TrustRegionUpdate)]
        self.log_dict(_metrics([step for step in steps if step is not None]))
        super().finish(updates)


def _metrics(steps: Sequence[LineSearchStep]) -> dict[str, float]:
    rejected = [float(not step.fraction) for step in steps]
    return {
        "trust_region/kl": _mean([step.kl for step in steps]),
        "trust_region/step_fraction": _mean([step.fraction for step in steps]),
        "trust_region/improvement": _mean([step.improvement for step in steps]),
        "trust_region/rejected_fraction": _mean(rejected),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
