"""What validation measures on the held-out prompts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric

from lit_rl.evaluation.intervals import standard_error
from lit_rl.evaluation.pass_at_k import pass_at_k
from lit_rl.types import ScoredRollout


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
        for k in self.pass_at:
            if self.num_samples and not 1 <= k <= self.num_samples:
                raise ValueError(
                    f"evaluation.pass_at has {k}, but k lies between 1 and num_samples "
                    f"{self.num_samples}"
                )


class HeldOutMetrics(nn.Module):
    """Collects one entry per held-out prompt over all batches and ranks.

    Prompts to which the reward does not apply are left out.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self.evaluation = evaluation
        self.greedy_rewards = CatMetric(nan_strategy="error")
        self.num_correct = CatMetric(nan_strategy="error")

    def update_greedy(self, scored: ScoredRollout) -> None:
        """Add one greedy response per prompt."""
        self.greedy_rewards.update(scored.rewards[~scored.missing])

    def update_sampled(self, scored: ScoredRollout) -> None:
        """Add a group of sampled responses per prompt."""
        applicable = ~scored.missing.view(-1, scored.group_size).any(1)
        success = (scored.rewards >= self.evaluation.success_reward).float()
        self.num_correct.update(success.view(-1, scored.group_size).sum(1)[applicable])

    def results(self) -> dict[str, Tensor]:
        """Return the measures over all prompts by their logged names, and begin anew."""
        rewards = torch.as_tensor(self.greedy_rewards.compute()).flatten()
        success = (rewards >= self.evaluation.success_reward).float()
        results = {
            "val/greedy_accuracy": success.mean(),
            "val/greedy_accuracy_standard_error": standard_error(success),
            "val/reward": rewards.mean(),
        }
        self.greedy_rewards.reset()
        if self.evaluation.num_samples:
            correct = torch.as_tensor(self.num_correct.compute()).flatten()
            num_samples = self.evaluation.num_samples
            results["val/sampled_accuracy"] = correct.mean() / num_samples
            for k in self.evaluation.pass_at:
                results[f"val/pass@{k}"] = pass_at_k(correct, num_samples, k).mean()
            self.num_correct.reset()
        return results
