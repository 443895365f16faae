"""Rollouts whose rewards, values and steps stand in a test."""

import pytest
import torch

from lit_rl.types import ScoredRollout, at_last_token


@pytest.fixture
def make_scored():
    """Build a rollout from a reward, or one per token, for each response, and its length.

    `stage` and `added` make it a later stage; lists become tensors.
    """

    def make(rewards, lengths, group_size=1, missing=(), stage=ScoredRollout, **added):
        rollouts, width = len(rewards), max(lengths)
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        token_rewards = torch.tensor(rewards)
        if token_rewards.dim() == 1:
            token_rewards = at_last_token(token_rewards, mask)
        fields = {
            "prompt_ids": torch.ones(rollouts, 2, dtype=torch.long),
            "prompt_mask": torch.ones(rollouts, 2, dtype=torch.bool),
            "response_ids": torch.zeros(rollouts, width, dtype=torch.long),
            "mask": mask,
            "sampler_log_probs": torch.zeros(rollouts, width),
            "finished": torch.ones(rollouts, dtype=torch.bool),
            "prompts": ("",) * rollouts,
            "responses": ("",) * rollouts,
            "answers": ("",) * rollouts,
            "columns": {},
            "group_size": group_size,
            "rewards": token_rewards.sum(dim=1),
            "token_rewards": token_rewards,
            "step_rewards": torch.full(mask.shape, torch.nan),
            "reward_parts": {},
            "missing": torch.tensor([row in missing for row in range(rollouts)]),
        }
        tensors = {
            name: torch.tensor(value) if isinstance(value, list) else value
            for name, value in added.items()
        }
        return stage(**{**fields, **tensors})

    return make
