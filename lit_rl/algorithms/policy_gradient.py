"""The critic-free loop: generate, score, prepare, update."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, Totals
from lit_rl.algorithms.hooks import call_hooks
from lit_rl.algorithms.minibatches import check_minibatches, micro_batch_rows, minibatch_rows
from lit_rl.algorithms.old_log_probs import OldLogProbs, RecomputedLogProbs
from lit_rl.algorithms.optimization import accumulate, clip_grad_norm, sum_over_ranks
from lit_rl.algorithms.rl_module import ROLLOUT, SHUFFLE, RLModule
from lit_rl.kl_penalties import KLInLoss, KLPenalty
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.rewards.base import no_response
from lit_rl.types import (
    Experience,
    PolicyOutput,
    Prompts,
    Rollout,
    ScoredRollout,
    Sequences,
    Update,
)


class PolicyGradient(RLModule):
    """Policy gradient without a critic. An algorithm is a subclass that names its choices.

    One training step is one iteration: a batch of prompts is answered `group_size` times each, the
    responses are scored, and the policy is updated `update_epochs * num_minibatches` times.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, over the whole optimizer step.
        kl: estimator of the KL to the reference and the place where it acts.
        kl_coef: weight of the KL; 0 needs no reference.
        entropy_coef: weight of the entropy bonus in the loss.
        group_size: responses per prompt.
        old_log_probs: where the old log-probs of the ratio come from.
        update_epochs: passes over the rollouts of an iteration.
        num_minibatches: optimizer steps per pass.
        skip_zero_advantages: leave rows without advantage out of the passes of the update. They
            still count in every denominator, so the gradient is the same; metrics of the update
            cover the other rows only. Needs a loss without KL and entropy.
        module: the arguments of `RLModule`.

    Raises:
        ValueError: for settings that contradict each other, with settings that do not.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator,
        policy_loss: PolicyLoss,
        aggregation: Aggregation,
        kl: KLPenalty = KLInLoss(),
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        group_size: int = 8,
        old_log_probs: OldLogProbs = RecomputedLogProbs(),
        update_epochs: int = 1,
        num_minibatches: int = 1,
        skip_zero_advantages: bool = False,
        **module: Any,
    ) -> None:
        super().__init__(**module)
        self.advantage = advantage
        self.policy_loss = policy_loss
        self.aggregation = aggregation
        self.kl = kl
        self.kl_coef = kl_coef
        self.entropy_coef = entropy_coef
        self.group_size = group_size
        self.old_log_probs = old_log_probs
        self.update_epochs = update_epochs
        self.num_minibatches = num_minibatches
        self.skip_zero_advantages = skip_zero_advantages
        self._check_settings()

    def _check_settings(self) -> None:
        for name, least in (("update_epochs", 1), ("num_minibatches", 1), ("kl_coef", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.group_size < self.advantage.min_group_size:
            raise ValueError(
                f"group_size is {self.group_size}, but {type(self.advantage).__name__} compares "
                "the responses of one prompt: it needs at least "
                f"{self.advantage.min_group_size}, usually 8"
            )
        if self.old_log_probs.single_update and self.steps_per_iteration > 1:
            raise ValueError(
                f"old_log_probs {type(self.old_log_probs).__name__} is right for one update per "
                f"rollout, but update_epochs {self.update_epochs} x num_minibatches "
                f"{self.num_minibatches} make {self.steps_per_iteration}; use RecomputedLogProbs"
            )
        if self.skip_zero_advantages and (self.entropy_coef != 0 or self.uses_reference):
            raise ValueError(
                "skip_zero_advantages leaves out rows that the entropy bonus and the KL would "
                f"train: entropy_coef {self.entropy_coef} and kl_coef {self.kl_coef} must be 0"
            )

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration."""
        return self.update_epochs * self.num_minibatches

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the frozen reference."""
        return self.kl_coef > 0

    def setup(self, stage: str) -> None:
        """Refuse a batch that does not divide into minibatches, before any work is done."""
        super().setup(stage)
        datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if stage == "fit" and datamodule is not None:
            check_minibatches(datamodule.batch_size, self.group_size, self.num_minibatches)

    def training_step(self, prompts: Prompts, batch_idx: int) -> None:
        """One iteration: a Lightning batch is a batch of prompts."""
        rollout = self.generate(prompts)
        scored = self.score(rollout)
        experience = self.prepare(scored)
        call_hooks(self.trainer, "on_rollout", self, scored, experience)
        updates: list[Update] = []
        for epoch in range(self.update_epochs):
            for rows in self.minibatches(len(prompts), epoch):
                update = self.update(experience, rows, index=len(updates))
                call_hooks(self.trainer, "on_minibatch", self, update)
                updates.append(replace(update, micro_batches=()))  # the numbers stay
        self.finish(updates)

    def generate(self, prompts: Prompts) -> Rollout:
        """Answer each prompt `group_size` times with the policy."""
        seed = (self.seed, ROLLOUT, self.iteration)
        return self.sample(prompts, self.sampling, group_size=self.group_size, seed=seed)

    def score(self, rollout: Rollout) -> ScoredRollout:
        """Give every response its reward, which must apply to some response on some rank."""
        scored = self.reward(rollout)
        if not sum_over_ranks(self.trainer, (~scored.missing).sum()):
            raise ValueError(no_response(self.reward))
        return scored

    @torch.no_grad()
    def prepare(self, scored: ScoredRollout) -> Experience:
        """Add old and reference log-probs and advantages; missing rows do not count."""
        sequences = Sequences(
            prompt_ids=scored.prompt_ids,
            prompt_mask=scored.prompt_mask,
            response_ids=scored.response_ids,
            mask=scored.mask & ~scored.missing[:, None],
        )
        old = self.old_log_probs(scored, lambda: self.log_probs_under(self.policy, sequences))
        ref = None
        if self.uses_reference:
            (reference,) = self._reference
            ref = self.log_probs_under(reference, sequences)
            rollout_log_probs = scored.sampler_log_probs if old is None else old
            penalty = self.kl.reward(rollout_log_probs, ref, sequences.mask)
            scored = replace(scored, rewards=scored.rewards - self.kl_coef * penalty)
        return sequences.extended(
            Experience,
            sampler_log_probs=scored.sampler_log_probs,
            advantages=self.advantage(scored),
            old_log_probs=old,
            ref_log_probs=ref,
        )

    def minibatches(self, num_prompts: int, epoch: int) -> list[Tensor]:
        """Deal the rows of the rollout into the minibatches of one epoch."""
        return minibatch_rows(
            num_prompts,
            self.group_size,
            self.num_minibatches,
            seed=(self.seed, SHUFFLE, self.iteration, epoch),
            rank=self.global_rank,
            world_size=self.trainer.world_size,
        )

    def update(self, experience: Experience, rows: Tensor, index: int) -> Update:
        """Take one optimizer step on the given rows, in micro-batches."""
        minibatch = experience.select(rows.to(experience.mask.device))
        totals = Totals(*sum_over_ranks(self.trainer, torch.stack(Totals.of(minibatch.mask))))
        if self.skip_zero_advantages:
            minibatch = minibatch.select(minibatch.advantages.ne(0).any(1).nonzero()[:, 0])
        # A rank without rows still joins the reduction of the gradient, with a row of weight 0.
        weight = float(len(minibatch) > 0)
        trained = minibatch if weight else experience.select(rows.new_zeros(1))

        optimizer, loss = self.raw_optimizer, torch.zeros((), device=self.device)
        micro_batches = []
        groups = micro_batch_rows(trained, self.micro_batch_tokens)
        for number, group in enumerate(groups, start=1):
            micro_batch = trained.select(group).trimmed()
            output = self.output(self.policy, micro_batch)
            part = weight * self.loss(output, micro_batch, totals)
            with accumulate(self.trainer, last=number == len(groups)):
                # Data parallel strategies average over ranks what the totals make a sum.
                self.manual_backward(part * self.trainer.world_size)
            loss += part.detach()
            micro_batches.append((micro_batch, output.map_tensors(Tensor.detach)))

        where = f"iteration {self.iteration + 1}, update {index + 1}"
        grad_norm = clip_grad_norm(optimizer, self.max_grad_norm, where)
        self.optimizers().step()  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        return Update(
            micro_batches=tuple(micro_batches) if weight else (),
            loss=loss,
            grad_norm=grad_norm,
            index=index,
        )

    def loss(
        self, output: PolicyOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the loss of an optimizer step; parts of one step add up."""
        if experience.old_log_probs is None:
            experience = replace(experience, old_log_probs=output.log_probs.detach())
        per_token = self.policy_loss(output.log_probs, experience)
        if experience.ref_log_probs is not None:
            per_token = per_token + self.kl_coef * self.kl.loss(
                output.log_probs, experience.ref_log_probs, experience.mask
            )
        per_token = per_token - self.entropy_coef * output.entropy
        return self.aggregation(per_token, experience.mask, totals)

    def finish(self, updates: list[Update]) -> None:
        """Count the iteration and log what is known once per iteration."""
        self.iteration += 1
        losses = torch.stack([update.loss for update in updates])
        self.log_dict(
            {
                "step": float(self.iteration),
                "iteration": float(self.iteration),
                "loss": sum_over_ranks(self.trainer, losses.mean()),
                "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
                "learning_rate": self.raw_optimizer.param_groups[0]["lr"],
                "kl/coef": self.kl_coef,
            }
        )
        call_hooks(self.trainer, "on_iteration_end", self)
