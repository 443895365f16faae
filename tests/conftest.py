"""One thread per test process: the models are tiny, and the numbers then repeat bit for bit."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def without_type_checks():
    """As outside the tests, where no type of an argument is checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
