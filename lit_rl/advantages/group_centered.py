"""Dr. GRPO's estimator: how far a reward is from its group's mean."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.groups import GroupEstimator, in_groups
from lit_rl.functional import masked_centered


def group_centered(
    rewards: Float[Tensor, " rollouts"], group_size: int, *, valid: Bool[Tensor, " rollouts"]
) -> Float[Tensor, " rollouts"]:
    """A_i = r_i - mean(r), over the valid rollouts of one prompt.

    Dr. GRPO, arXiv:2503.20783, section 3.2. Equal rewards give exactly 0.

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
        >>> rewards, valid = torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.ones(4, dtype=torch.bool)
        >>> group_centered(rewards, group_size=2, valid=valid)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    groups, counts = in_groups(rewards, group_size, valid)
    return masked_centered(groups, counts, dim=1).flatten()


@dataclass(frozen=True)
class GroupCentered(GroupEstimator):
    """`group_centered`, the same for each token of a response."""

    def per_rollout(
        self,
        rewards: Float[Tensor, " rollouts"],
        group_size: int,
        *,
        valid: Bool[Tensor, " rollouts"],
    ) -> Float[Tensor, " rollouts"]:
        """Return `group_centered`."""
        return group_centered(rewards, group_size, valid=valid)
