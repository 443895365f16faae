"""The estimator of REINFORCE++ with a baseline: centered in the group, whitened over the batch."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import tokens_that_count
from lit_rl.advantages.group_centered import GroupCentered, group_centered
from lit_rl.advantages.whitening import whitened
from lit_rl.types import ScoredRollout


def group_centered_whitened(
    rewards: Float[Tensor, " rollouts"], group_size: int, *, mask: Bool[Tensor, "rollouts tokens"]
) -> Float[Tensor, "rollouts tokens"]:
    """A_t = (C_t - mean(C)) / std(C), with C_t = r_i - mean of the group's r for each token of i.

    REINFORCE++ with a baseline, arXiv:2501.03262. Mean and sample standard deviation of C are over
    all tokens that count, on all ranks, see `whitened`: an advantage depends on the lengths of all
    responses of the batch, and a response without advantage in its group may get one. A response of
    which no token counts is not in its group. Equal rewards in every group give exactly 0.

    Args:
        rewards: one per rollout, the rows of a group contiguous.
        group_size: rollouts per prompt, at least 2.
        mask: True where a token counts.

    Returns:
        Advantages without a unit, with mean 0 over the tokens of all ranks; 0 where the mask is
        False.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[True, False], [True, True]])
        >>> group_centered_whitened(rewards, group_size=2, mask=mask)  # of 1/2, -1/2 and -1/2
        tensor([[ 1.1547,  0.0000],
                [-0.5774, -0.5774]])
    """
    centered = group_centered(rewards, group_size, valid=mask.any(dim=1))
    return whitened(torch.where(mask, centered[:, None], 0.0), mask)


@dataclass(frozen=True)
class GroupCenteredWhitened(GroupCentered):
    """`group_centered_whitened`, the same for each token of a response."""

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `group_centered_whitened`."""
        mask = tokens_that_count(scored)
        return group_centered_whitened(scored.rewards, scored.group_size, mask=mask)
