"""Algorithms as LightningModules: loops, and the subclasses that name their choices."""

from lit_rl.algorithms.grpo import GRPO, DrGRPO
from lit_rl.algorithms.old_log_probs import (
    CurrentLogProbs,
    OldLogProbs,
    RecomputedLogProbs,
    SamplerLogProbs,
)
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.algorithms.rl_module import RLModule

__all__ = [
    "GRPO",
    "CurrentLogProbs",
    "DrGRPO",
    "OldLogProbs",
    "PolicyGradient",
    "RLModule",
    "RecomputedLogProbs",
    "SamplerLogProbs",
]
