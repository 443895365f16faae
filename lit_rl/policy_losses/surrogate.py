"""TRPO's objective: the ratio to the old policy times the advantage."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import probability_ratio
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.types import Experience


def surrogate(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """Surrogate = -ratio * A.

    ratio = exp(log_probs - old_log_probs), see `probability_ratio`. TRPO, arXiv:1502.05477,
    equation 14, with advantages in the place of Q values. Nothing in it keeps the policy near the
    old one: that is left to a constraint or a penalty.

    An advantage of 0 gives a loss of 0, whatever the ratio.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.

    Returns:
        Loss per token, in the unit of the advantages; 0, and without gradient, where the mask is
        False.

    Example:
        >>> half_more = torch.tensor([[1.5, 1.5]]).log()
        >>> surrogate(
        ...     half_more, torch.zeros(1, 2), advantages=torch.tensor([[1.0, -1.0]]),
        ...     mask=torch.tensor([[True, True]]),
        ... )
        tensor([[-1.5000,  1.5000]])
    """
    ratio = probability_ratio(log_probs, old_log_probs, mask)
    return -ratio * torch.where(mask, advantages, 0.0)


@dataclass(frozen=True)
class Surrogate(PolicyLoss):
    """`surrogate` of an experience."""

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `surrogate`: in the unit of the advantages, 0 where the mask is False."""
        return surrogate(*ratio_arguments(log_probs, experience))
