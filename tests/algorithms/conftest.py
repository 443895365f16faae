"""A tiny algorithm on the largest-digit task, and a run of a few iterations."""

from functools import partial

import lightning as L
import pytest
import torch

from lit_rl.algorithms import GRPO
from lit_rl.evaluation import Evaluation
from lit_rl.generation import SamplingSettings
from lit_rl.rewards import ExactAnswer
from tiny_job import TRAINER, build_data, build_source


@pytest.fixture
def source():
    return build_source


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
    return build_data


@pytest.fixture
def fit(tmp_path, data):
    """Train for some iterations and return the trainer; `settings` go to the Trainer."""

    def run(module, iterations=2, datamodule=None, ckpt_path=None, **settings):
        defaults = {
            **TRAINER,
            "devices": 1,
            "default_root_dir": tmp_path,
            "limit_val_batches": 0,
            "max_steps": iterations * module.steps_per_iteration,
        }
        trainer = L.Trainer(**{**defaults, **settings})
        trainer.fit(module, datamodule or data(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def weights():
    return lambda module: torch.cat([p.detach().flatten() for p in module.policy.parameters()])
