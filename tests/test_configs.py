"""Every file in configs/ parses, and trains for two iterations on top of the base."""

import gc
import json
from pathlib import Path

import pytest
import torch
import yaml

from lit_rl.cli import RLCLI
from lit_rl.models import LoRA, RandomCausalLM, SmolLM2, save_pretrained

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*/*.yaml"))
# Those of strategies are started by the tests of several processes.
RUNS = [file for file in FILES if file.parent.name != "strategy"]
# What a file needs beside it to make a whole run.
COMPANIONS = {
    "smollm2.yaml": ["task/addition_few_shot.yaml", "update/single.yaml"],
    "addition_few_shot.yaml": ["model/smollm2.yaml", "update/single.yaml"],
    "reasoning_gym.yaml": ["model/smollm2.yaml", "update/single.yaml"],
}
# The algorithm whose file a file is stacked after, if it is not GRPO.
ALGORITHMS = {"verl_ppo.yaml": "ppo.yaml", "smollm2_ppo.yaml": "ppo.yaml"}
# What stands in for a hub, which tests do not reach.
ARGUMENTS = {"hugging_face.yaml": ["--model.source.name", "exported"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run in, with what the configurations name: a model and a file of prompts."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    source = RandomCausalLM(**config["model"]["init_args"]["source"]["init_args"])
    save_pretrained(source.model(0), source.tokenizer(), "exported")
    gc.collect()  # the model and the optimizer of the run before are cyclic garbage
    rows = [json.dumps({"prompt": f"{n:03d}>", "answer": max(f"{n:03d}")}) for n in range(100)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("file", RUNS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_configuration_trains_for_two_iterations(file):
    stack = [CONFIGS / "algorithm" / ALGORITHMS.get(file.name, "grpo.yaml"), file]
    stack += [CONFIGS / companion for companion in COMPANIONS.get(file.name, [])]
    arguments = [text for path in stack for text in ("--config", str(path))]
    arguments += ARGUMENTS.get(file.name, [])
    arguments += ["--trainer.limit_train_batches", "2", "--trainer.max_epochs", "1"]
    arguments += ["--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0"]
    cli = RLCLI(CONFIGS / "base.yaml", ["fit", *arguments])
    assert cli.model.iteration == 2
    assert cli.trainer.global_step == 2 * cli.model.steps_per_iteration


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
@pytest.mark.parametrize("name", ["1", "2", "3", "3_offload"])
def test_deepspeed_says_in_one_sentence_that_it_needs_a_gpu(name, capsys):
    stack = ["--config", str(CONFIGS / "strategy" / f"deepspeed_{name}.yaml")]
    with pytest.raises(SystemExit):
        RLCLI(CONFIGS / "base.yaml", ["fit", *stack])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == (
        "error: strategy DeepSpeed needs a CUDA GPU, and this run has none: use --config "
        "configs/strategy/fsdp2.yaml, or ddp.yaml"
    )


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name == "algorithm"])
def test_algorithm_file_holds_only_what_defines_it(file):
    """The rule of the design: at most 25 lines."""
    assert len(file.read_text().splitlines()) <= 25


@pytest.mark.usefixtures("folder")
def test_an_adapter_is_stacked_upon_a_model_and_changed_on_the_command_line(monkeypatch):
    monkeypatch.setattr(RLCLI, "_run_subcommand", lambda cli, subcommand: None)
    files = ["model/smollm2.yaml", "model/lora.yaml"]
    stack = [text for file in files for text in ("--config", str(CONFIGS / file))]
    arguments = ["--model.adapter.rank", "8", "--model.adapter.target_modules", "[q_proj, v_proj]"]
    model = RLCLI(CONFIGS / "base.yaml", ["fit", *stack, *arguments]).model
    assert model.adapter == LoRA(rank=8, alpha=32, target_modules=["q_proj", "v_proj"])
    assert isinstance(model.source, SmolLM2)
    # Ten times the learning rate of smollm2.yaml.
    (group,) = model.optimizer([{"params": [torch.zeros(1)]}]).param_groups
    assert group["lr"] == pytest.approx(10 * 1e-5)
