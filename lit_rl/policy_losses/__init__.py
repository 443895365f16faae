"""Policy losses: from log-probs and advantages to a loss per response token."""

from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.policy_losses.clipped_surrogate import (
    ClippedSurrogate,
    binding_clips,
    clipped_surrogate,
)
from lit_rl.policy_losses.clipped_weight import ClippedWeight, binding_weight_clips, clipped_weight
from lit_rl.policy_losses.geometric_mean_clipped import (
    GeometricMeanClipped,
    geometric_mean_clipped,
)
from lit_rl.policy_losses.log_prob_surrogate import LogProbSurrogate, log_prob_surrogate
from lit_rl.policy_losses.off_policy_sequence_mask import (
    OffPolicySequenceMask,
    off_policy_negatives,
)
from lit_rl.policy_losses.sequence_clipped import (
    SequenceClipped,
    binding_sequence_clips,
    sequence_clipped,
)
from lit_rl.policy_losses.soft_gate import SoftGate, soft_gate
from lit_rl.policy_losses.surrogate import Surrogate, surrogate

__all__ = [
    "ClippedSurrogate",
    "ClippedWeight",
    "GeometricMeanClipped",
    "LogProbSurrogate",
    "OffPolicySequenceMask",
    "PolicyLoss",
    "SequenceClipped",
    "SoftGate",
    "Surrogate",
    "binding_clips",
    "binding_sequence_clips",
    "binding_weight_clips",
    "clipped_surrogate",
    "clipped_weight",
    "geometric_mean_clipped",
    "log_prob_surrogate",
    "off_policy_negatives",
    "sequence_clipped",
    "soft_gate",
    "surrogate",
]
