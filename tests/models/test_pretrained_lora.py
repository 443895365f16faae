"""Adapters to start from."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_rl.models import LoRA, PretrainedLoRA, save_pretrained

IDS = torch.arange(8)[None]


@pytest.fixture
def sft(adapted, tiny_source, tmp_path):
    """The folder of a trained adapter, and the logits of the model with it."""

    def write(adapter=LoRA(rank=4, alpha=12), model_type="llama"):
        policy = adapted(adapter, model_type)
        save_pretrained(
            policy.model, tiny_source(model_type).tokenizer(), tmp_path, adapter_only=True
        )
        return str(tmp_path), policy.model(IDS).logits

    return write


def edit_config(folder, **changes):
    path = f"{folder}/adapter_config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, **changes}, file)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "adapter",
    [
        LoRA(rank=4, alpha=12),
        LoRA(rank=4, use_dora=True),
        LoRA(target_modules=r".*\.1\..*"),
    ],
)
def test_the_policy_starts_with_what_the_adapter_had_learned(sft, tiny_source, adapter, model_type):
    folder, expected = sft(adapter, model_type)
    model = tiny_source(model_type).model(0)
    base = model(IDS).logits
    PretrainedLoRA(folder).inject(model, seed=7)
    assert torch.equal(model(IDS).logits, expected)
    assert not torch.equal(base, expected)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


def test_an_adapter_of_peft_itself_loads(tiny_source, tmp_path):
    """Made by `get_peft_model` with a rank of its own in one layer, and without its magnitude."""
    import peft

    settings = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"q_proj": 2},
        layers_to_transform=[1],
        init_lora_weights=False,
        use_rslora=True,
    )
    model = peft.get_peft_model(tiny_source().model(0), settings)
    model.save_pretrained(tmp_path)
    plain = tiny_source().model(0)
    PretrainedLoRA(str(tmp_path)).inject(plain, seed=0)
    assert torch.equal(plain(IDS).logits, model(IDS).logits)
    # Layer 1: q 2 * (32 + 32), up 4 * (32 + 48).
    assert sum(p.numel() for p in plain.parameters() if p.requires_grad) == 128 + 320


def test_its_own_dropout_is_off_unless_it_is_asked_for(sft, tiny_source):
    folder, expected = sft(LoRA(dropout=0.5))
    model = tiny_source().model(0).train()
    PretrainedLoRA(folder).inject(model, seed=0)
    # In training mode; the expected logits were those of training mode, too.
    first, second = model(IDS).logits, model(IDS).logits
    assert torch.equal(first, second)
    assert not torch.equal(first, expected)


def test_a_folder_that_is_not_there_is_named(tiny_source):
    with pytest.raises(ValueError, match=r"no adapter to load at '\./no/adapter'"):
        PretrainedLoRA("./no/adapter").inject(tiny_source().model(0), 0)


def test_an_adapter_of_another_architecture_is_refused(sft, tiny_source):
    folder, _ = sft()
    message = r"does not fit GPT2LMHeadModel, which has no linear layers \['model.layers.0"
    with pytest.raises(ValueError, match=message):
        PretrainedLoRA(folder).inject(tiny_source("gpt2").model(0), 0)


def test_an_adapter_of_another_size_is_refused(sft, tiny_source):
    folder, _ = sft()
    wide = tiny_source(config={"intermediate_size": 64}).model(0)
    with pytest.raises(ValueError, match="6 weights are missing, too many or of another size"):
        PretrainedLoRA(folder).inject(wide, 0)


def test_an_adapter_that_lacks_a_weight_is_refused(sft, tiny_source):
    folder, _ = sft()
    file = f"{folder}/adapter_model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if "lora_B" in name)]
    save_file(weights, file)
    with pytest.raises(ValueError, match="1 weights are missing"):
        PretrainedLoRA(folder).inject(tiny_source().model(0), 0)


@pytest.mark.parametrize(
    "changes", [{"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}]
)
def test_an_adapter_that_trains_more_than_matrices_is_refused(sft, tiny_source, changes):
    folder, _ = sft()
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=f"more than low-rank matrices.*{next(iter(changes))}"):
        PretrainedLoRA(folder).inject(tiny_source().model(0), 0)


def test_an_adapter_of_another_kind_is_refused(sft, tiny_source):
    folder, _ = sft()
    edit_config(folder, peft_type="IA3")
    with pytest.raises(ValueError, match="only LORA can be trained on"):
        PretrainedLoRA(folder).inject(tiny_source().model(0), 0)
