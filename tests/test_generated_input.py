"""Inputs that nobody would think of: what is wrong is refused as documented, and nothing crashes.

Each property is tried with a few examples in the fast tests, with 10,000 in all in the slow ones.
"""

import contextlib
import functools
import io
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rl.callbacks.json_lines import append_json_lines
from lit_rl.callbacks.terminal import cell, visible
from lit_rl.cli import RLCLI
from lit_rl.config_errors import explain
from lit_rl.models.character_tokenizer import character_tokenizer
from lit_rl.rewards import ExactAnswer, Length, NumberInText, RegexFormat, Reward, Steps
from lit_rl.rewards.text_reader import CHAT, check_template
from lit_rl.tasks import DataFiles, Example, PlainPrompt
from lit_rl.types import Rollout

TOKENIZER = character_tokenizer("x")
BASE = Path(__file__).parent.parent / "configs" / "base.yaml"
# Lone surrogates included: JSON can write them, UTF-8 cannot.
TEXTS = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(
    ["", "prompt", "answer", "1>", "1/0", "-3,000.5", "\x1b[2J", "[bold]x", "../../etc", "\ud800"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}) | st.dictionaries(TEXTS, JSON),
    max_size=2,
)
ROWS = st.fixed_dictionaries(
    {}, optional={"prompt": TEXTS | MESSAGES | JSON, "answer": TEXTS | st.integers(), "level": JSON}
)
LINES = st.lists(
    ROWS.map(lambda row: json.dumps(row).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=10)
    | st.sampled_from([b"9" * 5000, b'{"a": 1e999}', b'{"a":'])
    | st.just(b'{"prompt": "1>", "answer": "1"}'),
    max_size=4,
)


@contextlib.contextmanager
def refused_only_with(*messages):
    """Pass over a ValueError that holds one of the messages, and over no other."""
    try:
        yield
    except ValueError as error:
        if not any(message in str(error) for message in messages):
            raise


@given(lines=LINES)
def a_file_of_prompts(lines, folder):
    """Both sides hold texts, or a ValueError names the file."""
    file = folder / "prompts.jsonl"
    file.write_bytes(b"\n".join(lines))
    with refused_only_with("prompts.jsonl", "held_out_fraction 0.5 of"):
        task = DataFiles(train_file=str(file), held_out_fraction=0.5)
        rows = [*task.train(), *task.held_out()]
        assert all(isinstance(row["answer"], str) for row in rows)
        assert all(row["prompt"] is not None for row in rows)


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *("{prompt}", "{response}", "{", "}", "{{", "}}", "{}", "{0}", "{prompt!r}", "x"),
            *("{response:d}", "{response.x}", "{response[0]}", "{response:{prompt}}"),
        ]
    )
    | TEXTS,
    max_size=4,
).map("".join)


@given(template=FRAGMENTS, prompt=TEXTS, response=TEXTS)
def a_template_of_a_reward_model(template, prompt, response):
    """What is accepted holds the response, whatever that is."""
    with refused_only_with("it must be 'chat', or a text"):
        check_template(template)
        assert template == CHAT or response in template.format(prompt=prompt, response=response)


@given(template=FRAGMENTS, prompt=TEXTS, system=st.none() | TEXTS, shot=TEXTS)
def a_template_of_prompts(template, prompt, system, shot):
    """What is accepted holds the prompt, whatever that is."""
    with refused_only_with("must hold {prompt} once"):
        form = PlainPrompt(template, system, (Example(shot, shot),))
        assert prompt in form.text(prompt, TOKENIZER)


def rollout_of(responses, answers):
    count = len(responses)
    ids = torch.zeros(count, 2, dtype=torch.long)
    return Rollout(
        prompt_ids=ids,
        prompt_mask=ids == 0,
        response_ids=ids,
        mask=ids == 0,
        sampler_log_probs=torch.zeros(count, 2),
        finished=torch.ones(count, dtype=torch.bool),
        prompts=("",) * count,
        responses=tuple(responses),
        answers=tuple(answers),
        columns={},
        group_size=1,
    )


REWARDS = st.sampled_from(
    [ExactAnswer(), NumberInText(), NumberInText("first"), RegexFormat("a.*"), Length(3)]
)


