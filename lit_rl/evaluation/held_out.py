"""What validation measures on the held-out prompts."""

from dataclasses import dataclass

import torch

from lit_rl.evaluation.pass_at_k import pass_at_k
from lit_rl.evaluation.statistics import Statistics
from lit_rl.types import ScoredRollout

ERRORS = "val/errors"
"""Responses, greedy and sampled, that judging failed on."""


@dataclass(frozen=True)
class Evaluation:
    """How held-out prompts are scored.

    Args:
        num_samples: sampled responses per prompt, beside the greedy one; 0 for none.
        pass_at: the k of each pass@k that is logged, at most `num_samples`.
        success_reward: a response counts as correct when its reward is at least this.
    """

    num_samples: int = 4
    pass_at: tuple[int, ...] = (4,)
    success_reward: float = 1.0

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"evaluation.num_samples is {self.num_samples}, must be 0 or more")
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"evaluation.pass_at {self.pass_at} names a k twice")
        for k in self.pass_at:
            if self.num_samples and not 1 <= k <= self.num_samples:
                raise ValueError(
                    f"evaluation.pass_at has {k}, but k lies between 1 and num_samples "
                    f"{self.num_samples}"
                )


class HeldOutMetrics:
    """Collects one entry per held-out prompt, exact over batches and ranks.

    Prompts to which the reward does not apply are left out.

    Args:
        evaluation: what is measured.
        device: where the rewards are.
    """

    def __init__(self, evaluation: Evaluation, device: torch.device) -> None:
        self.evaluation = evaluation
        names = ["val/greedy_accuracy", "val/reward", ERRORS]
        if evaluation.num_samples:
            names += ["val/sampled_accuracy", *(f"val/pass@{k}" for k in evaluation.pass_at)]
        self.statistics = Statistics(tuple(names), device)

    def update_greedy(self, scored: ScoredRollout) -> None:
        """Add one greedy response per prompt."""
        self._count_errors(scored)
        rewards = scored.rewards[~scored.missing]
        success = rewards >= self.evaluation.success_reward
        self.statistics.update("val/greedy_accuracy", success)
        self.statistics.update("val/reward", rewards)

    def update_sampled(self, scored: ScoredRollout) -> None:
        """Add a group of `evaluation.num_samples` sampled responses per prompt."""
        self._count_errors(scored)
        applies = ~scored.missing.view(-1, scored.group_size).any(1)
        success = (scored.rewards >= self.evaluation.success_reward).view(-1, scored.group_size)
        num_correct = success.sum(1)[applies]
        self.statistics.update("val/sampled_accuracy", num_correct / scored.group_size)
        for k in self.evaluation.pass_at:
            values = pass_at_k(num_correct, scored.group_size, k)
            self.statistics.update(f"val/pass@{k}", values)

    def _count_errors(self, scored: ScoredRollout) -> None:
        if scored.failed is not None:
            self.statistics.update(ERRORS, scored.failed)

    def results(self) -> dict[str, float]:
        """Return means over all prompts, standard errors of the accuracies, and what failed."""
        results = {}
        for name, summary in self.statistics.compute().items():
            results[name] = summary.total if name == ERRORS else summary.mean
            if name not in ("val/reward", ERRORS):
                results[f"{name}_standard_error"] = summary.standard_error
        return results
