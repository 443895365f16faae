"""A class that replaces another in a configuration begins with its own defaults."""

import json
from pathlib import Path

import pytest
import yaml

from lit_rl.cli import RLCLI
from lit_rl.config_choices import with_own_defaults

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "base.yaml"
ALGORITHMS = ROOT / "configs" / "algorithm"
GRPO = ["--config", str(ALGORITHMS / "grpo.yaml")]


@pytest.fixture
def settings(capsys):
    """The arguments of the model, or of another part, as the command line understands them."""

    def parsed(*arguments, part="model"):
        with pytest.raises(SystemExit) as stopped:
            RLCLI(BASE, ["fit", *map(str, arguments), "--print_config"])
        assert stopped.value.code == 0
        return yaml.safe_load(capsys.readouterr().out)[part]["init_args"]

    return parsed


@pytest.fixture
def file_of(tmp_path):
    def write(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return ["--config", path]

    return write


# The defaults of SequenceClipped are 3e-4 and 4e-4, those of ClippedSurrogate 0.2 and 0.2.
OWN = {"clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize("before", [[], GRPO], ids=["default of the class", "set by a file"])
@pytest.mark.parametrize(
    "option",
    [
        ["--model.policy_loss", "SequenceClipped"],
        ["--model.policy_loss=lit_rl.policy_losses.SequenceClipped"],
        ["--model.init_args.policy_loss.class_path", "SequenceClipped"],
        ["--model.policy_loss", '{"class_path": "SequenceClipped"}'],
    ],
)
def test_an_option_that_names_another_class(settings, before, option):
    assert settings(*before, *option)["policy_loss"]["init_args"] == OWN


def test_a_file_that_names_another_class(settings, file_of):
    """What it sets holds, and what comes behind it; nothing of before does."""
    other = file_of(
        "model:\n"
        "  init_args:\n"
        "    policy_loss: {class_path: SequenceClipped, init_args: {clip_low: 0.01}}\n"
    )
    assert settings(*GRPO, *other)["policy_loss"]["init_args"] == {**OWN, "clip_low": 0.01}
    later = settings(*GRPO, *other, "--model.policy_loss.clip_high", 0.02)
    assert later["policy_loss"]["init_args"] == {"clip_low": 0.01, "clip_high": 0.02}
    short = file_of("model: {init_args: {policy_loss: SequenceClipped}}\n")
    assert settings(*GRPO, *short)["policy_loss"]["init_args"] == OWN


def test_the_same_class_keeps_what_was_set(settings, file_of):
    same = file_of("model: {init_args: {policy_loss: {init_args: {clip_high: 0.3}}}}\n")
    expected = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    assert settings(*GRPO, *same)["policy_loss"]["init_args"] == expected
    named = ["--model.policy_loss", "ClippedSurrogate"]
    assert settings(*GRPO, *same, *named)["policy_loss"]["init_args"] == expected
    # The default of the algorithm is not that of the class: DAPO's clip_high is 0.28.
    dapo = settings("--model", "DAPO", *named)["policy_loss"]["init_args"]
    assert dapo == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}


def test_a_class_that_is_named_again_after_another(settings, file_of):
    first = file_of("model: {init_args: {policy_loss: {init_args: {dual_clip: 3.0}}}}\n")
    options = [f"--model.policy_loss={name}" for name in ("SequenceClipped", "ClippedSurrogate")]
    assert settings(*GRPO, *first)["policy_loss"]["init_args"]["dual_clip"] == 3.0
    again = settings(*GRPO, *first, *options)["policy_loss"]["init_args"]
    assert again == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def test_a_choice_within_a_choice(settings, file_of):
    """ReturnToGo(baseline=MovingAverage(0.5)), whose baseline and then all of it is replaced."""
    first = file_of(
        "model:\n"
        "  class_path: Reinforce\n"
        "  init_args:\n"
        "    update_epochs: 1\n"
        "    num_minibatches: 1\n"
        "    advantage:\n"
        "      class_path: ReturnToGo\n"
        "      init_args:\n"
        "        gamma: 0.5\n"
        "        baseline: {class_path: MovingAverage, init_args: {decay: 0.5}}\n"
    )
    mean = settings(*first, "--model.advantage.baseline", "BatchMean")["advantage"]["init_args"]
    assert mean["gamma"] == 0.5
    assert mean["baseline"]["class_path"].endswith("BatchMean")
    back = ["--model.advantage", "WhitenedReturn", "--model.advantage", "ReturnToGo"]
    assert settings(*first, *back)["advantage"]["init_args"] == {"gamma": 1.0, "baseline": None}


def test_a_task_of_the_data(settings, file_of):
    first = file_of(
        "data:\n"
        "  init_args:\n"
        "    task: {class_path: lit_rl.tasks.LargestDigit, init_args: {num_train: 50}}\n"
    )
    replaced = settings(*first, "--data.task", "Copy", part="data")
    assert replaced["task"]["init_args"]["num_train"] != 50
    assert replaced["batch_size"] == 32  # as base.yaml has it


def test_required_arguments_of_the_new_class_may_follow(settings):
    options = ["--model.reward", "Length", "--model.reward.maximum", 3]
    assert settings(*GRPO, *options)["reward"]["init_args"]["maximum"] == 3


def test_an_optimizer_and_another_algorithm_keep_what_was_set(settings):
    """A learning rate of the model's configuration is not lost by a change of the optimizer."""
    changed = settings("--model", "PPO", "--model.optimizer", "torch.optim.SGD")
    assert changed["optimizer"]["init_args"]["lr"] == 5e-4
    assert changed["entropy_coef"] == 0.01


NAMES = ["dapo", "gspo", "ppo", "reinforce", "trpo_penalty"]


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_of_an_algorithm_is_its_own_behind_any_other(settings, name):
    """Whatever class a file names, its arguments are those of a run that has this file alone."""
    file = ALGORITHMS / f"{name}.yaml"
    alone, behind = settings("--config", file), settings(*GRPO, "--config", file)
    named = yaml.safe_load(file.read_text())["model"]["init_args"]
    for key in named:
        assert behind[key] == alone[key], key


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "no.yaml"],
        ["--config", "{broken"],
        ["--model.policy_loss", "NoSuchLoss"],
        ["--model.policy_loss", "no.such.module.Loss"],
        ["--model.policy_loss", "lit_rl.aggregations.TokenMean"],
        ["--model.nothing.at.all", "3", "--model.kl_coef", "-1"],
        ["--print_config"],
    ],
)
def test_what_cannot_be_read_is_left_to_the_parser(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = ["--config", str(BASE)]
    assert with_own_defaults([*before, *arguments]) == [*before, *arguments]


def test_defaults_that_can_be_written_stand_before_the_option():
    """Not those of required arguments: `max_kl` and `loss` have none."""
    arguments = ["--config", str(BASE), "--model.policy_loss", "OffPolicySequenceMask"]
    *start, flag, defaults, option, name = with_own_defaults(arguments)
    assert [*start, option, name] == arguments
    assert flag == "--config"
    loss = json.loads(defaults)["model"]["init_args"]["policy_loss"]
    assert loss == {"class_path": "OffPolicySequenceMask", "init_args": {}}
