"""Responses as plain rows."""

import json
from dataclasses import fields

import torch

from lit_rl.evaluation import sample_rows
from lit_rl.types import Rollout


def test_a_row_says_all_of_a_response_with_reward(scored_of):
    # Lengths are tokens that count: 3, and 1 behind which two are padding.
    scored = scored_of(
        [0.5, 0.0],
        lengths=[3, 1],
        missing=[1],
        finished=torch.tensor([True, False]),
        reward_parts={"exact": torch.tensor([0.5, torch.nan])},
    )
    first, second = sample_rows(scored)
    assert first == {
        "prompt": "prompt 0",
        "response": "response 0",
        "answer": "answer 0",
        "length": 3,
        "finished": True,
        "reward": 0.5,
        "parts": {"exact": 0.5},
    }
    # A reward that does not apply is none, and not the 0 that stands in its place.
    assert second["reward"] is None
    assert (second["length"], second["finished"]) == (1, False)


def test_rows_are_plain_python(scored_of):
    rows = sample_rows(scored_of([1.0, 0.0], reward_parts={"exact": torch.tensor([1.0, 0.0])}))
    # A tensor or a numpy number would not survive.
    assert json.loads(json.dumps(rows)) == rows


def test_a_rollout_without_rewards_has_rows_without_rewards(scored_of):
    scored = scored_of([1.0, 0.0], group_size=2)
    rollout = Rollout(**{field.name: getattr(scored, field.name) for field in fields(Rollout)})
    rows = sample_rows(rollout)
    assert [row["response"] for row in rows] == ["response 0", "response 1"]
    assert [row["prompt"] for row in rows] == ["prompt 0", "prompt 0"]
    assert not rows[0].keys() & {"reward", "parts"}
