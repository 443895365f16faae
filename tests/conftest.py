"""One thread per test process: the models are tiny, and the numbers then repeat bit for bit."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping
import pytest
import torch

from lit_rl.models import flex_packing

torch.set_num_threads(1)


@pytest.fixture
def uncompiled_flex_attention(monkeypatch):
    """Let flex attention run here: its operator itself, which has a backward pass on any device."""

    def attention(query, key, value, *, score_mod, block_mask, scale, enable_gqa, kernel_options):
        assert enable_gqa
        result, _, _ = torch.ops.higher_order.flex_attention(
            query,
            key,
            value,
            score_mod or (lambda score, *places: score),
            block_mask.as_tuple(),
            query.shape[-1] ** -0.5 if scale is None else scale,
            kernel_options,
        )
        return result

    monkeypatch.setattr(flex_packing, "compiled", lambda: attention)


@pytest.fixture
def without_type_checks():
    """As outside the tests, where no type of an argument is checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
