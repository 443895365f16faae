"""Causal language models: where they come from, how they score, how they are exported."""

from lit_rl.models.adapters import Adapter
from lit_rl.models.base import CausalLMSource
from lit_rl.models.critic import (
    Critic,
    CriticSource,
    PolicyBackbone,
    PretrainedBackbone,
    SharedTrunk,
)
from lit_rl.models.export import save_pretrained
from lit_rl.models.lora import LoRA
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.policy import Policy, frozen_copy
from lit_rl.models.pretrained import PretrainedCausalLM
from lit_rl.models.pretrained_lora import PretrainedLoRA
from lit_rl.models.random_causal_lm import RandomCausalLM
from lit_rl.models.smollm2 import SmolLM2

__all__ = [
    "Adapter",
    "CausalLMSource",
    "Critic",
    "CriticSource",
    "LoRA",
    "Policy",
    "PolicyBackbone",
    "PretrainedBackbone",
    "PretrainedCausalLM",
    "PretrainedLoRA",
    "RandomCausalLM",
    "SharedTrunk",
    "SmolLM2",
    "evaluation_mode",
    "frozen_copy",
    "save_pretrained",
]
