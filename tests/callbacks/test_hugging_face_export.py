"""The export that a run leaves."""

import json
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.callbacks import HuggingFaceExport
from lit_rl.models import Policy, RandomCausalLM

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_export_loads_with_the_logits_of_the_trained_policy(fit, tiny_module, tmp_path):
    source = RandomCausalLM(alphabet="0123456789>", config=CONFIG)

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
    source = RandomCausalLM(alphabet="0123456789>", config=CONFIG)
    callback = HuggingFaceExport()
    callback.setup(trainer, tiny_module(), "fit")
    model = source.model(0)
    original = model.config.to_dict()
    for _ in range(2):
        holder = SimpleNamespace(policy=Policy(model), tokenizer=source.tokenizer())
        callback.on_train_end(trainer, holder)
        model = AutoModelForCausalLM.from_pretrained(callback.path)
    exported = json.loads((callback.path / "config.json").read_text())
    for key in ("use_cache", "vocab_size"):
        assert exported[key] == original[key]
    assert len(source.tokenizer()) == original["vocab_size"]


def test_other_ranks_write_nothing(trainer, tiny_module, monkeypatch):
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    callback, module = HuggingFaceExport(), tiny_module()
    callback.setup(trainer, module, "fit")
    callback.on_train_end(trainer, module)
    assert not callback.path.exists()
