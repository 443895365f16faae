"""Samples in a file and on the terminal."""

import json

import pytest
import torch

from lit_rl.callbacks import SampleLog

NAN = float("nan")
NASTY = "\x1b[2J\x1b[31m[bold]\r\n\u202e7\x07"


@pytest.fixture
def log(trainer, tmp_path, make, tiny_module):
    """Log one rollout and return the lines of the file."""

    def run(callback, scored, iteration=0):
        path = tmp_path / "samples.jsonl"
        module = make.module()
        module.iteration = iteration
        callback.setup(trainer, tiny_module(), "fit")
        callback.on_rollout(trainer, module, scored, make.experience([[1]]))
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return run


def test_one_line_of_json_per_sample(log, make):
    scored = make.scored(
        [0.5, 0.0],
        lengths=[3, 1],
        parts={"exact": [0.5, NAN]},
        missing=[1],
        finished=torch.tensor([True, False]),
    )
    first, second = log(SampleLog(num_samples=2), scored)
    assert first == {
        "iteration": 1,
        "prompt": "prompt 0",
        "response": "response 0",
        "answer": "answer 0",
        "reward": 0.5,
        "parts": {"exact": 0.5},
        "finished": True,
        "length": 3,
    }
    assert (second["reward"], second["parts"], second["finished"]) == (None, {"exact": None}, False)


def test_samples_answer_different_prompts(log, make):
    # Groups of 4: rows 0, 4 and 8 of 12 begin the three groups.
    scored = make.scored([0.0] * 12, group_size=4)
    assert [row["prompt"] for row in log(SampleLog(3), scored)] == [
        "prompt 0",
        "prompt 4",
        "prompt 8",
    ]


def test_no_more_samples_than_responses(log, make):
    assert len(log(SampleLog(num_samples=5), make.scored([0.0, 1.0]))) == 2


def test_first_and_every_nth_iteration_after_it(log, make):
    callback, scored = SampleLog(num_samples=1, every_n_iterations=2), make.scored([0.0, 1.0])
    for iteration in range(5):
        rows = log(callback, scored, iteration)
    assert [row["iteration"] for row in rows] == [1, 3, 5]


def test_a_response_defaces_neither_the_file_nor_the_terminal(log, make, capsys):
    scored = make.scored([0.0, 1.0], responses=(NASTY, NASTY), prompts=(NASTY, "1>"))
    rows = log(SampleLog(num_samples=2), scored)
    assert [row["response"] for row in rows] == [NASTY, NASTY]
    shown = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in shown)
    # Markup is shown, not obeyed.
    assert "[bold]" in shown
    assert r"\x1b[2J" in shown


def test_a_long_response_stays_within_the_width(log, make, capsys):
    log(SampleLog(), make.scored([0.0, 1.0], responses=("a" * 10_000, "b c " * 5_000)))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert len(lines) < 40


def test_other_ranks_write_nothing(log, make, trainer, monkeypatch, capsys):
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    assert log(SampleLog(), make.scored([0.0, 1.0])) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("settings", [{"num_samples": 0}, {"every_n_iterations": 0}])
def test_settings_below_one_are_refused(settings):
    with pytest.raises(ValueError, match="must be at least 1"):
        SampleLog(**settings)


def test_writes_into_the_run_folder(fit, tiny_module, tmp_path):
    fit(tiny_module(), SampleLog(num_samples=1, every_n_iterations=2), iterations=3)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 3]


def test_a_response_that_reads_as_a_path_is_only_text(log, make, tmp_path):
    path = str(tmp_path / "made")
    log(SampleLog(), make.scored([0.0, 1.0], responses=(path, "../made"), prompts=(path, path)))
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]
