"""PPO's loss: the ratio to the old policy times the advantage, clipped."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import probability_ratio
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.policy_losses.clip_range import check_clip_range
from lit_rl.types import Experience


def clipped_surrogate(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "rollouts tokens"]:
    """clipped_surrogate = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    ratio = exp(log_probs - old_log_probs), see `probability_ratio`. PPO, arXiv:1707.06347,
    equation 7, with two distances as in DAPO, arXiv:2503.14476, equation 10. With `dual_clip`, the
    loss of a token with A < 0 is at most dual_clip * abs(A): arXiv:1912.09729, equation 5.

    An advantage of 0 gives a loss of 0, whatever the ratio.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the ratio may fall below 1, in (0, 1].
        clip_high: how far the ratio may rise above 1, above 0.
        dual_clip: largest ratio that a negative advantage is multiplied with, above 1; None: no
            such limit.

    Returns:
        Loss per token, in the unit of the advantages; 0, and without gradient, where the mask is
        False.

    Example:
        >>> half_more = torch.tensor([[1.5, 1.5]]).log()
        >>> clipped_surrogate(
        ...     half_more, torch.zeros(1, 2), advantages=torch.tensor([[1.0, -1.0]]),
        ...     mask=torch.tensor([[True, True]]), clip_low=0.2, clip_high=0.2,
        ... )
        tensor([[-1.2000,  1.5000]])
    """
    ratio = probability_ratio(log_probs, old_log_probs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def binding_clips(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
    """Return the tokens at which a clip of `clipped_surrogate` binds: the gradient is 0 there.

    low:  A < 0 and ratio < 1 - clip_low
    high: A > 0 and ratio > 1 + clip_high
    dual: A < 0 and ratio > dual_clip

    A ratio out of bounds on the other side of its advantage is not clipped. At most one clip binds
    at a token.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the ratio may fall below 1, in (0, 1].
        clip_high: how far the ratio may rise above 1, above 0.
        dual_clip: as in `clipped_surrogate`; None: there is no entry `dual`.

    Returns:
        By name, True where that clip binds; False where the mask is False.

    Example:
        >>> half_more = torch.tensor([[1.5, 1.5]]).log()
        >>> clips = binding_clips(
        ...     half_more, torch.zeros(1, 2), advantages=torch.tensor([[1.0, -1.0]]),
        ...     mask=torch.tensor([[True, True]]), clip_low=0.2, clip_high=0.2,
        ... )
        >>> clips["high"]
        tensor([[ True, False]])
    """
    ratio = probability_ratio(log_probs, old_log_probs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    clips = {
        "low": (advantages < 0) & (ratio < 1 - clip_low),
        "high": (advantages > 0) & (ratio > 1 + clip_high),
    }
    if dual_clip is not None:
        clips["dual"] = (advantages < 0) & (ratio > dual_clip)
    return clips


@dataclass(frozen=True)
class ClippedSurrogate(PolicyLoss):
    """`clipped_surrogate` of an experience.

    Args:
        clip_low: how far the ratio may fall below 1, in (0, 1].
        clip_high: how far the ratio may rise above 1, above 0.
        dual_clip: largest ratio that a negative advantage is multiplied with, above 1; None: no
            such limit.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, for example 3.0, not {self.dual_clip}")

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `clipped_surrogate`: in the unit of the advantages, 0 where the mask is False."""
        return clipped_surrogate(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return `binding_clips`."""
        return binding_clips(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
