"""Algorithms as LightningModules: loops, and the subclasses that name their choices."""

from lit_rl.algorithms.actor_critic import ActorCritic
from lit_rl.algorithms.cispo import CISPO
from lit_rl.algorithms.dapo import DAPO
from lit_rl.algorithms.gmpo import GMPO
from lit_rl.algorithms.gpg import GPG
from lit_rl.algorithms.grpo import GRPO, DrGRPO
from lit_rl.algorithms.gspo import GSPO
from lit_rl.algorithms.old_log_probs import (
    CurrentLogProbs,
    OldLogProbs,
    RecomputedLogProbs,
    SamplerLogProbs,
)
from lit_rl.algorithms.opo import OPO
from lit_rl.algorithms.penalized_trpo import PenalizedTRPO
from lit_rl.algorithms.policy_gradient import PolicyGradient
from lit_rl.algorithms.ppo import PPO
from lit_rl.algorithms.reinforce import Reinforce
from lit_rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from lit_rl.algorithms.remax import ReMax
from lit_rl.algorithms.rl_module import RLModule
from lit_rl.algorithms.rloo import RLOO
from lit_rl.algorithms.sapo import SAPO
from lit_rl.algorithms.trpo import TRPO

__all__ = [
    "CISPO",
    "DAPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
    "RLOO",
    "SAPO",
    "TRPO",
    "ActorCritic",
    "CurrentLogProbs",
    "DrGRPO",
    "OldLogProbs",
    "PenalizedTRPO",
    "PolicyGradient",
    "RLModule",
    "ReMax",
    "RecomputedLogProbs",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SamplerLogProbs",
]
