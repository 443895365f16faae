"""The command line: errors that name the key, one seed, run folders, resume, predict."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from lit_rl.callbacks import HealthMonitor, IterationCheckpoint, SampleLog
from lit_rl.callbacks.roll_back import check_roll_back
from lit_rl.cli import RLCLI
from lit_rl.config_errors import details, explain
from lit_rl.memory import Planned

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "base.yaml"
GRPO = ["--config", str(ROOT / "configs" / "algorithm" / "grpo.yaml")]
DR_GRPO = ["--config", str(ROOT / "configs" / "algorithm" / "dr_grpo.yaml")]


def printed_config(*arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        RLCLI(BASE, ["fit", *arguments, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def error_of(*arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        RLCLI(BASE, ["fit", *GRPO, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["--trainr.max_epochs", "3"], r"trainr.max_epochs is not a key; .* trainer.max_epochs"),
        (["--model.klcoef", "3"], r"klcoef is not a key of .*GRPO; the nearest is kl_coef"),
        (["--model.init_args.grup_size", "3"], r"grup_size is not a key of .*; .* group_size"),
        (["--data.batchsize", "3"], r"batchsize is not a key of .*; the nearest is batch_size"),
        (["--model", "lit_rl.algorithms.GRPOO"], r"model: lit_rl.algorithms.GRPOO is .*GRPO"),
        (["--model.reward", "lit_rl.rewards.ExactAnser"], r"model.reward: lit_rl.* .*ExactAnswer"),
        (["--model.policy_loss.clip_hi", "1"], r"clip_hi is not a key of .*; .* clip_high"),
        (["--model.sampling.max_tokens", "4"], r"max_tokens is not .* sampling; .* max_new_tokens"),
        (
            ["--model.optimizer.learning_rate", "1"],
            r"learning_rate is not a key of .*AdamW; .* lr,",
        ),
        (["--modl.group_size", "4"], r"modl.group_size is not a key; .* model.group_size"),
        (["--model.advantage", "GroupNormalised"], r"model.advantage: .*; .* GroupNormalized"),
        (["--model.advantage", "nomodule.X"], r"model.advantage: No module named 'nomodule'"),
        (["--model.advantage", "lit_rl.aggregations.TokenMean"], r"model.advantage: .*subclass of"),
        (
            ["--model", "PPO", "--model.advantage", "GroupNormalized"],
            r"model.advantage: GroupNormalized is no CriticEstimator, such as GAE",
        ),
        (
            ["--trainer.callbacks+", "AdaptiveKL", "--trainer.callbacks.initial", "0.1"],
            r"trainer.callbacks: lit_rl.callbacks.AdaptiveKL needs target, unit, horizon$",
        ),
        (["--data.task", "Largest"], r"data.task: there is no class Largest .* LargestDigit"),
    ],
)
def test_error_begins_with_the_key_and_the_near_one(arguments, first_line, capsys):
    error = error_of(*arguments, capsys=capsys)
    assert re.match("error: " + first_line, error.splitlines()[0]), error
    assert "usage:" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.max_ep", "3"],
        ["--model.sampling.max_new", "3"],
        ["--model.group", "3"],
        ["--seed", "3"],
        ["--model.optimizer.weight", "3"],
    ],
)
def test_abbreviated_keys_are_refused(arguments, capsys):
    assert "is not a key" in error_of(*arguments, capsys=capsys).splitlines()[0]


def test_unknown_key_in_a_file_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  init_args:\n    beta: 0.1\n")
    error = error_of("--config", str(file), capsys=capsys)
    assert error.startswith("error: beta is not a key of lit_rl.algorithms")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.group_size", "1"], "group_size is 1"),
        (["--model.sampling.temperature", "0"], "temperature must be above 0"),
        (["--trainer.gradient_clip_val", "0.5"], "use --model.max_grad_norm 0.5"),
        (["--trainer.accumulate_grad_batches", "2"], "--model.micro_batch_tokens"),
        (["--trainer.max_steps", "6"], "--trainer.limit_train_batches"),
        (["--trainer.precision", "16-mixed"], "Use --trainer.precision bf16-mixed or 32-true"),
        (["--trainer.precision", "64"], "trainer.precision 64 is not supported"),
        (["--trainer.strategy", "fsdp"], "trainer.strategy fsdp is not supported: "),
        (["--trainer.strategy", "deepspeed"], "Use --config configs/strategy/deepspeed_2.yaml"),
        (["--ckpt_path", "lst"], "ckpt_path: there is no lst; name a file"),
        (["--seed_everything", "true"], "seed_everything is True"),
        (["--ckpt_path", "last"], "no run of grpo"),
    ],
)
def test_setting_that_a_constructor_refuses_is_one_readable_error(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    error = error_of(*arguments, capsys=capsys)
    assert message in error
    assert "Traceback" not in error


def test_a_run_that_was_refused_leaves_no_folder(capsys, tmp_path, monkeypatch):
    """Refused in the set-up, when loggers have begun to write."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--data.batch_size", "7", "--model.num_minibatches", "5"]
    assert "do not divide into num_minibatches 5" in error_of(*arguments, capsys=capsys)
    assert [*tmp_path.glob("runs/*")] == []


