import copy
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_rl.models import LoRA, PretrainedCausalLM, save_pretrained

IDS = torch.arange(8)[None]


def export(source, folder, model=None):
    save_pretrained(model or source.model(0), source.tokenizer(), folder)
    return folder


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_export_gives_the_same_logits_bit_for_bit(tiny_source, tmp_path, model_type):
    source = tiny_source(model_type)
    model = source.model(0)
    with torch.no_grad():  # not what it was built with
        for parameter in model.parameters():
            parameter.add_(0.01)
    loaded = AutoModelForCausalLM.from_pretrained(export(source, tmp_path, model))
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("12>").input_ids == [1, 4, 5, 13]


def test_bfloat16_weights_are_exported_as_bfloat16(tiny_source, tmp_path):
    source = tiny_source(dtype="bfloat16")
    with pytest.warns(UserWarning, match="vanish"):
        model = source.model(0)
    loaded = AutoModelForCausalLM.from_pretrained(export(source, tmp_path, model))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_the_export_carries_the_dropout_and_the_cache_of_the_original_config(tiny_source, tmp_path):
    source = tiny_source("gpt2")
    model = source.model(0)
    export(source, tmp_path, model)
    exported = AutoConfig.from_pretrained(tmp_path)
    # GPT-2's own values
    assert (exported.resid_pdrop, exported.embd_pdrop, exported.attn_pdrop) == (0.1, 0.1, 0.1)
    assert exported.use_cache
    assert model.config.resid_pdrop == 0.0  # the model in training is not touched


def test_a_copy_of_the_model_exports_the_original_dropout_too(tiny_source, tmp_path):
    source = tiny_source("gpt2")
    export(source, tmp_path, copy.deepcopy(source.model(0)))
    assert AutoConfig.from_pretrained(tmp_path).resid_pdrop == 0.1


def test_a_model_with_dropout_on_exports_it(tiny_source, tmp_path):
    assert (
        AutoConfig.from_pretrained(export(tiny_source("gpt2", dropout=True), tmp_path)).attn_pdrop
        == 0.1
    )


def test_exporting_what_was_exported_changes_nothing(tiny_source, tmp_path):
    first = export(tiny_source("gpt2"), tmp_path / "first")
    second = export(PretrainedCausalLM(str(first)), tmp_path / "second")
    third = export(PretrainedCausalLM(str(second)), tmp_path / "third")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in third.iterdir())
    for name in names:
        assert (second / name).read_bytes() == (third / name).read_bytes(), name
        if name != "tokenizer_config.json":  # which then records that it came from a folder
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_vocabulary_stays_where_the_end_token_pads(tiny_source, tmp_path):
    folder = export(tiny_source(), tmp_path / "0")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for run in (1, 2):
        source = PretrainedCausalLM(str(folder))
        folder = export(source, tmp_path / str(run))
        assert len(AutoTokenizer.from_pretrained(folder)) == 14
        assert AutoConfig.from_pretrained(folder).vocab_size == 14


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_an_adapter_is_merged_into_the_weights_that_are_exported(
    adapted, tiny_source, tmp_path, model_type, use_dora
):
    policy = adapted(LoRA(use_dora=use_dora), model_type)
    source, expected = tiny_source(model_type), policy.model(IDS).logits
    loaded = AutoModelForCausalLM.from_pretrained(export(source, tmp_path, policy.model))
    assert type(loaded) is type(source.model(0))
    torch.testing.assert_close(loaded(IDS).logits, expected, atol=1e-4, rtol=0)
    assert (source.model(0)(IDS).logits - expected).abs().max() > 0.01
    assert torch.equal(policy.model(IDS).logits, expected)
    if model_type == "gpt2":
        assert AutoConfig.from_pretrained(tmp_path).resid_pdrop == 0.1


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_alone_is_a_folder_of_peft(
    adapted, tiny_source, tmp_path, dtype, model_type, use_dora
):
    policy = adapted(LoRA(use_dora=use_dora), model_type, dtype=dtype)
    source = tiny_source(model_type, dtype=dtype)
    save_pretrained(policy.model, source.tokenizer(), tmp_path, adapter_only=True)
    loaded = PeftModel.from_pretrained(source.model(0, frozen=True), tmp_path)
    assert torch.equal(loaded(IDS).logits, policy.model(IDS).logits)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert 4 * trained <= size < 4 * trained + 20_000  # float32 and a header of names


def test_of_a_quantized_base_the_adapter_alone_is_written(adapted, tiny_source, tmp_path):
    policy = adapted(LoRA())
    policy.model.is_quantized = True  # as transformers marks it
    save_pretrained(policy.model, tiny_source().tokenizer(), tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    assert not (tmp_path / "config.json").exists()
