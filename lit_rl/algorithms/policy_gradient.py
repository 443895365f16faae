"""The critic-free loop: generate, score, prepare, update."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.aggregations import Aggregation, Totals
from lit_rl.algorithms.hooks import RLCallback, call_hooks, callbacks_of
from lit_rl.algorithms.minibatches import check_minibatches, minibatch_rows
from lit_rl.algorithms.old_log_probs import OldLogProbs, RecomputedLogProbs
from lit_rl.algorithms.rl_module import ROLLOUT, SHUFFLE
from lit_rl.algorithms.setting_checks import check_policy_gradient
from lit_rl.algorithms.updating_module import UpdatingModule
from lit_rl.data import prompt_data
from lit_rl.functional import sum_over_ranks, top_fraction
from lit_rl.generation import SamplingSettings
from lit_rl.kl_penalties import KLInLoss, KLPenalty
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.reward_shaping import RewardShaping
from lit_rl.rewards.base import Judging, judged
from lit_rl.sampler_corrections import SamplerCorrection
from lit_rl.types import (
    Experience,
    ModelOutput,
    PolicyOutput,
    Prompts,
    ScoredRollout,
    Sequences,
    Update,
)


class PolicyGradient(UpdatingModule):
    """Policy gradient without a critic. An algorithm is a subclass that names its choices.

    One training step is one iteration: a batch of prompts is answered `group_size` times each, the
    responses are scored, and the policy is updated `update_epochs * num_minibatches` times.

    A reward that applies to no response of the first iteration, on any rank, ends the run. A later
    iteration of that kind is skipped: no optimizer step is taken, a warning says so once, and the
    metric `skipped_iterations` counts it.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number, over the whole optimizer step.
        kl: estimator of the KL to the reference and the place where it acts.
        kl_coef: weight of the KL; 0 needs no reference.
        entropy_coef: weight of the entropy bonus in the loss.
        group_size: responses per prompt.
        old_log_probs: where the old log-probs of the ratio come from.
        sampler_correction: weights for a sampler whose probabilities are not the trainer's; None:
            none.
        reward_shaping: what is done to the rewards before advantages are estimated, in order.
        filter_truncated: whether truncated responses leave their group and the loss.
        top_entropy_fraction: the share of the tokens, those of the highest entropy under the old
            policy, that have an advantage (arXiv:2506.01939, eq. 5); the others count in every
            denominator.
        update_epochs: passes over the rollouts of an iteration.
        num_minibatches: optimizer steps per pass.
        prompts_at_a_time: prompts that each rank answers at a time, which bounds the memory that
            sampling takes. The reward may judge their responses while the next ones are sampled:
            `lit_rl.rewards.InWorkers` does. None: all prompts of the iteration.
        module: the arguments of `UpdatingModule`.

    Raises:
        ValueError: for settings that contradict each other, with settings that do not.
    """

    # The stage of a rollout that the advantage estimator is given.
    provides: ClassVar[type[ScoredRollout]] = ScoredRollout

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
        sampler_correction: SamplerCorrection | None = None,
        reward_shaping: Sequence[RewardShaping] = (),
        filter_truncated: bool = False,
        top_entropy_fraction: float = 1.0,
        update_epochs: int = 1,
        num_minibatches: int = 1,
        prompts_at_a_time: int | None = None,
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
        self.sampler_correction = sampler_correction
        self.reward_shaping = tuple(reward_shaping)
        self.filter_truncated = filter_truncated
        self.top_entropy_fraction = top_entropy_fraction
        self.update_epochs = update_epochs
        self.num_minibatches = num_minibatches
        self.prompts_at_a_time = prompts_at_a_time
        self.stop_updates = False
        self.num_rewarded = 0
        self.skipped_iterations = 0
        check_policy_gradient(self)

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration."""
        return self.update_epochs * self.num_minibatches

    @property
    def trains_policy(self) -> bool:
        """Whether the updates of the iteration under way move the policy."""
        return True

    @property
    def deducts_kl(self) -> bool:
        """Whether a KL to the reference is deducted from the reward."""
        return self.kl.in_reward and self.kl_coef > 0

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term, or a callback, needs the frozen reference."""
        callbacks = callbacks_of(self._trainer, RLCallback) if self._trainer else []
        return self.kl_coef > 0 or any(callback.needs_reference for callback in callbacks)

    def setup(self, stage: str) -> None:
        """Refuse a batch that does not divide into minibatches, before any work is done."""
        super().setup(stage)
        if stage == "fit" and (data := prompt_data(self.trainer)) is not None:
            check_minibatches(data.batch_size, self.group_size, self.num_minibatches)

    def training_step(self, prompts: Prompts, batch_idx: int) -> None:
        """One iteration: a Lightning batch is a batch of prompts."""
        self.num_rewarded = 0
        scored = self.collect(prompts)
        if not self.num_rewarded:  # nothing counts, so that no optimizer step is taken below
            self.without_reward(f"iteration {self.iteration + 1}")
            self.skipped_iterations += 1
        experience = self.prepare(scored)
        call_hooks(self.trainer, "on_rollout", self, scored, experience)
        self.stop_updates = False
        updates: list[Update] = []
        for epoch in range(self.update_epochs):
            for rows in self.minibatches(epoch):
                if self.stop_updates:
                    break
                update = self.update(experience, rows, index=len(updates))
                call_hooks(self.trainer, "on_minibatch", self, update)
                updates.append(replace(update, passes=()))  # the numbers stay
        self.finish(updates)

    def collect(self, prompts: Prompts) -> ScoredRollout:
        """Answer the prompts and score the responses."""
        world_size = self.trainer.world_size
        self.prompt_ranks = [n % world_size for n in range(len(prompts) * world_size)]
        return self.score(self.generate(prompts))

    def generate(self, prompts: Prompts, draw: int = 0) -> list[Judging]:
        """Answer each prompt `group_size` times with the policy, and begin to judge the responses.

        Args:
            prompts: the prompts.
            draw: number of the round of sampling within the iteration, which seeds it.
        """
        seed = (self.seed, ROLLOUT, self.iteration, *([draw] if draw else []))
        return self.answers(prompts, self.sampling, group_size=self.group_size, seed=seed)

    def answers(
        self,
        prompts: Prompts,
        sampling: SamplingSettings,
        *,
        group_size: int,
        seed: tuple[int, ...],
    ) -> list[Judging]:
        """Answer prompts part by part, and begin to judge each part before the next is answered."""
        parts = prompts.split(self.prompts_at_a_time or len(prompts))
        with self.parallelism.whole(self.policy):
            return [
                self.reward.judging(self.sample(part, sampling, group_size=group_size, seed=seed))
                for part in parts
            ]

    def score(self, judging: Sequence[Judging]) -> ScoredRollout:
        """Wait until every response has its reward, where it applies."""
        scored = judged(judging)
        self.num_rewarded += int(sum_over_ranks((~scored.missing).sum()))
        call_hooks(self.trainer, "on_scored", self, scored)
        return scored

    @torch.no_grad()
    def prepare(self, scored: ScoredRollout) -> Experience:
        """Add old and reference log-probs and advantages; rows that do not count are masked."""
        scored = self.without_rows_that_do_not_count(scored)
        sequences = Sequences(
            prompt_ids=scored.prompt_ids,
            prompt_mask=scored.prompt_mask,
            response_ids=scored.response_ids,
            mask=scored.mask,
        )
        self.verify_packing(sequences)
        output: PolicyOutput | None = None
        if self.top_entropy_fraction < 1:
            output = self.output_under(self.policy, sequences)
        old = self.old_log_probs(
            scored,
            lambda: (
                self.log_probs_under(self.policy, sequences) if output is None else output.log_probs
            ),
        )
        for shaping in self.reward_shaping:
            scored = shaping(scored)
        ref = None
        if self.reference is not None:
            ref = self.log_probs_under(self.reference, sequences)
            scored = self.with_kl_in_reward(
                scored, scored.sampler_log_probs if old is None else old, ref
            )
        experience = self.experience(scored, sequences, old_log_probs=old, ref_log_probs=ref)
        self.advantage.observe(scored)
        if output is not None:
            chosen = top_fraction(output.entropy, scored.mask, self.top_entropy_fraction)
            advantages = torch.where(chosen, experience.advantages, 0.0)
            experience = replace(experience, advantages=advantages)
        return experience

    def without_rows_that_do_not_count(self, scored: ScoredRollout) -> ScoredRollout:
        """Mask the rows that are missing their reward, and the truncated ones if they are filtered.

        Such a row moves no baseline, and counts in no loss and in no denominator.
        """
        counts = ~scored.missing
        if self.filter_truncated:
            counts = counts & scored.finished
        mask = scored.mask & counts[:, None]
        return replace(
            scored, mask=mask, token_rewards=torch.where(mask, scored.token_rewards, 0.0)
        )

    def with_kl_in_reward(
        self,
        scored: ScoredRollout,
        log_probs: Float[Tensor, "rollouts tokens"],
        ref_log_probs: Float[Tensor, "rollouts tokens"],
    ) -> ScoredRollout:
        """Deduct the KL of each token from its reward, where the KL acts there."""
        deduction = self.kl_coef * self.kl.reward(log_probs, ref_log_probs, scored.mask)
        return replace(
            scored,
            rewards=scored.rewards - deduction.sum(1),
            token_rewards=scored.token_rewards - deduction,
        )

    def experience(
        self, scored: ScoredRollout, sequences: Sequences, **log_probs: Tensor | None
    ) -> Experience:
        """Return what the update reads; the log-probs are the old and the reference ones."""
        return sequences.extended(
            Experience,
            sampler_log_probs=scored.sampler_log_probs,
            advantages=self.advantage(scored),
            **log_probs,
        )

    def minibatches(self, epoch: int) -> list[Tensor]:
        """Deal the rows of the rollout into the minibatches of one epoch."""
        return minibatch_rows(
            self.prompt_ranks,
            self.group_size,
            self.num_minibatches,
            seed=(self.seed, SHUFFLE, self.iteration, epoch),
            rank=self.global_rank,
        )

    def forward_pass(self, experience: Experience) -> ModelOutput:
        """Return what the models say of a micro-batch, with gradient."""
        output: PolicyOutput = self.policy(
            experience,
            temperature=self.sampling.temperature,
            entropy_gradient=self.entropy_coef != 0,
        )
        return output

    def loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the loss of an optimizer step; parts of one step add up."""
        assert isinstance(output, PolicyOutput)
        if experience.old_log_probs is None:
            experience = replace(experience, old_log_probs=output.log_probs.detach())
        per_token = self.policy_loss(output.log_probs, experience)
        if self.sampler_correction is not None:
            per_token = self.sampler_correction.weights(experience) * per_token
        if experience.ref_log_probs is not None:
            per_token = per_token + self.kl_coef * self.kl.loss(
                output.log_probs, experience.ref_log_probs, experience.mask
            )
        per_token = per_token - self.entropy_coef * output.entropy
        return self.aggregation(per_token, experience.mask, totals)

    def finish(self, updates: list[Update]) -> None:
        """Count the iteration and log what is known once per iteration."""
        self.iteration += 1
        self.keep_to_the_plan()
        losses = torch.stack([update.loss for update in updates])
        self.log_dict(
            {
                "step": float(self.iteration),
                "iteration": float(self.iteration),
                "loss": sum_over_ranks(losses.mean()),
                "num_updates": float(len(updates)),
                "skipped_iterations": float(self.skipped_iterations),
                "skipped_updates": float(self.skipped_updates),
                **self.norms_and_rates(updates),
                "kl_coef": self.kl_coef,
                "entropy_coef": self.entropy_coef,
            }
        )
        call_hooks(self.trainer, "on_iteration_end", self)

    def keep_to_the_plan(self) -> None:
        """Let schedule and end of the run count planned optimizer steps, taken or not."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self.scheduler.last_epoch < self.iteration * self.steps_per_iteration:
                self.scheduler.step()
        planned = self.planned_iterations
        if self.trainer.max_steps != -1 and planned is not None and self.iteration >= planned:
            self.trainer.should_stop = True

    def norms_and_rates(self, updates: list[Update]) -> dict[str, float]:
        """Return the mean gradient norm and the learning rate of each group, by metric."""
        values = {}
        for group in self.raw_optimizer.param_groups:
            name = group["name"]
            prefix = "" if name == "actor" else f"{name}/"
            norms = [update.grad_norms[name] for update in updates]
            values[f"{prefix}grad_norm"] = sum(norms) / len(norms)
            values[f"{prefix}learning_rate"] = group["lr"]
        return values

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what was skipped, and what the advantage estimator remembers."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lit_rl"]["skipped_iterations"] = self.skipped_iterations
        checkpoint["lit_rl"]["advantage"] = self.advantage.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting what was skipped."""
        super().on_load_checkpoint(checkpoint)
        self.skipped_iterations = checkpoint["lit_rl"].get("skipped_iterations", 0)

    def load_memory(self, stored: Mapping[str, Any]) -> None:
        """Give the advantage estimator its memory back."""
        super().load_memory(stored)
        self.advantage.load_state_dict(stored.get("advantage", {}))