def test_base_configuration_is_read_first(capsys):
    config = printed_config(*GRPO, "--model.group_size", "4", capsys=capsys)
    assert config["model"]["class_path"] == "lit_rl.algorithms.GRPO"
    assert config["model"]["init_args"]["group_size"] == 4
    assert config["model"]["init_args"]["entropy_coef"] == 0.01
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.0005


def test_another_algorithm_brings_its_own_defaults(capsys):
    """Switching the class keeps what the base says and none of the other class's defaults."""
    settings = printed_config(*DR_GRPO, capsys=capsys)["model"]["init_args"]
    assert settings["advantage"]["class_path"] == "lit_rl.advantages.GroupCentered"
    assert settings["aggregation"] is None
    assert settings["update_epochs"] == 2
    settings = printed_config("--model", "DrGRPO", capsys=capsys)["model"]["init_args"]
    assert settings["advantage"]["class_path"].endswith("GroupCentered")


def test_printed_configuration_is_a_configuration(tmp_path, capsys):
    first = printed_config(*GRPO, capsys=capsys)
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(first))
    assert printed_config("--config", str(file), capsys=capsys) == first


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model.group_size", "abc"], "model.group_size: Expected a <class 'int'>."),
        (
            ["--model.lr_schedule", "sine"],
            "model.lr_schedule: Expected a typing.Literal['constant'",
        ),
        (["--model.sampling.max_new_tokens", "2.5"], "model.sampling.max_new_tokens: Expected a"),
        (["--data.task.num_digits", "x"], "data.task.num_digits: Expected a <class 'int'>."),
        (["--trainer.max_epochs", "x"], "trainer.max_epochs: Expected a <class 'int'>"),
        (["--config", "no.yaml"], "config: File does not exist"),
        (["--model.policy_loss.dual_clip", "0.5"], "dual_clip must be above 1, for example 3.0"),
    ],
)
def test_error_of_a_value_begins_with_its_key_and_the_reason(arguments, line, capsys):
    error = error_of(*arguments, capsys=capsys)
    assert error.startswith(f"error: {line}"), error


def test_explanation_of_another_error_is_its_first_line():
    assert explain("Expected an int\nmore", []) == "Expected an int"
    assert details("Expected an int\nmore") == ["Expected an int", "more"]


def sentence_of(*arguments, capsys):
    """Return all that follows "error: "."""
    return error_of(*arguments, capsys=capsys).partition("error: ")[2].removesuffix("\n")


