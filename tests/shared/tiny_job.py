"""What most tests train: a tiny random Llama that answers prompts of digits."""

from typing import Any

from lit_rl.data import PromptDataModule
from lit_rl.models import RandomCausalLM
from lit_rl.tasks import LargestDigit

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
# Of any architecture with rotary positions.
TWO_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
# The smallest heads that the kernels of accelerators take.
HEADS_OF_16 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "inference_mode": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}


def build_source(config: dict[str, Any] = LLAMA, **settings: Any) -> RandomCausalLM:
    return RandomCausalLM(alphabet="0123456789>", config=config, **settings)


def build_data(**settings: Any) -> PromptDataModule:
    """24 prompts of two digits to train on, in batches of 6, and 6 held-out ones."""
    task = LargestDigit(num_digits=2, num_train=24, num_held_out=6)
    defaults = {"task": task, "batch_size": 6, "eval_batch_size": 6, "max_prompt_tokens": 8}
    return PromptDataModule(**{**defaults, **settings})


def num_fives(responses: list[str]) -> list[float]:
    """A reward with signal in almost every group of random digits."""
    return [float(response.count("5") + 2 * response.count("7")) for response in responses]
