import importlib.util
import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lit_rl.models import PretrainedCausalLM, save_pretrained


@pytest.fixture
def folder(tiny_source, tmp_path):
    source = tiny_source()
    save_pretrained(source.model(0), source.tokenizer(), tmp_path)
    return tmp_path


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_gives_the_weights_that_lie_in_it(folder, tiny_source):
    ids = torch.arange(8)[None]
    loaded = PretrainedCausalLM(str(folder)).model(seed=5)
    assert loaded.training
    assert torch.equal(loaded(ids).logits, tiny_source().model(0)(ids).logits)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "nobody/no-such-model"])
@pytest.mark.parametrize("load", [lambda s: s.tokenizer(), lambda s: s.model(0)])
def test_a_name_that_leads_nowhere_is_named(name, load):
    with pytest.raises(ValueError, match=f"no model to load at '{name}'"):
        load(PretrainedCausalLM(name))


def test_a_gguf_file_that_is_not_there_is_named(folder):
    with pytest.raises(ValueError, match=r"no model to load at .*\(absent.gguf\)"):
        PretrainedCausalLM(str(folder), gguf_file="absent.gguf").model(0)


def test_weights_are_float32_whatever_the_folder_says(folder, tiny_source):
    tiny_source().model(0).to(torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert PretrainedCausalLM(str(folder)).model(0).dtype == torch.float32


def test_the_end_token_pads_where_there_is_no_pad_token(folder, tiny_source):
    backend = tiny_source().tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    tokenizer = PretrainedCausalLM(str(folder)).tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert len(tokenizer) == 14  # no token was added


def test_a_tokenizer_without_pad_and_end_is_refused(folder, tiny_source):
    backend = tiny_source().tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    with pytest.raises(ValueError, match="neither a pad nor an end token"):
        PretrainedCausalLM(str(folder)).tokenizer()


def test_code_that_comes_with_a_model_does_not_run_unless_trusted(folder):
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(folder / "config.json", auto_map=auto_map, model_type="evil")
    (folder / "evil.py").write_text("raise RuntimeError('the code ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        PretrainedCausalLM(str(folder)).model(0)


def test_dropout_of_the_folder_is_off_unless_asked_for(tiny_source, tmp_path):
    source = tiny_source("gpt2")
    save_pretrained(source.model(0), source.tokenizer(), tmp_path)
    assert PretrainedCausalLM(str(tmp_path)).model(0).config.resid_pdrop == 0.0
    assert PretrainedCausalLM(str(tmp_path), dropout=True).model(0).config.resid_pdrop == 0.1


def test_four_bits_without_their_package_are_refused_with_what_installs_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes accelerate"):
        PretrainedCausalLM("any", load_in_4bit=True)
    assert not PretrainedCausalLM("any").quantized
