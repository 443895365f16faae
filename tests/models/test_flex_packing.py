"""Flex attention says what the attention in blocks says, which is that of padded passes."""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention as flex
from transformers import AutoConfig

from lit_rl.models import LoRA, Policy, RandomCausalLM, flex_packing
from lit_rl.models.flex_packing import BLOCK, FlexPackedAttention, flex_refusal
from lit_rl.models.packing import packed
from random_batch import random_batch
from tiny_job import HEADS_OF_16

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "mistral", "cohere", "opt"]


batch_of = partial(random_batch, begin=1)
SMALL = batch_of((3, 1, 4), longest=9)


def outcome(policy, batch, layout):
    """Log-probs, entropy and gradient of a pass."""
    policy.layout = layout
    policy.zero_grad()
    output = policy(batch, temperature=0.7)
    (output.log_probs.sum() + output.entropy.square().sum()).backward()
    gradient = [p.grad.flatten() for p in policy.parameters() if p.requires_grad]
    return output.log_probs.detach(), output.entropy.detach(), torch.cat(gradient)


def assert_same(policy, batch, tolerance=1e-5):
    results = (outcome(policy, batch, layout) for layout in ("packed_flex", "packed"))
    for ours, expected in zip(*results, strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * scale)
    assert expected.abs().max() > 1e-2


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_attends_to_its_sequence_up_to_it(window):
    """Law: and within a window to the last of these."""
    rows = packed(SMALL, with_end=True)
    attends = FlexPackedAttention(rows).mask(window).mask_mod
    places = torch.arange(len(rows.ids))
    allowed = attends(places, places, places[:, None], places)
    sequences = []
    for number, prompt in enumerate(rows.prompt_of_row.tolist()):
        start, length = int(rows.response_starts[number]), int(rows.lengths[number])
        prompt_tokens = rows.prompt_tokens[prompt, : int(rows.prompt_lengths[prompt])].tolist()
        sequences.append([*prompt_tokens, *range(start, start + length)])
    seen = set()
    for sequence in sequences:
        for end, token in enumerate(sequence, start=1):
            first = 0 if window is None else max(0, end - window)
            assert allowed[token].nonzero()[:, 0].tolist() == sorted(sequence[first:end])
            seen.add(token)
    assert seen == set(places.tolist())


@pytest.mark.parametrize("window", [None, 500])
def test_blocks_are_those_in_which_tokens_attend(window):
    """Expected: those that torch finds in the written-out mask."""
    batch = batch_of((2, 3), longest=700)
    rows = packed(batch, with_end=False)
    ours = FlexPackedAttention(rows).mask(window)
    length = len(rows.ids)
    expected = flex.create_block_mask(ours.mask_mod, None, None, length, length, device="cpu")
    assert ours.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(ours.to_dense(), expected.to_dense())
    assert expected.full_kv_num_blocks.sum() > 3
    assert expected.sparsity() > 50  # per cent
    assert length % BLOCK  # the last block is not full of tokens


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_values_and_gradients_are_those_of_the_attention_in_blocks(tiny_source, model_type):
    assert_same(Policy(tiny_source(model_type).model(0)), SMALL)


@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_windows_and_soft_caps_are_kept(tiny_source):
    config = {"sliding_window": 3, "attn_logit_softcapping": 0.5}
    policy = Policy(tiny_source("gemma2", config=config).model(0))
    assert_same(policy, SMALL)
    plain = Policy(tiny_source("gemma2").model(0))
    plain.load_state_dict(policy.state_dict())
    ours, others = (outcome(p, SMALL, "packed_flex")[0] for p in (policy, plain))
    assert (ours - others).abs().max() > 1e-3


@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_checkpointed_passes_are_recomputed_with_the_same_attention(tiny_source):
    policy = Policy(tiny_source("mistral").model(0))
    policy.enable_gradient_checkpointing()
    assert_same(policy, SMALL)


@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_an_adapter_gets_its_gradient(adapted):
    assert_same(adapted(LoRA(rank=4)), SMALL)


@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_queries_and_keys_wider_than_values_are_narrowed(tiny_source):
    """As under autocast, where the rotation leaves float32."""
    policy = Policy(tiny_source().model(0))
    with torch.no_grad():
        expected = policy(SMALL, temperature=1.0).log_probs
        policy.layout = "packed_flex"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = policy(SMALL, temperature=1.0).log_probs
    assert 0 < (ours - expected).abs().max() < 0.1


def test_a_mask_is_made_once_for_all_layers_of_a_window():
    attention = FlexPackedAttention(packed(SMALL, with_end=False))
    assert attention.mask(3) is attention.mask(3)
    assert attention.mask(3) is not attention.mask(None)


@pytest.mark.slow
def test_rows_of_any_length_need_few_compilations(tiny_source, monkeypatch):
    """Two at least by torch: rows of one block of the mask are another version than longer ones.

    A third, as the row compiled first may have as many blocks as the model has heads.
    """
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(flex, "_validate_device", lambda *states: None)  # no backward on a CPU
    function = torch.compile(flex.flex_attention, backend=backend, dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex_packing, "compiled", lambda: function)
    config = {"max_position_embeddings": 256, "sliding_window": 9, "attn_logit_softcapping": 2.0}
    policy = Policy(tiny_source("gemma2", config=config).model(0))
    for seed, longest in enumerate((9, 40, 50, 60, 70, 80)):
        assert_same(policy, batch_of((4, 3), longest=longest, seed=seed))
    assert 1 <= len(compiled) <= 3


def test_a_model_with_dropout_in_its_attention_is_refused():
    config = AutoConfig.for_model("gpt2", attn_pdrop=0.1, resid_pdrop=0.3)
    assert "{'attn_pdrop': 0.1}" in flex_refusal(config)
    assert flex_refusal(AutoConfig.for_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.3)) is None


def test_a_model_with_small_heads_is_refused():
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=8)
    assert "heads of at least 16 numbers, and those of this model have 8" in flex_refusal(config)


SIZES = {**HEADS_OF_16, "max_position_embeddings": 512}
ON_GPU = {
    "llama": SIZES,
    "gemma2": {**SIZES, "sliding_window": 30, "attn_logit_softcapping": 2.0},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 512, "initializer_range": 0.2},
}


def on_gpu(model_type):
    source = RandomCausalLM({"model_type": model_type, **ON_GPU[model_type]}, "0123456789>")
    return Policy(source.model(0)).to("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", ON_GPU)
def test_the_compiled_kernel_gives_the_same(model_type, checkpointing):
    policy = on_gpu(model_type)
    if checkpointing:
        policy.enable_gradient_checkpointing()
    for seed, longest in enumerate((9, 60, 200)):
        assert_same(policy, batch_of((4, 3), longest=longest, seed=seed).to("cuda"), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", ON_GPU)
def test_the_compiled_kernel_runs_in_mixed_precision(model_type):
    """Both attentions round to bfloat16, at other places."""
    policy, batch = on_gpu(model_type), batch_of((4, 3), longest=200).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        assert_same(policy, batch, tolerance=0.05)
