"""The code of docs/extending.md trains, and each of its classes acts.

The files and the commands are those of the page.
"""

import csv
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.cli import RLCLI

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "base.yaml"
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S))
COMMANDS = re.findall(r"^```\npython train\.py (.*?)\n```", PAGE, re.M | re.S)
SHORT = [
    "--trainer.limit_train_batches=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
]


def test_the_page_has_the_files_and_commands():
    assert set(FILES) == {"my_ideas.py", "my_run.yaml", "my_algorithm.py"}
    assert len(COMMANDS) == 2


class Record(RLCallback):
    """Keeps what the hooks are given."""

    def __init__(self):
        self.rollouts, self.updates = [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.rollouts.append((scored, experience))

    def on_minibatch(self, trainer, module, update):
        self.updates.append(update)


class RecordedCLI(RLCLI):
    """The command line, with a record of the run."""

    def instantiate_trainer(self, **kwargs):
        trainer = super().instantiate_trainer(**kwargs)
        self.record = Record()
        trainer.callbacks.append(self.record)
        return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that holds the files of the page, to run in and to import from."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture(scope="module")
def run(folder):
    """Two iterations of the first command."""
    return RecordedCLI(BASE, [*COMMANDS[0].split(), *SHORT])


def test_rewards_are_those_of_the_users_class(run):
    """By hand: 1 less a ninth per digit of distance, 0 for what is no digit."""
    for scored, _ in run.record.rollouts:
        expected = [
            1 - abs(int(response) - int(answer)) / 9 if re.fullmatch(r"\d", response) else 0
            for response, answer in zip(scored.responses, scored.answers, strict=True)
        ]
        torch.testing.assert_close(scored.rewards, torch.tensor(expected, dtype=torch.float32))


def test_advantages_are_ranks_of_the_users_shaped_rewards(run):
    """By hand: rewards below 1/2 are 0; then pairs of a group are compared one by one."""
    dropped = 0
    for scored, experience in run.record.rollouts:
        rewards = scored.rewards.tolist()
        dropped += sum(0 < reward < 0.5 for reward in rewards)
        shaped = [reward if reward >= 0.5 else 0.0 for reward in rewards]
        expected = []
        for row, reward in enumerate(shaped):
            start = row // 16 * 16
            group = shaped[start : start + 16]
            lower = sum(other < reward for other in group)
            higher = sum(other > reward for other in group)
            expected.append((lower - higher) / 15)
        for row, advantage in enumerate(expected):
            tokens = experience.advantages[row][experience.mask[row]]
            torch.testing.assert_close(tokens, torch.full_like(tokens, advantage))
            assert not experience.advantages[row][~experience.mask[row]].any()
    assert dropped  # else the shaping would change nothing


def test_loss_is_that_of_the_users_class_and_correction(run):
    """By hand, token by token: weight * (-ratio * A + (ratio - 1)^2) - 0.01 * entropy."""
    ratios = []
    for update in run.record.updates:
        rows = []
        for experience, output in update.micro_batches:
            for row, mask in enumerate(experience.mask.tolist()):
                losses = []
                for t in [t for t, counts in enumerate(mask) if counts]:
                    old = float(experience.old_log_probs[row, t])
                    ratio = math.exp(float(output.log_probs[row, t]) - old)
                    weight = math.exp((old - float(experience.sampler_log_probs[row, t])) / 2)
                    advantage = float(experience.advantages[row, t])
                    loss = weight * (-ratio * advantage + (ratio - 1) ** 2)
                    losses.append(loss - 0.01 * float(output.entropy[row, t]))
                    ratios.append(ratio)
                rows.append(sum(losses) / len(losses))
        expected = torch.tensor(sum(rows) / len(rows))
        torch.testing.assert_close(update.loss, expected, rtol=1e-4, atol=1e-5)
    assert max(ratios) > 1.05  # else the quadratic term would say nothing


def test_metrics_of_the_users_callback_are_logged(run, folder):
    """By hand: responses whose advantage is above 0, of 32 x 16."""
    (file,) = folder.glob("runs/*-grpo/metrics.csv")
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["mine/winner_fraction"]]
    winners = [
        int((experience.advantages > 0).any(1).sum()) for _, experience in run.record.rollouts
    ]
    assert [float(row["mine/winner_fraction"]) for row in rows] == [
        pytest.approx(number / 512) for number in winners
    ]
    # Logged where there is a sampler correction; sampler and trainer are the same model here.
    assert [float(row["sampler/weight_mean"]) for row in rows] == [pytest.approx(1, abs=1e-3)] * 2


def test_correction_is_the_root_of_the_ratio(run):
    """By hand: a token that the trainer finds four times as likely has weight 2."""
    _, experience = run.record.rollouts[0]
    quadrupled = experience.old_log_probs - math.log(4)
    weights = run.model.sampler_correction.weights(
        replace(experience, sampler_log_probs=quadrupled)
    )
    expected = torch.where(experience.mask, 2.0, 1.0)
    torch.testing.assert_close(weights, expected)


def test_a_value_that_the_users_class_refuses_is_one_readable_error(folder, capsys):
    arguments = [*COMMANDS[0].split(), "--model.policy_loss.strength=0"]
    with pytest.raises(SystemExit) as stopped:
        RLCLI(BASE, arguments)
    assert stopped.value.code == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "error: strength must be above 0, for example 1.0, not 0.0"


def test_algorithm_of_the_user_trains(folder):
    model = RecordedCLI(BASE, [*COMMANDS[1].split(), *SHORT]).model
    assert type(model).__name__ == "RankPO"
    assert repr(model.advantage) == "GroupRank()"
    assert repr(model.policy_loss) == "QuadraticSurrogate(strength=2.0)"
    assert model.iteration == 2


@pytest.mark.slow
def test_the_very_command_trains(tmp_path):
    """Beside train.py, as the page says, to the accuracy that it states."""
    shutil.copy(ROOT / "train.py", tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    process = subprocess.run(
        [sys.executable, "train.py", *COMMANDS[0].split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    (file,) = tmp_path.glob("runs/*-grpo/metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert sum(bool(row["mine/winner_fraction"]) for row in rows) == 100
    accuracies = [row["val/greedy_accuracy"] for row in rows if row["val/greedy_accuracy"]]
    assert float(accuracies[-1]) > 0.9
