"""Algorithms as LightningModules: loops, and the subclasses that name their choices."""

from lit_rl.algorithms.grpo import GRPO, DrGRPO
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.algorithms.rl_module import RLModule

__all__ = ["GRPO", "DrGRPO", "PolicyGradient", "RLModule"]
