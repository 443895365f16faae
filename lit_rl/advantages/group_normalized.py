"""GRPO's estimator: how far a reward is from its group's mean, in standard deviations."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.groups import GroupEstimator, in_groups
from lit_rl.functional import masked_centered, masked_variance


def group_normalized(
    rewards: Float[Tensor, " rollouts"],
    group_size: int,
    *,
    valid: Bool[Tensor, " rollouts"],
    epsilon: float,
) -> Float[Tensor, " rollouts"]:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), over the valid rollouts of one prompt.

    GRPO, arXiv:2402.03300, section 4.1.2. std is the sample standard deviation (it divides by the
    number of valid rollouts - 1); the paper does not say which. Equal rewards give exactly 0.

    Args:
        rewards: one per rollout, the rows of a group contiguous.
        group_size: rollouts per prompt, at least 2.
        valid: True where a rollout counts in its group.
        epsilon: added to the standard deviation, in the unit of the rewards, above 0.

    Returns:
        Advantages without a unit, which sum to 0 in each group; 0 where `valid` is False.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> import torch
        >>> rewards, valid = torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.ones(4, dtype=torch.bool)
        >>> group_normalized(rewards, group_size=2, valid=valid, epsilon=1e-6)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups, counts = in_groups(rewards, group_size, valid)
    std = masked_variance(groups, counts, unbiased=True, dim=1).sqrt()
    return (masked_centered(groups, counts, dim=1) / (std + epsilon)[:, None]).flatten()


@dataclass(frozen=True)
class GroupNormalized(GroupEstimator):
    """`group_normalized`, the same for each token of a response.

    Args:
        epsilon: added to the standard deviation of a group, in the unit of the rewards. 1e-6 as in
            verl; TRL has 1e-4.
    """

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, for example 1e-6, not {self.epsilon}")

    def per_rollout(
        self,
        rewards: Float[Tensor, " rollouts"],
        group_size: int,
        *,
        valid: Bool[Tensor, " rollouts"],
    ) -> Float[Tensor, " rollouts"]:
        """Return `group_normalized`."""
        return group_normalized(rewards, group_size, valid=valid, epsilon=self.epsilon)
