"""Captures of a step; what they compute is compared in test_cached_generator.py."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.generation import CachedGenerator, SamplingSettings, captured_step
from lit_rl.generation.captured_step import captured, weights_cast_once
from lit_rl.models import Policy, RandomCausalLM
from tiny_job import HEADS_OF_16

ROWS = [[1, 4, 13], [1, 4, 5, 6, 13], [1, 12, 13]]  # "1>", "123>", "9>"
SAMPLING = SamplingSettings(max_new_tokens=24, temperature=2.0)
CALL = {"group_size": 5, "seed": (3,)}
ON_GPU = {
    "llama": HEADS_OF_16,
    "gemma2": {**HEADS_OF_16, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
}


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.count += 1
        return result


def test_a_weight_is_cast_once_for_all_passes_and_anew_afterwards():
    """By hand: a cast of weight and input per pass; of two passes the second casts the input."""
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    with torch.no_grad(), autocast:
        with Casts() as apart:
            expected = layer(x), layer(x)
        with Casts() as together, weights_cast_once(x.device):
            results = layer(x), layer(x)
        layer.weight.zero_()
        with weights_cast_once(x.device):
            assert not layer(x).any()
    assert (apart.count, together.count) == (4, 3)
    assert torch.equal(torch.stack(results), torch.stack(expected))


def test_without_autocast_nothing_is_cast():
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with torch.no_grad(), Casts() as casts, weights_cast_once(x.device):
        assert layer(x).dtype == torch.float32
    assert casts.count == 0


def test_a_model_that_cannot_be_captured_is_named(prompts_of, source, monkeypatch):
    def fails(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured_step, "captured", fails)
    monkeypatch.setattr(CachedGenerator, "refusal", lambda self, device: None)
    request = (Policy(source.model(0)), source.tokenizer(), prompts_of(ROWS), SAMPLING)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be captured .*cuda_graphs"):
        CachedGenerator(cuda_graphs=True)(*request, **CALL)


def test_without_a_cuda_device_one_sentence_says_so(prompts_of, source):
    request = (Policy(source.model(0)), source.tokenizer(), prompts_of(ROWS), SAMPLING)
    with pytest.raises(ValueError, match="cuda_graphs needs a CUDA device, and this is a run on c"):
        CachedGenerator(cuda_graphs=True)(*request, **CALL)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replay_reads_and_writes_the_same_memory():
    """By hand: the sum of what has been added so far."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, total = torch.ones(4, device=device), torch.zeros(4, device=device)
    replay = captured(lambda: total.copy_(x) * 2, device)
    x.fill_(3)
    assert replay().tolist() == [6.0] * 4
    assert total.tolist() == [3.0] * 4
    x.fill_(5)
    assert replay().tolist() == [10.0] * 4


def on_gpu(model_type, prompts):
    source = RandomCausalLM({"model_type": model_type, **ON_GPU[model_type]}, "0123456789>")
    device = torch.device("cuda", torch.cuda.current_device())
    return Policy(source.model(0)).to(device), source.tokenizer(), prompts.to(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", ON_GPU)
def test_graphs_give_the_same(prompts_of, model_type):
    request = (*on_gpu(model_type, prompts_of(ROWS)), SAMPLING)
    plain = CachedGenerator()(*request, **CALL)
    # For the second rollout the weights are others, where the first were.
    for _ in range(2):
        graphs = CachedGenerator(cuda_graphs=True)(*request, **CALL)
        assert torch.equal(graphs.response_ids, plain.response_ids)
        assert torch.equal(graphs.mask, plain.mask)
        close = {"rtol": 0, "atol": 1e-4}
        torch.testing.assert_close(graphs.sampler_log_probs, plain.sampler_log_probs, **close)
        with torch.no_grad():
            for parameter in request[0].parameters():
                parameter.mul_(0.9)
        plain = CachedGenerator()(*request, **CALL)
    assert request[0].fits_group_cache


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_run_in_mixed_precision(prompts_of):
    request = (*on_gpu("llama", prompts_of(ROWS)), SAMPLING)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        rollout = CachedGenerator(cuda_graphs=True)(*request, **CALL)
    assert request[0].fits_group_cache  # the log-probs are those of a plain pass
    assert rollout.mask.any(dim=1).all()
