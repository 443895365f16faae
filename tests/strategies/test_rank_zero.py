"""What is sent of a model: all but the numbers of its weights."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lit_rl.models import Critic, LoRA, Policy, PolicyBackbone, RandomCausalLM
from lit_rl.models.adapters import base_names, base_parameters
from lit_rl.strategies.rank_zero import read, written

SIZES = {
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_inner": 32},
    "gemma2": {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8},
}


def source(model_type, **config):
    config = {"model_type": model_type, "num_hidden_layers": 2, "num_attention_heads": 2, **config}
    return RandomCausalLM(alphabet="0123456789>", config={**SIZES[model_type], **config})


def policy(model_type, adapter=None, **config):
    model = source(model_type, **config).model(seed=1)
    if adapter is not None:
        adapter.inject(model, seed=1)
    return Policy(model)


def with_numbers_of(received, sent):
    """Give a received model the weights of the one that was sent, each once."""
    values = iter([*sent.parameters()])
    given: dict[int, nn.Parameter] = {}
    for module in received.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter not in given:
                given[parameter] = nn.Parameter(next(values).detach().clone())
            module.register_parameter(name, given[parameter])
    return received


@pytest.mark.parametrize(
    "adapter",
    [None, LoRA(rank=2), LoRA(rank=2, use_dora=True)],
    ids=["no adapter", "lora", "dora"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize("model_type", SIZES)
def test_a_received_model_is_the_one_sent_once_it_has_its_weights(model_type, tied, adapter):
    """Buffers, ties, adapters and settings are those of the sent model: so are its logits."""
    sent = policy(model_type, adapter, tie_word_embeddings=tied)
    content = written(sent)
    received = read(content)
    assert all(parameter.is_meta for parameter in received.parameters())
    assert not any(buffer.is_meta for buffer in received.buffers())
    described = [
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        for model in (sent, received)
    ]
    assert described[0] == described[1]
    assert received.end_ids == sent.end_ids
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits, expected = (
            model.eval().model(ids).logits for model in (with_numbers_of(received, sent), sent)
        )
    assert torch.equal(logits, expected)


def test_what_is_sent_has_the_size_of_what_is_no_weight():
    """A model of 4 x as many weights is not larger."""
    small, large = (len(written(policy("llama", hidden_size=size))) for size in (16, 64))
    assert large < small + 200


def test_a_received_critic_stands_upon_the_base_of_the_policy_that_is_there_already():
    sent = policy("llama", LoRA(rank=2))
    critic = PolicyBackbone().critic(sent, source("llama").tokenizer())
    there = read(written(sent))
    received = read(written(critic, shared=sent), shared=there)
    assert isinstance(received, Critic)
    base = {id(parameter) for parameter in base_parameters(there)}
    of_backbone = base_names(received, base_parameters(received.backbone))
    assert of_backbone
    assert {id(parameter) for parameter in of_backbone.values()} < base
    own = [p for p in received.parameters() if id(p) not in base]
    assert own
    assert all(parameter.requires_grad for parameter in own)


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

class MyConfig(LlamaConfig):
    model_type = "mine"

class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""
WRITES = """
from pathlib import Path
from transformers import AutoModelForCausalLM
from lit_rl.strategies.rank_zero import written
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
Path("content").write_bytes(written(model))
"""
READS = """
from pathlib import Path
from lit_rl.strategies.rank_zero import read
model = read(Path("content").read_bytes())
print(type(model).__name__, model.config.hidden_size)
"""


@pytest.mark.slow
def test_a_model_with_code_of_its_own_is_read_by_a_process_that_never_loaded_it(tmp_path):
    """As with `trust_remote_code`: the code lies in a folder that processes of a machine share."""
    folder = tmp_path / "model"
    source("llama").model(seed=1).save_pretrained(folder)
    (folder / "modeling_mine.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "MyConfig", "AutoModelForCausalLM": "MyModel"}
    config |= {
        "model_type": "mine",
        "auto_map": {auto: f"modeling_mine.{name}" for auto, name in classes.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HUB_OFFLINE": "1"}
    for script in (WRITES, READS):
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["MyModel", "16"]