REFUSED_BY_THE_PARSER = [
    (
        "--model.reward PythonFunction --model.reward.function broken_rewards.nope",
        "model.reward.function: broken_rewards.nope is not there; broken_rewards has misspelt, "
        "too_few",
    ),
    (
        "--model.reward PythonFunction --model.reward.function nomodule.nope",
        "model.reward.function: No module named 'nomodule'. Got value: nomodule.nope; an example "
        "is my_module.my_function",
    ),
    (
        "--model.reward PythonFunction --model.reward.function misspelt",
        "model.reward.function: misspelt does not name a function; an example is "
        "my_module.my_function",
    ),
    (
        "--model.kl Foo",
        "model.kl: there is no class Foo for it; choose one of KLInLoss, KLInReward",
    ),
    (
        "--data Foo",
        "data: there is no class Foo for it; choose one of PromptDataModule",
    ),
    (
        "--trainer.callbacks+ SampleLog --trainer.callbacks.foo 3",
        "foo is not a key of lit_rl.callbacks.SampleLog; its keys are every_n_iterations, "
        "num_samples",
    ),
    (
        "--trainer.callbacks+ SampleLog --trainer.callbacks.num_samples x",
        "trainer.callbacks.num_samples: Expected a <class 'int'>. Got value: x",
    ),
    (
        "--model.optimizer.betas [0.9]",
        "model.optimizer.betas: Expected a tuple with 2 elements. Got value: [0.9]",
    ),
    (
        "--model.optimizer.lr abc",
        "model.optimizer.lr: Expected a <class 'float'>. Got value: abc",
    ),
    ("--model.group_size abc", "model.group_size: Expected a <class 'int'>. Got value: abc"),
    (
        "--trainer.limit_val_batches abc",
        "trainer.limit_val_batches: Expected a <class 'int'> or <class 'float'>. Got value: abc",
    ),
    ("--model.reward nomodule.Foo", "model.reward: No module named 'nomodule'"),
    (
        "--seed_everything -1",
        "seed_everything is -1, must be a number from 0 to 4294967295, such as 0",
    ),
    (
        "--seed_everything 99999999999",
        "seed_everything is 99999999999, must be a number from 0 to 4294967295, such as 0",
    ),
]
REFUSED_BEFORE_TRAINING = [
    (
        "--model.micro_batch_tokens 0",
        "micro_batch_tokens is 0, must be at least 1, such as 16384",
    ),
    (
        "--model.micro_batch_tokens -5",
        "micro_batch_tokens is -5, must be at least 1, such as 16384",
    ),
    (
        "--trainer.val_check_interval 0",
        "trainer.val_check_interval is 0, must be above 0, such as 10 for a validation after every "
        "10 iterations; --trainer.limit_val_batches 0 runs none",
    ),
    (
        "--trainer.limit_train_batches 0",
        "trainer.limit_train_batches is 0, with which nothing is trained; it is the number of "
        "iterations of an epoch, such as 25",
    ),
    (
        "--trainer.max_epochs -1",
        "lr_schedule linear falls to 0 at the end of the run, and this run has no end. Set "
        "trainer.max_epochs to a number such as 4, or lr_schedule to constant",
    ),
    (
        "--model.optimizer.lr -1",
        "optimizer: Invalid learning rate: -1.0; examples are lr 0.0005, betas [0.9, 0.99], "
        "weight_decay 0.0",
    ),
    (
        "--data.task DataFiles --data.task.held_out_fraction 0.5 --data.task.train_file nope.jsonl",
        "train_file: there is no file nope.jsonl; give a path such as my/prompts.jsonl",
    ),
    (
        "--model.reward PythonFunction --model.reward.function broken_rewards.misspelt",
        "misspelt has a parameter all_responses, but there are only answers, finished, prompts, "
        "response_ids, responses; did you mean responses?",
    ),
]
BROKEN_REWARDS = """
def misspelt(all_responses):
    return [0.0 for _ in all_responses]


def too_few(responses):
    return [0.0]
"""


@pytest.fixture
def in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_rewards.py").write_text(BROKEN_REWARDS)
    monkeypatch.delitem(sys.modules, "broken_rewards", raising=False)


@pytest.mark.usefixtures("in_own_folder")
@pytest.mark.parametrize(
    ("arguments", "sentence"), [*REFUSED_BY_THE_PARSER, *REFUSED_BEFORE_TRAINING]
)
def test_a_wrong_setting_is_one_sentence_and_nothing_else(arguments, sentence, capsys):
    options = ["--trainer.accelerator", "cpu", *arguments.split()]
    assert sentence_of(*options, capsys=capsys) == sentence


