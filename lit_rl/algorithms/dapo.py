"""Decoupled clip and dynamic sampling policy optimization."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from lit_rl.advantages import GroupNormalized
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.advantages.groups import zero_std_groups
from lit_rl.aggregations import Aggregation, TokenMean
from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.rl_module import REFILL
from lit_rl.algorithms.rounds import Group, choose_groups, gathered_groups
from lit_rl.data import prompt_data
from lit_rl.functional import gather_over_ranks
from lit_rl.generation import SamplingSettings
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.reward_shaping import RewardShaping, SoftOverlongPunishment
from lit_rl.types import Prompts, ScoredRollout, Update


class DAPO(GRPO):
    """DAPO (arXiv:2503.14476): GRPO with the four changes of its paper.

    - Clip-higher (section 3.1): the ratio may rise further than it may fall.
    - Dynamic sampling (section 3.2): a group whose rewards are all equal teaches nothing; further
      prompts are answered until the batch is full of groups that teach something, for at most
      `max_rounds` rounds of `batch_size` prompts.
    - Token-level loss (section 3.3): every token weighs the same.
    - Overlong responses (section 3.4): truncated ones are left out, and those that come near the
      limit are punished softly.

    Where the rounds do not fill the batch, it is trained smaller: the places left over are masked
    and count in no denominator. Without any group to learn from, the optimizer does not step. The
    prompts of a further round are drawn from all training prompts, without regard to the order of
    the epoch, which stays as it is.

    Args:
        advantage: from rewards to advantages.
        policy_loss: from log-probs and advantages to a loss per token.
        aggregation: from a loss per token to a number.
        kl_coef: weight of the KL; 0 needs no reference.
        reward_shaping: what is done to the rewards; None: the soft punishment over the last fifth
            of `sampling.max_new_tokens`, as in the paper.
        filter_truncated: whether truncated responses leave their group and the loss.
        max_rounds: rounds of sampling per iteration, the first included; 1 for no refill.
        sampling: how responses are drawn.
        loop: the arguments of `GRPO`.

    Raises:
        ValueError: if `max_rounds` is below 1, or if the estimator does not compare whole rewards.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = GroupNormalized(),
        policy_loss: PolicyLoss = ClippedSurrogate(clip_low=0.2, clip_high=0.28),
        aggregation: Aggregation = TokenMean(),
        kl_coef: float = 0.0,
        reward_shaping: Sequence[RewardShaping] | None = None,
        filter_truncated: bool = True,
        max_rounds: int = 10,
        sampling: SamplingSettings = SamplingSettings(),
        **loop: Any,
    ) -> None:
        if not advantage.sees_final_reward:
            raise ValueError(
                f"DAPO keeps the groups whose rewards as a whole differ, but "
                f"{type(advantage).__name__} learns from their parts or steps: use "
                "lit_rl.advantages.GroupNormalized, or lit_rl.algorithms.GRPO"
            )
        if reward_shaping is None:
            limit = sampling.max_new_tokens
            reward_shaping = [SoftOverlongPunishment(limit, cache_tokens=max(1, limit // 5))]
        super().__init__(
            advantage=advantage,
            policy_loss=policy_loss,
            aggregation=aggregation,
            kl_coef=kl_coef,
            reward_shaping=reward_shaping,
            filter_truncated=filter_truncated,
            sampling=sampling,
            **loop,
        )
        self.max_rounds = max_rounds
        self._sampled: list[Group] = []
        if max_rounds < 1:
            raise ValueError(f"max_rounds is {max_rounds}, must be at least 1; 1 for no refill")

    def setup(self, stage: str) -> None:
        """Refuse data that cannot give the prompts of a further round."""
        super().setup(stage)
        if stage == "fit" and self.max_rounds > 1 and prompt_data(self.trainer) is None:
            raise ValueError(
                f"max_rounds {self.max_rounds} needs a data module that gives further prompts, "
                "lit_rl.data.PromptDataModule; use it, or max_rounds 1"
            )

    def collect(self, prompts: Prompts) -> ScoredRollout:
        """Answer prompts until the batch is full of groups that teach something."""
        batch_size = len(prompts) * self.trainer.world_size
        rounds: list[ScoredRollout] = []
        sampled: list[Group] = []
        while len(rounds) < self.max_rounds and sum(g.signal for g in sampled) < batch_size:
            if rounds:
                prompts = self.further_prompts(len(rounds))
            scored = self.score(self.generate(prompts, draw=len(rounds)))
            signal = ~zero_std_groups(self.without_rows_that_do_not_count(scored))
            # One row per rank; prompt i of the round lies on rank i % world_size.
            flags = gather_over_ranks(signal).view(self.trainer.world_size, -1)
            sampled += gathered_groups(len(rounds), flags)
            rounds.append(scored)
        chosen = choose_groups(sampled, batch_size)
        self._sampled = sampled
        self.prompt_ranks = [group.rank for group in chosen]
        return self.batch_of(rounds, [group for group in chosen if group.rank == self.global_rank])

    def further_prompts(self, draw: int) -> Prompts:
        """Return prompts for a further round, the share of this rank."""
        data = prompt_data(self.trainer)
        assert data is not None  # see `setup`
        return data.drawn_prompts((self.seed, REFILL, self.iteration, draw)).to(self.device)

    def batch_of(self, rounds: list[ScoredRollout], groups: list[Group]) -> ScoredRollout:
        """Return the groups as one rollout; those without signal are masked.

        A rank without a group keeps one that no minibatch reads, so that it has a row to join the
        others with.
        """
        groups = groups or [Group(0, self.global_rank, 0, signal=False)]
        size = self.group_size
        batch = reduce(
            ScoredRollout.followed_by,
            [
                rounds[group.draw].select(torch.arange(size) + group.place * size)
                for group in groups
            ],
        )
        signal = torch.tensor([group.signal for group in groups], device=batch.mask.device)
        mask = batch.mask & signal.repeat_interleave(size)[:, None]
        return replace(batch, mask=mask)

    def finish(self, updates: list[Update]) -> None:
        """Log how many groups were sampled for the batch."""
        signal = sum(group.signal for group in self._sampled)
        self.log_dict(
            {
                "dynamic_sampling/rounds": float(1 + max(group.draw for group in self._sampled)),
                "dynamic_sampling/sampled_groups": float(len(self._sampled)),
                "dynamic_sampling/signal_fraction": signal / len(self._sampled),
                "dynamic_sampling/trained_groups": float(min(signal, len(self.prompt_ranks))),
            }
        )
        super().finish(updates)
