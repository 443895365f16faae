"""The plain policy gradient: the log-prob times the advantage."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.types import Experience


def log_prob_surrogate(
    log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """log_prob_surrogate = -log_probs * A.

    REINFORCE, Williams 1992; GPG, arXiv:2504.02546, which scales the advantages, not this loss. No
    old policy stands in it, so it is right for the first update after a rollout only: there, the
    gradient is that of `surrogate`. The value means nothing.

    An advantage of 0 gives a loss of 0.

    Args:
        log_probs: under the current policy, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.

    Returns:
        Loss per token, in the unit of the advantages times nats, in float32 or better; 0, and
        without gradient, where the mask is False.

    Example:
        >>> log_prob_surrogate(
        ...     torch.tensor([[-2.0, -2.0]]), advantages=torch.tensor([[1.0, -0.5]]),
        ...     mask=torch.tensor([[True, True]]),
        ... )
        tensor([[ 2., -1.]])
    """
    precise = torch.promote_types(log_probs.dtype, torch.float32)
    return -torch.where(mask, log_probs.to(precise), 0.0) * torch.where(mask, advantages, 0.0)


@dataclass(frozen=True)
class LogProbSurrogate(PolicyLoss):
    """`log_prob_surrogate` of an experience; the old log-probs are not read."""

    single_update: ClassVar[bool] = True

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `log_prob_surrogate`: 0 where the mask is False."""
        return log_prob_surrogate(log_probs, experience.advantages, experience.mask)