@pytest.mark.usefixtures("in_own_folder")
def test_a_reward_that_gives_no_reward_is_one_sentence_when_training_has_begun(capsys):
    """512 responses are 32 prompts x group_size 16, of the base configuration."""
    options = "--trainer.num_sanity_val_steps 0 --trainer.accelerator cpu"
    options += " --model.reward PythonFunction --model.reward.function broken_rewards.too_few"
    assert sentence_of(*options.split(), capsys=capsys) == (
        "the reward too_few must give 512 values, one per response, in a list; got 1 values"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.batch_size", "801"], "batch_size is 801, but there are only 800 training"),
        (["--model.num_minibatches", "3"], "do not divide into num_minibatches 3"),
        (["--data.task", "DataFiles", "--data.task.train_file", "no.jsonl"], "no.jsonl"),
        (["--model.sampling.max_new_tokens", "64"], "the model reads 64"),
        (
            ["--model.reward", "RewardModel", "--model.reward.model", "no/folder/there"],
            "no reward model to load at 'no/folder/there'",
        ),
    ],
)
def test_what_the_set_up_refuses_is_one_readable_error(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "DataFiles" in arguments:
        arguments = [*arguments, "--data.task.held_out_fraction", "0.5"]
    error = error_of(*arguments, capsys=capsys)
    assert message in error.splitlines()[0]


def test_checkpoint_of_another_model_is_one_readable_error(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.limit_train_batches", "1", "--trainer.max_epochs", "1"]
    short += ["--trainer.num_sanity_val_steps", "0"]
    RLCLI(BASE, ["fit", *GRPO, *short])
    (checkpoint,) = tmp_path.glob("runs/*/checkpoints/last.ckpt")
    other = ["--model.source.alphabet", "0123456789>=", "--ckpt_path", str(checkpoint)]
    capsys.readouterr()
    error = error_of(*short, *other, capsys=capsys).splitlines()[0]
    assert "does not fit the model of this configuration" in error
    (tmp_path / "broken.ckpt").write_bytes(b"")
    error = error_of(*short, "--ckpt_path", "broken.ckpt", capsys=capsys).splitlines()[0]
    assert "broken.ckpt" in error


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["2", "3"], ids=["validation due", "nothing due"])
def test_a_run_that_is_over_does_what_follows_it_when_it_is_resumed(
    interval, tmp_path, monkeypatch
):
    """It says so, and leaves the files of the run before as they were."""
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.limit_train_batches", "2", "--trainer.max_epochs", "1"]
    short += ["--trainer.val_check_interval", interval, "--trainer.accelerator", "cpu"]
    names = ["IterationCheckpoint", "LearningCurve", "HuggingFaceExport"]
    callbacks = [{"class_path": f"lit_rl.callbacks.{name}"} for name in names]
    short += ["--trainer.callbacks", json.dumps(callbacks)]
    RLCLI(BASE, ["fit", *GRPO, *short])
    first = only_run(tmp_path, "*")
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match=r"no iteration is left .*raise --trainer.max_epochs"):
        RLCLI(BASE, ["fit", *GRPO, *short, "--ckpt_path", "last"])
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    second = next(path for path in tmp_path.glob("runs/*") if path != first)
    for file in (first / "export").iterdir():
        assert (second / "export" / file.name).read_bytes() == file.read_bytes()
    assert (second / "curve.png").exists()
    rows = [row for row in metrics(first) if row["val/reward"] and row["iteration"] == "2.0"]
    assert len(rows) == (1 if interval == "2" else 0)
    again = metrics(second) if (second / "metrics.csv").exists() else []
    assert again == [{name: row[name] for name in row if name in again[0]} for row in rows]


def run(*arguments, cwd):
    process = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout + process.stderr


