"""A tiny algorithm on the largest-digit task, and a run of a few iterations."""

from functools import partial

import lightning as L
import pytest
import torch

from lit_rl.algorithms import GRPO
from lit_rl.data import PromptDataModule
from lit_rl.evaluation import Evaluation
from lit_rl.generation import SamplingSettings
from lit_rl.models import RandomCausalLM
from lit_rl.rewards import ExactAnswer
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


@pytest.fixture
def source():
    return lambda config=LLAMA, **settings: RandomCausalLM(
        alphabet="0123456789>", config=config, **settings
    )


@pytest.fixture
def algorithm(source):
    """Build an algorithm; SGD by default, since AdamW hides a wrong scale of the gradient."""

    def build(kind=GRPO, **settings):
        defaults = {
            "source": source(),
            "reward": ExactAnswer(),
            "group_size": 4,
            "sampling": SamplingSettings(max_new_tokens=4),
            "optimizer": partial(torch.optim.SGD, lr=0.5),
            "kl_coef": 0.0,
            "evaluation": Evaluation(num_samples=2, pass_at=(2,)),
        }
        return kind(**{**defaults, **settings})

    return build


@pytest.fixture
def data():
    def build(**settings):
        task = LargestDigit(num_digits=2, num_train=24, num_held_out=6)
        defaults = {"task": task, "batch_size": 6, "eval_batch_size": 6, "max_prompt_tokens": 8}
        return PromptDataModule(**{**defaults, **settings})

    return build


@pytest.fixture
def fit(tmp_path, data):
    """Train for some iterations and return the trainer; `settings` go to the Trainer."""

    def run(module, iterations=2, datamodule=None, ckpt_path=None, **settings):
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
            "use_distributed_sampler": False,
            "inference_mode": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "max_epochs": -1,
            "max_steps": iterations * module.steps_per_iteration,
        }
        trainer = L.Trainer(**{**defaults, **settings})
        trainer.fit(module, datamodule or data(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def weights():
    return lambda module: torch.cat([p.detach().flatten() for p in module.policy.parameters()])
