"""Every file in configs/ parses, and trains for two iterations on top of the base."""

from pathlib import Path

import pytest

from lit_rl.cli import RLCLI

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*/*.yaml"))
# Real models and optional packages: the same test, marked slow.
SLOW = {"smollm2.yaml", "addition_few_shot.yaml"}
# What a file needs beside it to make a whole run.
COMPANIONS = {
    "addition_few_shot.yaml": ["model/smollm2.yaml"],
    "smollm2.yaml": ["task/addition_few_shot.yaml"],
}


def cases():
    for file in FILES:
        marks = [pytest.mark.slow] if file.name in SLOW else []
        yield pytest.param(file, id=f"{file.parent.name}/{file.name}", marks=marks)


@pytest.mark.parametrize("file", cases())
def test_configuration_trains_for_two_iterations(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stack = [CONFIGS / "algorithm" / "grpo.yaml", file]
    stack += [CONFIGS / companion for companion in COMPANIONS.get(file.name, [])]
    arguments = [text for path in stack for text in ("--config", str(path))]
    arguments += ["--trainer.limit_train_batches", "2", "--trainer.max_epochs", "1"]
    arguments += ["--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0"]
    cli = RLCLI(CONFIGS / "base.yaml", ["fit", *arguments])
    assert cli.model.iteration == 2
    assert cli.trainer.global_step == 2 * cli.model.steps_per_iteration


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name == "algorithm"])
def test_algorithm_file_holds_only_what_defines_it(file):
    """The rule of the design: at most 25 lines."""
    assert len(file.read_text().splitlines()) <= 25
