import pytest
import torch

from lit_rl.models import Adapter, Policy, RandomCausalLM
from tiny_job import TWO_LAYERS

ARCHITECTURES = {
    "qwen2": TWO_LAYERS,
    "qwen3": {**TWO_LAYERS, "head_dim": 8},
    "gemma": {**TWO_LAYERS, "head_dim": 8},
    "mistral": {**TWO_LAYERS, "sliding_window": 4},
    "llama": TWO_LAYERS,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2},
    # The cap, the scale and the divisor are far from what leaves logits as they are.
    "gemma2": {**TWO_LAYERS, "head_dim": 8, "final_logit_softcapping": 1.0},
    "cohere": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
        "logit_scale": 0.25,
    },
    "granite": {**TWO_LAYERS, "logits_scaling": 4.0},
    # Projects its hidden states behind the last layer.
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "init_std": 0.2,
        "max_position_embeddings": 64,
    },
    # ALiBi: takes no position ids.
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
}


@pytest.fixture
def tiny_source():
    """Sources of tiny random models over digits and ">": `tiny_source(model_type, ...)`."""

    def source(model_type: str = "llama", **options) -> RandomCausalLM:
        fields = {**ARCHITECTURES[model_type], **options.pop("config", {})}
        return RandomCausalLM({"model_type": model_type, **fields}, "0123456789>", **options)

    return source


@pytest.fixture
def adapted(tiny_source):
    """A tiny policy with an adapter, as it is after some training: `adapted(LoRA(), ...)`."""

    def policy(adapter: Adapter, model_type: str = "llama", *, trained: bool = True, **options):
        model = tiny_source(model_type, **options).model(0, frozen=True)
        adapter.inject(model, seed=0)
        if trained:
            randomize(model)
        return Policy(model)

    return policy


def randomize(model) -> None:
    """Move everything that an adapter trains, so that it changes what the model computes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
