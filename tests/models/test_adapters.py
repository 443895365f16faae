"""What stands upon a shared base: copies, switches, merged models, hashes."""

import copy

import pytest
import torch

from lit_rl.generation import CachedGenerator, SamplingSettings, TransformersGenerator
from lit_rl.models import LoRA, PolicyBackbone, frozen_copy
from lit_rl.models.adapters import (
    adapter_layers,
    base_fingerprint,
    base_names,
    base_parameters,
    copy_on_base,
    merged,
    switch_adapter,
    without_base,
)
from lit_rl.types import Prompts, Sequences

IDS = torch.arange(8)[None]
MASK = torch.ones_like(IDS, dtype=torch.bool)
ROWS = Sequences(
    prompt_ids=IDS[:, :4], prompt_mask=MASK[:, :4], response_ids=IDS[:, 4:], mask=MASK[:, 4:]
)


def logits(policy):
    with torch.no_grad():
        return policy.model(IDS, attention_mask=MASK.long()).logits


def base_of(policy):
    return [parameter.detach().clone() for parameter in base_parameters(policy)]


def is_unchanged(policy, base):
    return all(
        torch.equal(now, before) for now, before in zip(base_parameters(policy), base, strict=True)
    )


def gradients(module):
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def test_the_base_is_every_weight_but_those_of_the_adapter(adapted, tiny_source):
    """The plain model's own parameters: same tensors, same order."""
    policy, plain = adapted(LoRA()), tiny_source().model(0)
    for ours, original in zip(base_parameters(policy), plain.parameters(), strict=True):
        assert torch.equal(ours, original)
    assert not any(parameter.requires_grad for parameter in base_parameters(policy))


def test_a_model_without_an_adapter_has_no_base_and_is_copied_whole(tiny_source):
    model = tiny_source().model(0)
    assert base_parameters(model) == []
    shared = {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in copy_on_base(model).parameters()
    }
    assert not shared


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_reference_is_on_the_base_itself_and_stays_when_the_adapter_moves(adapted, use_dora):
    policy = adapted(LoRA(rank=4, use_dora=use_dora))
    reference, before = frozen_copy(policy), logits(policy)
    for ours, theirs in zip(base_parameters(reference), base_parameters(policy), strict=True):
        assert ours is theirs
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not any(module.training for module in reference.modules())

    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    policy.model(IDS).logits.square().mean().backward()
    optimizer.step()
    assert torch.equal(logits(reference), before)
    assert not torch.equal(logits(policy), before)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_whose_adapter_is_off_is_its_base_bit_for_bit(
    adapted, tiny_source, dtype, model_type, use_dora
):
    policy = adapted(LoRA(use_dora=use_dora), model_type, dtype=dtype)
    with_adapter = logits(policy)
    base = tiny_source(model_type, dtype=dtype).model(0, frozen=True).eval()
    reference = frozen_copy(policy)
    switch_adapter(reference, on=False)
    assert torch.equal(logits(reference), base(IDS, attention_mask=MASK.long()).logits)
    switch_adapter(reference, on=True)
    assert torch.equal(logits(reference), with_adapter)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    # The policy itself was never switched.
    assert torch.equal(logits(policy), with_adapter)
    assert not torch.equal(logits(policy), base(IDS).logits)


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_critic_has_an_adapter_of_its_own_that_starts_as_the_policys(
    adapted, tiny_source, use_dora
):
    policy = adapted(LoRA(rank=4, use_dora=use_dora))
    critic = PolicyBackbone().critic(policy, tiny_source().tokenizer())
    torch.testing.assert_close(
        critic.backbone(IDS).last_hidden_state, policy.base_model(IDS).last_hidden_state
    )
    in_policy = {id(parameter) for parameter in policy.parameters()}
    shared = [p for p in critic.parameters() if id(p) in in_policy]
    # All but the adapter and the head; this model has an output head, which a critic has not.
    assert len(shared) == len(base_parameters(policy)) - 1
    assert not any(parameter.requires_grad for parameter in shared)
    # 464 * rank per layer (see test_lora), DoRA 224 more, and the head: 32 weights and a bias.
    trained = sum(p.numel() for p in critic.parameters() if p.requires_grad)
    assert trained == 2 * (464 * 4 + 224 * use_dora) + 33


