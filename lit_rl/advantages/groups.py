"""What the group estimators share: rows of one prompt form a group, and groups never mix."""

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.types import ScoredRollout


def check_groups(num_rollouts: int, group_size: int) -> None:
    """Refuse rollouts that do not form whole groups of at least two.

    Args:
        num_rollouts: rows of the batch.
        group_size: rollouts per prompt, at least 2.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}, but a rollout is compared with the others of its prompt: "
            "at least 2, for example 8"
        )
    if num_rollouts % group_size:
        raise ValueError(
            f"{num_rollouts} rollouts do not form whole groups of group_size {group_size}; "
            f"{num_rollouts // group_size * group_size} or "
            f"{(num_rollouts // group_size + 1) * group_size} would"
        )


def in_groups(
    rewards: Float[Tensor, " rollouts"], group_size: int, valid: Bool[Tensor, " rollouts"]
) -> tuple[Float[Tensor, "prompts group"], Bool[Tensor, "prompts group"]]:
    """Return rewards and `valid` with one row per prompt.

    Args:
        rewards: one per rollout, the rows of a group contiguous.
        group_size: rollouts per prompt, at least 2.
        valid: True where a rollout counts in its group.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> in_groups(torch.tensor([1.0, 0.0, 5.0, 5.0]), 2, torch.ones(4, dtype=torch.bool))[0]
        tensor([[1., 0.],
                [5., 5.]])
    """
    check_groups(len(rewards), group_size)
    return rewards.view(-1, group_size), valid.view(-1, group_size)


def zero_std_groups(scored: ScoredRollout) -> Bool[Tensor, " prompts"]:
    """Return which groups teach a group estimator nothing: their valid rewards are all equal.

    A reward is valid where it is not missing and the response has a token. Groups with one valid
    reward, or none, are among them.

    Args:
        scored: groups of scored responses.
    """
    valid = (~scored.missing & scored.mask.any(dim=1)).view(-1, scored.group_size)
    rewards = scored.rewards.view(-1, scored.group_size)
    highest = rewards.masked_fill(~valid, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(~valid, torch.inf).amin(dim=1)
    return highest <= lowest


class GroupEstimator(AdvantageEstimator):
    """Compares a rollout with the others of its prompt: one advantage, the same for each token.

    A rollout that is missing its reward, or of which no token counts, is not in its group: it moves
    no baseline and has advantage 0. So has a rollout that is left alone in its group.
    """

    min_group_size: ClassVar[int] = 2

    @abstractmethod
    def per_rollout(
        self,
        rewards: Float[Tensor, " rollouts"],
        group_size: int,
        *,
        valid: Bool[Tensor, " rollouts"],
    ) -> Float[Tensor, " rollouts"]:
        """Return one advantage per rollout: 0 where `valid` is False, whatever the reward there.

        Args:
            rewards: one per rollout, the rows of a group contiguous.
            group_size: rollouts per prompt, at least 2.
            valid: True where a rollout counts in its group.
        """

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the advantage of each rollout at each of its tokens that count."""
        valid = scored.mask.any(dim=1) & ~scored.missing
        advantages = self.per_rollout(scored.rewards, scored.group_size, valid=valid)
        return torch.where(scored.mask, advantages[:, None], 0.0)
