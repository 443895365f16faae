"""RLOO's estimator: how far a reward is from the mean of the other rewards of its group."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.groups import GroupEstimator, in_groups
from lit_rl.functional import masked_centered


def leave_one_out(
    rewards: Float[Tensor, " rollouts"], group_size: int, *, valid: Bool[Tensor, " rollouts"]
) -> Float[Tensor, " rollouts"]:
    """A_i = r_i - mean of the other r, over the n valid rollouts of one prompt.

    RLOO, arXiv:2402.14740, section 2.2 (REINFORCE leave-one-out). Computed as
    n / (n - 1) * (r_i - mean(r)), which is the same number. Not divided by a standard deviation:
    that of the others is 0 for a single winner. Equal rewards give exactly 0, and so does a
    rollout without others.

    Args:
        rewards: one per rollout, the rows of a group contiguous.
        group_size: rollouts per prompt, at least 2.
        valid: True where a rollout counts in its group.

    Returns:
        Advantages in the unit of the rewards, which sum to 0 in each group; 0 where `valid` is
        False.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> import torch
        >>> rewards, valid = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool)
        >>> leave_one_out(rewards, group_size=4, valid=valid)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    groups, counts = in_groups(rewards, group_size, valid)
    count = counts.sum(dim=1, keepdim=True)
    scale = count / (count - 1).clamp(min=1)
    return (scale * masked_centered(groups, counts, dim=1)).flatten()


@dataclass(frozen=True)
class LeaveOneOut(GroupEstimator):
    """`leave_one_out`, the same for each token of a response."""

    def per_rollout(
        self,
        rewards: Float[Tensor, " rollouts"],
        group_size: int,
        *,
        valid: Bool[Tensor, " rollouts"],
    ) -> Float[Tensor, " rollouts"]:
        """Return `leave_one_out`."""
        return leave_one_out(rewards, group_size, valid=valid)