@pytest.mark.parametrize("use_dora", [False, True])
def test_checkpointing_recomputes_each_role_under_its_own_adapter(adapted, tiny_source, use_dora):
    """Policy, critic and reference run before the first backward pass: gradients are the same."""

    def trained(checkpointed):
        policy = adapted(LoRA(rank=4, use_dora=use_dora))
        critic = PolicyBackbone().critic(policy, tiny_source().tokenizer())
        torch.nn.init.ones_(critic.head.weight)
        reference = frozen_copy(policy)
        with torch.no_grad():
            for parameter in critic.backbone.parameters():
                if parameter.requires_grad:
                    parameter.mul_(2.0)
        if checkpointed:
            policy.enable_gradient_checkpointing()
            critic.enable_gradient_checkpointing()
        policy.train()
        critic.train()
        loss = policy(ROWS, temperature=1.0).log_probs.square().mean()
        values = critic(critic.states(ROWS), ROWS.mask)
        switch_adapter(reference, on=False)
        logits(reference)
        (loss + values.square().mean()).backward()
        return gradients(policy), gradients(critic)

    for plain, recomputed in zip(trained(False), trained(True), strict=True):
        assert plain.keys() == recomputed.keys()
        for name, gradient in plain.items():
            assert gradient.abs().sum() > 0, name
            assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "opt", "bloom"])
def test_the_merged_model_computes_the_same_and_the_original_stays(
    adapted, tiny_source, model_type, use_dora
):
    policy = adapted(LoRA(use_dora=use_dora), model_type)
    base, before = base_of(policy), logits(policy)
    plain = merged(policy.model)
    torch.testing.assert_close(plain(IDS).logits, before, atol=1e-4, rtol=0)
    original = tiny_source(model_type).model(0)
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in original.named_parameters()}
    assert (original(IDS).logits - before).abs().max() > 0.01
    assert is_unchanged(policy, base)
    assert torch.equal(logits(policy), before)


def test_merging_rounds_a_weight_once(adapted):
    """bfloat16(W + 2 B A), with the sum in float32."""
    policy = adapted(LoRA(rank=16, alpha=32), dtype="bfloat16")
    plain = merged(policy.model)
    for name, layer in adapter_layers(policy.model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = (layer.base_layer.weight.float() + 2 * (b @ a)).bfloat16()
        assert torch.equal(plain.get_submodule(name).weight, expected), name


def test_a_tied_weight_stands_under_each_of_its_names(adapted):
    policy = adapted(LoRA(), config={"tie_word_embeddings": True})
    names = base_names(policy, base_parameters(policy))
    embedding = names["model.model.embed_tokens.weight"]
    assert names["model.lm_head.weight"] is embedding
    state = without_base(policy.state_dict(), names)
    assert set(state) == {n for n, p in policy.named_parameters() if p.requires_grad}


def test_what_describes_a_quantized_weight_goes_with_it():
    """bitsandbytes stores, beside `weight`, tensors such as `weight.absmax`."""
    weight = torch.nn.Parameter(torch.zeros(1))
    state = dict.fromkeys(["a.weight", "a.weight.absmax", "a.weights", "b.weight"], weight)
    assert set(without_base(state, {"a.weight": weight})) == {"a.weights", "b.weight"}


def test_the_hash_is_that_of_the_base_alone(adapted):
    policy = adapted(LoRA())
    first = base_fingerprint(policy)
    assert (
        base_fingerprint(adapted(LoRA(rank=2, target_modules=["q_proj"]), trained=False)) == first
    )
    assert base_fingerprint(frozen_copy(policy)) == first
    other = copy.deepcopy(policy)
    with torch.no_grad():  # the smallest change of one number
        weight = other.model.model.layers[1].mlp.up_proj.base_layer.weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    assert base_fingerprint(other) != first
    assert base_fingerprint(adapted(LoRA(), dtype="bfloat16")) != first


@pytest.mark.parametrize("generator", [CachedGenerator(), TransformersGenerator()])
def test_a_hundred_rollouts_leave_a_bfloat16_base_as_it_is(adapted, tiny_source, generator):
    """Responses come from the adapter beside the base, never merged into it and out again."""
    policy, tokenizer = adapted(LoRA(), dtype="bfloat16"), tiny_source().tokenizer()
    base = base_of(policy)
    prompts = Prompts(
        ids=torch.tensor([[1, 4, 5], [1, 6, 7]]),
        mask=torch.ones(2, 3, dtype=torch.bool),
        texts=("12", "34"),
        answers=("", ""),
        columns={},
        row_ids=(0, 1),
    )
    for number in range(100):
        rollout = generator(
            policy,
            tokenizer,
            prompts,
            SamplingSettings(max_new_tokens=2),
            group_size=2,
            seed=(0, number),
        )
    assert rollout.mask.any()
    assert is_unchanged(policy, base)
