"""New LoRA and DoRA adapters."""

import sys

import pytest
import torch

from lit_rl.models import LoRA
from lit_rl.models.adapters import adapter_layers

IDS = torch.arange(8)[None]


def trained_numbers(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# A layer of the tiny Llama: q 32 -> 32, k 32 -> 16, v 32 -> 16, o 32 -> 32, gate and up 32 -> 48,
# down 48 -> 32. The sums of in and out are 64, 48, 48, 64, 80, 80, 80: 464, and of out alone 224.
@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (LoRA(rank=4), 2 * 4 * 464),
        (LoRA(rank=16), 2 * 16 * 464),
        (LoRA(rank=4, use_dora=True), 2 * (4 * 464 + 224)),
        (LoRA(rank=4, target_modules=["q_proj", "v_proj"]), 2 * 4 * (64 + 48)),
        (LoRA(rank=4, target_modules=["layers.1.mlp.down_proj"]), 4 * 80),
        (LoRA(rank=4, target_modules=r".*layers\.0\..*_proj"), 4 * 464),
    ],
)
def test_what_is_trained_is_rank_times_in_and_out_of_each_layer(adapted, adapter, expected):
    assert trained_numbers(adapted(adapter)) == expected


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "gemma2", "cohere", "granite", "opt", "bloom"]
)
def test_a_new_adapter_changes_no_logit(adapted, tiny_source, model_type, dtype, use_dora):
    base = tiny_source(model_type, dtype=dtype).model(0, frozen=True)
    policy = adapted(LoRA(use_dora=use_dora), model_type, dtype=dtype, trained=False)
    assert torch.equal(policy.model(IDS).logits, base(IDS).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_matrices_are_float32_and_there_is_no_warning_of_a_frozen_base(adapted, recwarn, dtype):
    policy = adapted(LoRA(use_dora=True), dtype=dtype)
    trained = {p.dtype for p in policy.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    assert policy.model.dtype == getattr(torch, dtype)
    assert not [w for w in recwarn if "vanish" in str(w.message) or "fan_in" in str(w.message)]


def test_a_layer_adds_alpha_over_rank_times_the_matrices(adapted):
    """y = W x + 12 / 4 * B A x, worked out from the matrices."""
    policy = adapted(LoRA(rank=4, alpha=12))
    layer = policy.model.model.layers[1].self_attn.v_proj
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), x @ layer.base_layer.weight.T + 3 * x @ a.T @ b.T)


def test_dora_scales_the_rows_of_the_sum_to_its_magnitudes(adapted):
    """y = m (W + 2 B A) x / |W + 2 B A|, the norm taken over each row."""
    policy = adapted(LoRA(rank=4, alpha=8, use_dora=True))
    layer = policy.model.model.layers[1].self_attn.v_proj
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = layer.base_layer.weight + 2 * b @ a
    magnitude = layer.lora_magnitude_vector["default"].weight
    expected = x @ (magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(magnitude, layer.base_layer.weight.norm(dim=1))


def test_equal_seeds_give_equal_adapters_and_leave_the_random_state(tiny_source):
    def matrices(seed):
        model = tiny_source().model(0)
        state = torch.random.get_rng_state()
        LoRA().inject(model, seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(matrices(3), matrices(3))
    assert not torch.equal(matrices(3), matrices(4))


def test_dropout_acts_in_training_mode_only(adapted):
    policy, same = adapted(LoRA(dropout=0.5)), adapted(LoRA())
    policy.eval()
    assert torch.equal(policy.model(IDS).logits, same.model(IDS).logits)
    policy.train()
    assert not torch.equal(policy.model(IDS).logits, same.model(IDS).logits)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["qproj"], r"\['qproj'\]"),
        (["q_proj", "typo_proj"], r"\['typo_proj'\]"),
        (r".*\.attention", r"\['\.\*\\\\\.attention'\]"),
        (["lm_head"], r"\['lm_head'\]"),
        (["input_layernorm"], r"\['input_layernorm'\]"),
        ([], r"\[\]"),
    ],
)
def test_a_target_that_is_not_there_is_named_beside_those_that_are(tiny_source, targets, named):
    existing = r"\['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj'\]"
    message = rf"target_modules of LoRA is .*of which {named} is no linear .* it has {existing}"
    model = tiny_source().model(0)
    with pytest.raises(ValueError, match=message):
        LoRA(target_modules=targets).inject(model, 0)
    assert not adapter_layers(model)  # the model is as it was


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank of LoRA is 0, must be at least 1"),
        ({"alpha": 0}, "alpha of LoRA is 0, must be at least 1"),
        ({"dropout": 1.0}, r"dropout of an adapter is 1\.0, must be in \[0, 1\)"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**settings)


def test_a_missing_peft_is_named_with_what_installs_it(tiny_source, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "peft.functional", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-rl\[lora\]'"):
        LoRA().inject(tiny_source().model(0), 0)
