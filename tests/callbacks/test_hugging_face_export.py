"""The export that a run leaves."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.callbacks import HuggingFaceExport
from lit_rl.models import LoRA, Policy
from lit_rl.strategies import Parallelism
from tiny_job import build_source


def test_export_loads_with_the_logits_of_the_trained_policy(fit, tiny_module, tmp_path):
    source = build_source()

    class WithPolicy(tiny_module):
        def __init__(self):
            super().__init__()
            self.policy = Policy(source.model(0))
            self.tokenizer = source.tokenizer()

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.policy.model.get_output_embeddings().weight.add_(0.5)

    module = WithPolicy()
    before = module.policy.model.get_output_embeddings().weight.clone()
    fit(module, HuggingFaceExport("exported"), iterations=2, limit_val_batches=0)

    folder = tmp_path / "exported"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = module.policy.model(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
    # Two iterations added 0.5 each: it is the trained model, not the one at the start.
    torch.testing.assert_close(loaded.get_output_embeddings().weight, before + 1.0)
    assert (
        AutoTokenizer.from_pretrained(folder)("12>")["input_ids"]
        == (module.tokenizer("12>")["input_ids"])
    )


def test_nothing_of_training_stands_in_the_export(trainer, tiny_module, tmp_path):
    source = build_source()
    callback = HuggingFaceExport()
    callback.setup(trainer, tiny_module(), "fit")
    model = source.model(0)
    original = model.config.to_dict()
    for _ in range(2):
        holder = SimpleNamespace(
            policy=Policy(model), tokenizer=source.tokenizer(), parallelism=Parallelism()
        )
        callback.on_train_end(trainer, holder)
        model = AutoModelForCausalLM.from_pretrained(callback.path)
    exported = json.loads((callback.path / "config.json").read_text())
    for key in ("use_cache", "vocab_size"):
        assert exported[key] == original[key]
    assert len(source.tokenizer()) == original["vocab_size"]


def test_other_ranks_write_nothing(trainer, tiny_module, monkeypatch):
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    callback, module = HuggingFaceExport(), tiny_module()
    module.policy = Policy(build_source().model(0))
    callback.setup(trainer, module, "fit")
    callback.on_train_end(trainer, module)
    assert not callback.path.exists()


@pytest.fixture
def with_adapter(tiny_module):
    """A module whose training moves its adapter by 0.5 per iteration."""
    source = build_source()

    class WithAdapter(tiny_module):
        def __init__(self):
            super().__init__()
            model, self.adapter = source.model(0), LoRA(rank=2)
            self.adapter.inject(model, seed=0)
            self.policy, self.tokenizer = Policy(model), source.tokenizer()

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            with torch.no_grad():
                for parameter in self.policy.parameters():
                    parameter += 0.5 * parameter.requires_grad

    return WithAdapter(), source


def test_an_adapter_is_exported_merged_or_alone(fit, with_adapter, tmp_path):
    module, source = with_adapter
    exports = HuggingFaceExport("merged"), HuggingFaceExport("adapter", adapter_only=True)
    fit(module, *exports, iterations=2, limit_val_batches=0)

    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = module.policy.model(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        alone = PeftModel.from_pretrained(source.model(0), tmp_path / "adapter")(ids).logits
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    assert torch.equal(alone, expected)
    assert (source.model(0)(ids).logits - expected).abs().max() > 0.01
    for folder in ("merged", "adapter"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder)("12>")["input_ids"] == [1, 4, 5, 13]


def test_an_adapter_that_is_not_there_is_refused_before_the_run(fit, tiny_module):
    module = tiny_module()
    module.adapter = None
    with pytest.raises(ValueError, match="adapter_only of HuggingFaceExport needs an adapter"):
        fit(module, HuggingFaceExport(adapter_only=True))
