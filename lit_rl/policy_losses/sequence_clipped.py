"""GSPO's loss: one ratio for a whole response, clipped."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import log_ratio, masked_mean
from lit_rl.policy_losses.base import PolicyLoss, ratio_arguments
from lit_rl.policy_losses.clip_range import check_clip_range
from lit_rl.policy_losses.clipped_surrogate import binding_clips, clipped_surrogate
from lit_rl.types import Experience


def sequence_clipped(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "rollouts tokens"]:
    """sequence_clipped = -min(s_t * A, clip(s_t, 1 - clip_low, 1 + clip_high) * A).

    s_t = sg[s] * p_t / sg[p_t], with s = exp(mean over the tokens of log_probs - old_log_probs) and
    sg the stopped gradient: the value is the sequence's ratio, the gradient each token's own. So
    advantages may differ from token to token; where they do not, it is the loss of the sequence,
    -min(s * A, clip(s) * A), and its gradient. GSPO, arXiv:2507.18071, equation 5, in the form of
    section 4.3 (GSPO-token). The log of s is bounded as in `bounded_exp`.

    An advantage of 0 gives a loss of 0, whatever the ratio.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the sequence's ratio may fall below 1, in (0, 1].
        clip_high: how far the sequence's ratio may rise above 1, above 0.

    Returns:
        Loss per token, in the unit of the advantages; 0, and without gradient, where the mask is
        False.

    Example:
        The ratios 4 and 1 have the geometric mean 2:

        >>> log_probs = torch.tensor([[4.0, 1.0]]).log()
        >>> sequence_clipped(
        ...     log_probs, torch.zeros(1, 2), advantages=torch.tensor([[1.0, -1.0]]),
        ...     mask=torch.tensor([[True, True]]), clip_low=0.2, clip_high=0.2,
        ... )
        tensor([[-1.2000,  2.0000]])
    """
    current = _sequence_log_ratio(log_probs, old_log_probs, mask)
    return clipped_surrogate(
        current,
        torch.zeros_like(current),
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def binding_sequence_clips(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    advantages: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
    """Return the tokens at which a clip of `sequence_clipped` binds: the gradient is 0 there.

    As `binding_clips`, with the sequence's ratio: where all advantages of a sequence are equal, a
    clip binds at all of its tokens or at none.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        advantages: of each token, in any unit.
        mask: True where a token counts.
        clip_low: how far the sequence's ratio may fall below 1, in (0, 1].
        clip_high: how far the sequence's ratio may rise above 1, above 0.

    Returns:
        By name, True where that clip binds; False where the mask is False.

    Example:
        >>> log_probs = torch.tensor([[4.0, 1.0]]).log()
        >>> clips = binding_sequence_clips(
        ...     log_probs, torch.zeros(1, 2), advantages=torch.tensor([[1.0, 1.0]]),
        ...     mask=torch.tensor([[True, True]]), clip_low=0.2, clip_high=0.2,
        ... )
        >>> clips["high"]
        tensor([[True, True]])
    """
    current = _sequence_log_ratio(log_probs, old_log_probs, mask)
    return binding_clips(
        current,
        torch.zeros_like(current),
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def _sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Value: the mean log-ratio of the sequence. Gradient: that of the token's log-prob."""
    detached = log_probs.detach()
    mean = masked_mean(log_ratio(detached, old_log_probs, mask), mask, dim=1, keepdim=True)
    # Zero is added last: it costs the small mean none of its digits.
    return mean + (log_probs - detached)


@dataclass(frozen=True)
class SequenceClipped(PolicyLoss):
    """`sequence_clipped` of an experience.

    The defaults are the paper's (section 5.1). They are small because the ratio of a sequence is a
    mean over its tokens.

    Args:
        clip_low: how far the sequence's ratio may fall below 1, in (0, 1].
        clip_high: how far the sequence's ratio may rise above 1, above 0.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high, example=4e-4)

    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `sequence_clipped`: in the unit of the advantages, 0 where the mask is False."""
        return sequence_clipped(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return `binding_sequence_clips`."""
        return binding_sequence_clips(
            *ratio_arguments(log_probs, experience),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
