"""Responses as plain rows, for files and tables."""

from typing import Any

from lit_rl.types import Rollout, ScoredRollout


def sample_rows(rollout: Rollout) -> list[dict[str, Any]]:
    """Return one plain row per response, with its reward where it has one."""
    lengths, finished = rollout.mask.sum(1).tolist(), rollout.finished.tolist()
    rows = [
        {
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "answer": rollout.answers[i],
            "length": lengths[i],
            "finished": finished[i],
        }
        for i in range(len(rollout))
    ]
    if isinstance(rollout, ScoredRollout):
        for i, reward in enumerate(rollout.rewards.tolist()):
            rows[i]["reward"] = None if rollout.missing[i] else reward
            rows[i]["parts"] = {name: part[i].item() for name, part in rollout.reward_parts.items()}
    return rows
