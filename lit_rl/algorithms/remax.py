"""REINFORCE with the reward of the greedy response as baseline."""

from dataclasses import replace
from typing import Any, ClassVar

from lit_rl.advantages import GreedyBaseline
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.algorithms.reinforce import Reinforce
from lit_rl.algorithms.rl_module import ROLLOUT
from lit_rl.functional import sum_over_ranks
from lit_rl.kl_penalties import KLInReward, KLPenalty
from lit_rl.rewards.base import judged
from lit_rl.types import BaselinedRollout, Prompts, ScoredRollout


class ReMax(Reinforce):
    """ReMax (arXiv:2310.10505): the greedy response to a prompt sets what is expected of it.

    Every prompt is answered greedily beside its samples. That response is scored, its reward is
    shaped as theirs are, and nothing else: it is not trained on and counts in no metric.

    Args:
        advantage: from rewards to advantages.
        kl: estimator of the KL to the reference and the place where it acts.
        loop: the arguments of `Reinforce`.
    """

    provides: ClassVar[type[ScoredRollout]] = BaselinedRollout

    def __init__(
        self,
        advantage: AdvantageEstimator = GreedyBaseline(),
        kl: KLPenalty = KLInReward(),
        **loop: Any,
    ) -> None:
        super().__init__(advantage=advantage, kl=kl, **loop)

    def collect(self, prompts: Prompts) -> BaselinedRollout:
        """Answer the prompts, score the responses and the greedy ones."""
        scored = super().collect(prompts)
        seed = (self.seed, ROLLOUT, self.iteration)
        greedy = judged(self.answers(prompts, self.sampling.as_greedy(), group_size=1, seed=seed))
        for shaping in self.reward_shaping:
            greedy = shaping(greedy)
        # Samples whose baseline is missing have nothing to be compared with.
        missing = scored.missing | greedy.missing.repeat_interleave(self.group_size)
        self.num_rewarded = int(sum_over_ranks((~missing).sum()))
        return (
            replace(scored, missing=missing)
            .with_rewards(scored.rewards)
            .extended(
                BaselinedRollout,
                baseline_rewards=greedy.rewards.repeat_interleave(self.group_size),
            )
        )
