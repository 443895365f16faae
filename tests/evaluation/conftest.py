import pytest
import torch

from lit_rl.types import ScoredRollout, at_last_token


@pytest.fixture
def scored_of():
    """`scored_of(rewards, group_size=1, missing=(), lengths=None, **fields)`: scored responses."""

    def build(rewards, group_size=1, missing=(), lengths=None, **fields):
        count = len(rewards)
        lengths = torch.tensor(lengths or [1] * count)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        defaults = {
            "prompt_ids": torch.zeros(count, 1, dtype=torch.long),
            "prompt_mask": torch.ones(count, 1, dtype=torch.bool),
            "response_ids": torch.zeros(mask.shape, dtype=torch.long),
            "mask": mask,
            "sampler_log_probs": torch.zeros(mask.shape),
            "finished": torch.ones(count, dtype=torch.bool),
            "prompts": tuple(f"prompt {row // group_size}" for row in range(count)),
            "responses": tuple(f"response {row}" for row in range(count)),
            "answers": tuple(f"answer {row // group_size}" for row in range(count)),
            "columns": {},
            "group_size": group_size,
            "rewards": torch.tensor(rewards),
            "token_rewards": at_last_token(torch.tensor(rewards), mask),
            "step_rewards": torch.full(mask.shape, torch.nan),
            "reward_parts": {},
            "missing": torch.tensor([row in missing for row in range(count)]),
        }
        return ScoredRollout(**{**defaults, **fields})

    return build