def only_run(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(f"runs/{pattern}")
    return found


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_fit_resume_validate_predict(tmp_path):
    """The whole life of a run, as a user types it."""
    short = ["--trainer.limit_train_batches", 4, "--trainer.val_check_interval", 2]
    kl = ["--model.kl_coef", 0.01]
    run("fit", *GRPO, *short, *kl, "--trainer.max_epochs", 1, cwd=tmp_path)
    first = only_run(tmp_path, "*-grpo")
    names = {path.name for path in first.iterdir()}
    assert {"config.yaml", "metrics.csv", "samples.jsonl", "curve.png", "export"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert (first / "checkpoints" / "last.ckpt").exists()

    rows = metrics(first)
    # One row per iteration and one per validation, labelled with the iteration: at 0, 2 and 4.
    assert [row["step"] for row in rows if row["reward/mean"]] == ["1", "2", "3", "4"]
    assert [row["step"] for row in rows if row["val/greedy_accuracy"]] == ["0", "2", "4"]
    assert [float(row["kl_coef"]) for row in rows if row["kl_coef"]] == [pytest.approx(0.01)] * 4

    model = AutoModelForCausalLM.from_pretrained(first / "export")
    weights = torch.load(first / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[f"policy.model.{name}"])

    output = run(
        "fit", *GRPO, *short, *kl, "--trainer.max_epochs", 2, "--model.optimizer.lr", 0.002,
        "--ckpt_path", "last", cwd=tmp_path,
    )  # fmt: skip
    assert str(first.name) in output
    (second,) = [path for path in tmp_path.glob("runs/*-grpo*") if path != first]
    rows = metrics(second)
    assert [row["step"] for row in rows if row["reward/mean"]] == ["5", "6", "7", "8"]
    # Of the 8 iterations x 4 steps of a linear fall from 0.002, 5 x 4 are taken after the first.
    rates = [float(row["learning_rate"]) for row in rows if row["reward/mean"]]
    assert rates == [pytest.approx(0.002 * (1 - k * 4 / 32)) for k in (5, 6, 7, 8)]

    run("validate", *GRPO, "--ckpt_path", second / "checkpoints" / "last.ckpt", cwd=tmp_path)
    validated = metrics(only_run(tmp_path, "*-grpo-validate*"))[-1]
    assert validated["val/greedy_accuracy"] == rows[-1]["val/greedy_accuracy"]

    run("predict", *GRPO, "--ckpt_path", "last", cwd=tmp_path)
    file = only_run(tmp_path, "*-grpo-predict*") / "predictions.jsonl"
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(predictions) == 200
    assert {"prompt", "response", "answer", "finished"} <= set(predictions[0])
    config = yaml.safe_load((second / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.002


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("peft", ["--config", str(ROOT / "configs" / "model" / "lora.yaml")], "lit-rl[lora]"),
        ("deepspeed", ["--config", str(ROOT / "configs" / "strategy" / "deepspeed_2.yaml")],
         "lit-rl[deepspeed]"),
        ("math_verify", ["--model.reward", "MathEquivalence"], "lit-rl[reasoning]"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named_in_one_sentence(
    package, arguments, message, monkeypatch, tmp_path, capsys
):
    find = importlib.util.find_spec

    def hidden(name, *rest):
        return None if name == package else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    error = error_of("--trainer.accelerator", "cpu", *arguments, capsys=capsys)
    first = next(line for line in error.splitlines() if line.startswith("error: "))
    assert message in first
    assert "Traceback" not in error


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    """The trainer of a command line, which runs nothing."""
    monkeypatch.chdir(tmp_path)

    def build(*arguments):
        return Planned(BASE, ["fit", *GRPO, "--trainer.accelerator", "cpu", *arguments]).trainer

    return build


def test_a_callback_that_is_added_replaces_that_of_the_base_configuration(trainer_of):
    added = ["--trainer.callbacks+", "HealthMonitor", "--trainer.callbacks.action", "stop"]
    monitors = [c for c in trainer_of(*added).callbacks if isinstance(c, HealthMonitor)]
    assert [monitor.action for monitor in monitors] == ["stop"]


def test_callbacks_that_a_checkpoint_tells_apart_are_all_kept(trainer_of):
    """Checkpoints by time, of base.yaml, and by a metric; two that store nothing."""
    metric = ["--trainer.callbacks+", "IterationCheckpoint"]
    metric += ["--trainer.callbacks.monitor", "val/greedy_accuracy"]
    stateless = ["--trainer.callbacks+", "SampleLog"]
    callbacks = trainer_of(*metric, *stateless).callbacks
    keepers = [c for c in callbacks if isinstance(c, IterationCheckpoint)]
    assert [keeper.monitor for keeper in keepers] == [None, "val/greedy_accuracy"]
    assert sum(isinstance(c, SampleLog) for c in callbacks) == 2


def test_the_file_of_the_documentation_rolls_back(trainer_of, tmp_path):
    text = (ROOT / "docs" / "health.md").read_text()
    (tmp_path / "roll_back.yaml").write_text(re.search("```yaml\n(.*?)```", text, re.S)[1])
    trainer = trainer_of("--config", str(tmp_path / "roll_back.yaml"))
    (monitor,) = [c for c in trainer.callbacks if isinstance(c, HealthMonitor)]
    assert monitor.action == "roll_back"
    check_roll_back(trainer)
