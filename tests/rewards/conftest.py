import pytest
import torch

from lit_rl.types import Rollout


@pytest.fixture
def rollout_of():
    """Builds rollouts, one prompt per response: `rollout_of(responses, answers=..., ...)`."""

    def build(responses, answers=None, *, prompts=None, columns=None, lengths=None, finished=None):
        count = len(responses)
        lengths = torch.tensor(lengths or [1] * count)
        width = int(lengths.max())
        return Rollout(
            prompt_ids=torch.zeros(count, 1, dtype=torch.long),
            prompt_mask=torch.ones(count, 1, dtype=torch.bool),
            response_ids=torch.zeros(count, width, dtype=torch.long),
            mask=torch.arange(width) < lengths[:, None],
            sampler_log_probs=torch.zeros(count, width),
            finished=torch.tensor(finished or [True] * count),
            prompts=tuple(prompts or ["p"] * count),
            responses=tuple(responses),
            answers=tuple(answers or [""] * count),
            columns=columns or {},
            group_size=1,
        )

    return build
