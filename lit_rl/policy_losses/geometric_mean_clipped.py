"""GMPO's loss: the geometric mean of the clipped ratios of a response."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import bounded_exp, log_ratio, masked_mean
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.policy_losses.clipped_surrogate import binding_clips
from lit_rl.types import Experience


def geometric_mean_clipped(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "rollouts tokens"]:
    """geometric_mean_clipped = -A * exp(mean over the tokens of l).

    l = min(log_ratio, clip_high) where A > 0, max(log_ratio, -clip_low) where A < 0, 0 where A = 0,
    with log_ratio = log_probs - old_log_probs in nats. GMPO, arXiv:2507.20673: the ratios are
    clipped one by one, in log space, before their geometric mean is taken.

    Every token of a sequence carries the loss of the whole sequence, so that the mean over
    sequences of the mean over tokens is the paper's objective. The gradient is written as in
    `sequence_clipped`: through l of the token itself, with the value of the mean. Where all
    advantages of a sequence are equal this is the gradient of the mean; where they are not, it
    keeps each token's own advantage. The mean is bounded as in `bounded_exp`.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the log-ratio may fall below 0, in nats, above 0.
        clip_high: how far the log-ratio may rise above 0, in nats, above 0.

    Returns:
        Loss per token, in the unit of the advantages; 0, and without gradient, where the mask is
        False.

    Example:
        The log-ratios 0.8, clipped to 0.4, and 0 have the mean 0.2:

        >>> geometric_mean_clipped(
        ...     torch.tensor([[0.8, 0.0]]), torch.zeros(1, 2),
        ...     advantages=torch.tensor([[1.0, 1.0]]), mask=torch.tensor([[True, True]]),
        ...     clip_low=0.4, clip_high=0.4,
        ... )
        tensor([[-1.2214, -1.2214]])
    """
    advantages = torch.where(mask, advantages, 0.0)
    difference = log_ratio(log_probs, old_log_probs, mask)
    clipped = torch.where(
        advantages > 0, difference.clamp(max=clip_high), difference.clamp(min=-clip_low)
    )
    clipped = torch.where(advantages == 0, 0.0, clipped)
    mean = masked_mean(clipped.detach(), mask, dim=1, keepdim=True)
    return -advantages * bounded_exp(mean + (clipped - clipped.detach()))


@dataclass(frozen=True)
class GeometricMeanClipped(PolicyLoss):
    """`geometric_mean_clipped` of an experience.

    The defaults are the paper's: ratios between exp(-0.4) and exp(0.4). Unlike those of
    `ClippedSurrogate`, the distances are of the log-ratio.

    Args:
        clip_low: how far the log-ratio may fall below 0, in nats, above 0.
        clip_high: how far the log-ratio may rise above 0, in nats, above 0.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0, for example 0.4 nats, not {value}")

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `geometric_mean_clipped`: in the unit of the advantages, 0 where masked."""
        return geometric_mean_clipped(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return `binding_clips` of the ratios exp(-clip_low) and exp(clip_high)."""
        return binding_clips(
            *ratio_arguments(log_probs, experience),
            clip_low=-math.expm1(-self.clip_low),
            clip_high=math.expm1(self.clip_high),
        )