@given(reward=REWARDS, pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def texts_for_a_reward(reward, pairs):
    """A reward in [0, 1], or an answer without a number is named."""
    with refused_only_with("holds no number"):
        values = reward.values(rollout_of(*zip(*pairs, strict=True)))
        assert all(value is None or 0 <= value <= 1 for value in values)


class Given(Reward):
    """Returns what it was given."""

    def __init__(self, given):
        self.given = given

    def values(self, rollout):
        return self.given


def steps_of(positions, values):
    """What Steps hold where nobody checks types, as outside of the tests."""
    steps = Steps([], [])
    object.__setattr__(steps, "positions", positions)
    object.__setattr__(steps, "values", values)
    return steps


GARBAGE = (
    st.builds(steps_of, JSON, JSON) | st.fractions() | st.complex_numbers() | st.binary() | JSON
)
VALUES = st.floats(-1, 1) | st.lists(st.none() | st.floats(-1, 1), min_size=2, max_size=2)


@given(values=st.lists(GARBAGE | VALUES, min_size=2, max_size=2) | JSON)
def what_a_reward_returns(values):
    """Finite rewards, or an error that names the reward."""
    reward = Given(values)
    object.__setattr__(reward, "_warned", frozenset(["inapplicable"]))
    with refused_only_with("the reward given"):
        scored = reward(rollout_of(["a", "b"], ["", ""]))
        assert scored.rewards.isfinite().all()


@given(text=TEXTS)
def a_text_to_show(text, folder):
    """One line without escape sequences on the terminal and in the file, which keeps the text."""
    assert visible(text).isprintable()
    assert cell(text, limit=9).plain.isprintable()
    assert not cell(text, limit=9).spans
    path = folder / "rows.jsonl"
    path.unlink(missing_ok=True)
    append_json_lines(path, [{"response": text, "value": math.nan}])
    (line,) = path.read_bytes().decode("ascii").splitlines()
    assert line.isprintable()
    assert json.loads(line) == {"response": text, "value": None}


KEYS = ["model.group_size", "trainer.max_epochs", "model.init_args.x", "data.batch_size", "config"]


@given(
    message=st.lists(
        st.sampled_from(
            [
                'Parser key "model": ',
                "unrecognized arguments: --",
                "Expected a dot import path string: ",
                "Problem with given class_path 'lit_rl.algorithms.GRPO'",
                "module 'lit_rl' has no attribute ",
                "'x'",
                "Errors:",
                "\n",
                "Key 'a' is not expected",
            ]
        )
        | TEXTS,
        max_size=4,
    ).map("".join)
)
def a_message_of_the_parser(message):
    """It is explained in a text."""
    assert isinstance(explain(message, KEYS), str)


def stands_in_a_command_line(text):
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


@given(
    key=(st.sampled_from(KEYS) | TEXTS).filter(stands_in_a_command_line),
    value=(TEXTS | JSON.map(json.dumps)).filter(stands_in_a_command_line),
)
def an_argument(key, value):
    """The configuration is printed, or the error is one of the command line."""
    outputs = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with outputs[0], outputs[1], pytest.raises(SystemExit) as stopped:
        RLCLI(BASE, ["fit", f"--{key}={value}", "--print_config"])
    assert stopped.value.code in (0, 2)


# Examples in the slow test; 10,000 together.
PROPERTIES = {
    a_file_of_prompts: 1500,
    a_template_of_a_reward_model: 2000,
    a_template_of_prompts: 1500,
    texts_for_a_reward: 1500,
    what_a_reward_returns: 1500,
    a_text_to_show: 1000,
    a_message_of_the_parser: 800,
    an_argument: 200,
}
QUICK = {an_argument: 2}


def tried(claim, folder, examples, monkeypatch):
    """Try a property with so many examples; return how many there were."""
    seen, property_itself = [], claim.hypothesis.inner_test

    @functools.wraps(property_itself)
    def counted(*arguments, **named):
        seen.append(None)
        return property_itself(*arguments, **named)

    monkeypatch.setattr(claim.hypothesis, "inner_test", counted)
    slow_inputs = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    limits = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=slow_inputs
    )
    needs_folder = claim in (a_file_of_prompts, a_text_to_show)
    limits(claim)(**({"folder": folder} if needs_folder else {}))
    return len(seen)


@pytest.mark.parametrize("claim", PROPERTIES, ids=lambda claim: claim.__name__)
def test_a_few_generated_inputs(claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tried(claim, tmp_path, QUICK.get(claim, 25), monkeypatch) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("claim", PROPERTIES, ids=lambda claim: claim.__name__)
def test_ten_thousand_generated_inputs(claim, tmp_path, monkeypatch):
    assert sum(PROPERTIES.values()) == 10_000
    monkeypatch.chdir(tmp_path)
    assert tried(claim, tmp_path, PROPERTIES[claim], monkeypatch) >= PROPERTIES[claim]
