"""GRPO's estimator for process rewards: every step is judged among all steps of its group."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.groups import check_groups
from lit_rl.functional import masked_centered, masked_variance, sum_over_ranks
from lit_rl.types import ScoredRollout


def process_normalized(
    step_rewards: Float[Tensor, "rollouts tokens"],
    group_size: int,
    *,
    mask: Bool[Tensor, "rollouts tokens"],
    epsilon: float,
) -> Float[Tensor, "rollouts tokens"]:
    """A_t = sum over the steps that end at or after t of (r_step - mean(r)) / (std(r) + epsilon).

    GRPO with process supervision, arXiv:2402.03300, section 4.1.3. Mean and sample standard
    deviation (it divides by the number of steps - 1; the paper does not say which) are over all
    steps of all responses to one prompt. Equal rewards give exactly 0. A response without steps has
    advantage 0 and moves no mean; so have the tokens behind the last step of a response. More steps
    make a larger sum.

    Args:
        step_rewards: reward of each step at the token that ends it; NaN where no step ends.
        group_size: rollouts per prompt, at least 2, the rows of a group contiguous.
        mask: True where a token counts; a step that ends elsewhere is not read.
        epsilon: added to the standard deviation, in the unit of the rewards, above 0.

    Returns:
        Advantages without a unit; 0 where the mask is False.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> nan = torch.nan
        >>> steps = torch.tensor([[nan, 1.0, nan, 0.0, nan], [nan, nan, -1.0, nan, nan]])
        >>> mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
        >>> process_normalized(steps, group_size=2, mask=mask, epsilon=1e-6)  # std 1
        tensor([[ 1.0000,  1.0000,  0.0000,  0.0000,  0.0000],
                [-1.0000, -1.0000, -1.0000,  0.0000,  0.0000]])
    """
    rollouts, width = step_rewards.shape
    check_groups(rollouts, group_size)
    steps = step_rewards.reshape(-1, group_size * width)
    counts = mask.reshape(-1, group_size * width) & ~steps.isnan()
    std = masked_variance(steps, counts, unbiased=True, dim=1).sqrt()
    normalized = masked_centered(steps, counts, dim=1) / (std + epsilon)[:, None]
    following = normalized.view(rollouts, width).flip(1).cumsum(1).flip(1)
    return torch.where(mask, following, 0.0)


@dataclass(frozen=True)
class ProcessNormalized(AdvantageEstimator):
    """`process_normalized` of the rewards of the steps; what else a response earned is not read.

    Warns where no response of any rank has a step: then nothing is learned.

    Args:
        epsilon: added to the standard deviation of a group's steps, in the unit of the rewards.
    """

    epsilon: float = 1e-6

    min_group_size: ClassVar[int] = 2
    sees_final_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, for example 1e-6, not {self.epsilon}")

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return `process_normalized`."""
        mask = tokens_that_count(scored)
        if not sum_over_ranks((mask & ~scored.step_rewards.isnan()).sum()):
            warnings.warn(
                "no response has a step, so all advantages are 0; ProcessNormalized needs a reward "
                "that gives values of steps",
                stacklevel=2,
            )
        return process_normalized(
            scored.step_rewards, scored.group_size, mask=mask, epsilon=self.epsilon
        )
