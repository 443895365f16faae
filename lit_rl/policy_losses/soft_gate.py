"""SAPO's loss: a gate that closes smoothly as the ratio leaves 1."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import probability_ratio
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.types import Experience


def soft_gate(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Float[Tensor, "rollouts tokens"]:
    """soft_gate = -A * (4 / tau) * sigmoid(tau * (ratio - 1)).

    tau is tau_positive where A > 0, else tau_negative; ratio = exp(log_probs - old_log_probs), see
    `probability_ratio`. SAPO, arXiv:2511.20347. The slope of the gate in the ratio is 1 at ratio 1
    and falls to 0 on both sides, faster with a larger tau, so no token is clipped. At ratio 1 the
    value is -2 * A / tau.

    An advantage of 0 gives a loss of 0, whatever the ratio.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        tau_positive: how fast the gate closes where A > 0, above 0.
        tau_negative: how fast the gate closes where A < 0, above 0.

    Returns:
        Loss per token, in the unit of the advantages; 0, and without gradient, where the mask is
        False.

    Example:
        >>> half_more = torch.tensor([[1.5, 1.5]]).log()
        >>> soft_gate(
        ...     half_more, torch.zeros(1, 2), advantages=torch.tensor([[1.0, -1.0]]),
        ...     mask=torch.tensor([[True, True]]), tau_positive=1.0, tau_negative=2.0,
        ... )
        tensor([[-2.4898,  1.4621]])
    """
    beyond_one = probability_ratio(log_probs, old_log_probs, mask) - 1
    advantages = torch.where(mask, advantages, 0.0)
    positive, negative = (
        4 / tau * torch.sigmoid(tau * beyond_one) for tau in (tau_positive, tau_negative)
    )
    return -advantages * torch.where(advantages > 0, positive, negative)


@dataclass(frozen=True)
class SoftGate(PolicyLoss):
    """`soft_gate` of an experience; the defaults are the paper's.

    Args:
        tau_positive: how fast the gate closes where A > 0, above 0.
        tau_negative: how fast the gate closes where A < 0, above 0.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        for name in ("tau_positive", "tau_negative"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0, for example 1.0, not {value}")

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `soft_gate`: in the unit of the advantages, 0 where the mask is False."""
        return soft_gate(
            *ratio_arguments(log_probs, experience),
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
