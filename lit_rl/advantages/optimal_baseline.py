"""OPO's estimator: how far a reward is from its group's mean, weighted by response lengths."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.groups import in_groups
from lit_rl.types import ScoredRollout


def optimal_baseline(
    rewards: Float[Tensor, " rollouts"], group_size: int, *, lengths: Int[Tensor, " rollouts"]
) -> Float[Tensor, " rollouts"]:
    """A_i = r_i - sum_j length_j * r_j / sum_j length_j, over the rollouts of one prompt.

    OPO, arXiv:2505.23585: the baseline with the least variance of the gradient, if the squared norm
    of a response's gradient is proportional to its length. Equal rewards give exactly 0, and so
    does a rollout without others.

    Args:
        rewards: one per rollout, the rows of a group contiguous.
        group_size: rollouts per prompt, at least 2.
        lengths: tokens that count of each rollout; one of length 0 is not in its group.

    Returns:
        Advantages in the unit of the rewards, whose sum weighted by the lengths is 0 in each group;
        0 where the length is 0.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> rewards, lengths = torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([3, 1, 2, 4])
        >>> optimal_baseline(rewards, group_size=2, lengths=lengths)
        tensor([ 0.2500, -0.7500,  0.0000,  0.0000])
    """
    groups, counts = in_groups(rewards, group_size, lengths > 0)
    weights = lengths.view(-1, group_size).to(rewards)
    # Measured from the smallest reward, so that equal ones give exactly 0.
    smallest = torch.where(counts, groups, torch.inf).amin(dim=1, keepdim=True)
    shifted = torch.where(counts, groups - smallest, 0.0)
    baseline = (weights * shifted).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.where(counts, shifted - baseline, 0.0).flatten()


@dataclass(frozen=True)
class OptimalBaseline(AdvantageEstimator):
    """`optimal_baseline`, the same for each token of a response."""

    min_group_size: ClassVar[int] = 2

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the advantage of each rollout at each of its tokens that count."""
        mask = tokens_that_count(scored)
        advantages = optimal_baseline(scored.rewards, scored.group_size, lengths=mask.sum(dim=1))
        return torch.where(mask, advantages[:, None], 0.0)
