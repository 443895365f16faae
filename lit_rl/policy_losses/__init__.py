"""Policy losses: from log-probs and advantages to a loss per response token."""

from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.policy_losses.clipped_surrogate import (
    ClippedSurrogate,
    binding_clips,
    clipped_surrogate,
)

__all__ = ["ClippedSurrogate", "PolicyLoss", "binding_clips", "clipped_surrogate"]
