"""CISPO's loss: the log-prob, weighted with a clipped ratio that has no gradient."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import probability_ratio
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.policy_losses.clip_range import check_clip_range
from lit_rl.policy_losses.log_prob_surrogate import log_prob_surrogate
from lit_rl.types import Experience


def clipped_weight(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "rollouts tokens"]:
    """clipped_weight = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log_probs.

    ratio = exp(log_probs - old_log_probs), see `probability_ratio`; sg stops the gradient. CISPO
    (MiniMax-M1), arXiv:2506.13585, equations 4 and 5. Every token keeps a gradient, of the size
    of its weight at most. The largest weight is 1 + clip_high, as in the paper; in some
    implementations the setting is the bound itself.

    An advantage of 0 gives a loss of 0, whatever the ratio.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the weight may fall below 1, in (0, 1]; 1: without bound.
        clip_high: how far the weight may rise above 1, above 0.

    Returns:
        Loss per token, in the unit of the advantages times nats; 0, and without gradient, where the
        mask is False.

    Example:
        The ratios are 1.5 and 0.5:

        >>> import torch
        >>> clipped_weight(
        ...     torch.tensor([[-1.0, -1.0]]), -1 - torch.tensor([[1.5, 0.5]]).log(),
        ...     advantages=torch.tensor([[1.0, 1.0]]), mask=torch.tensor([[True, True]]),
        ...     clip_low=1.0, clip_high=0.2,
        ... )
        tensor([[1.2000, 0.5000]])
    """
    weight = probability_ratio(log_probs.detach(), old_log_probs, mask)
    weight = weight.clamp(1 - clip_low, 1 + clip_high)
    return weight * log_prob_surrogate(log_probs, advantages, mask)


def binding_weight_clips(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
    """Return the tokens whose weight in `clipped_weight` is clipped; their gradient goes on.

    low:  A != 0 and ratio < 1 - clip_low
    high: A != 0 and ratio > 1 + clip_high

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the weight may fall below 1, in (0, 1]; 1: without bound.
        clip_high: how far the weight may rise above 1, above 0.

    Returns:
        By name, True where the weight is clipped on that side; False where the mask is False.

    Example:
        >>> import torch
        >>> clips = binding_weight_clips(
        ...     torch.tensor([[1.5, 1.5]]).log(), torch.zeros(1, 2),
        ...     advantages=torch.tensor([[-1.0, 0.0]]), mask=torch.tensor([[True, True]]),
        ...     clip_low=1.0, clip_high=0.2,
        ... )
        >>> clips["high"]
        tensor([[ True, False]])
    """
    ratio = probability_ratio(log_probs, old_log_probs, mask)
    acts = mask & (advantages != 0)
    return {"low": acts & (ratio < 1 - clip_low), "high": acts & (ratio > 1 + clip_high)}


@dataclass(frozen=True)
class ClippedWeight(PolicyLoss):
    """`clipped_weight` of an experience.

    The paper bounds the weight above only, and does not say where; clip_high is verl's default.

    Args:
        clip_low: how far the weight may fall below 1, in (0, 1]; 1: without bound.
        clip_high: how far the weight may rise above 1, above 0.
    """

    clip_low: float = 1.0
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `clipped_weight`: 0 where the mask is False."""
        return clipped_weight(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return `binding_weight_clips`: these tokens keep a gradient, of a bounded size."""
        return binding_weight_clips(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
