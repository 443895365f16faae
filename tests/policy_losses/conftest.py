"""Losses of rows written out by hand, with their gradients."""

import pytest
import torch

from lit_rl.types import Experience


@pytest.fixture
def evaluate():
    """Value and gradient in the log-probs of a loss, one row of tokens, as lists."""

    def run(loss, log_probs, advantages, old_log_probs=None, mask=None, **settings):
        """Call `loss(log_probs, old_log_probs, advantages, mask)`; the old log-probs are 0."""
        log_probs = torch.tensor([log_probs], requires_grad=True)
        old = (
            torch.zeros_like(log_probs) if old_log_probs is None else torch.tensor([old_log_probs])
        )
        mask = (
            torch.ones_like(log_probs, dtype=torch.bool) if mask is None else torch.tensor([mask])
        )
        value = loss(log_probs, old.detach(), torch.tensor([advantages]), mask, **settings)
        value.sum().backward()
        return value[0].tolist(), log_probs.grad[0].tolist()

    return run


@pytest.fixture
def experience():
    """An experience from old log-probs, advantages and a mask, each [rollouts, tokens]."""

    def make(old_log_probs, advantages, mask):
        rollouts, tokens = mask.shape
        return Experience(
            prompt_ids=torch.ones(rollouts, 1, dtype=torch.long),
            prompt_mask=torch.ones(rollouts, 1, dtype=torch.bool),
            response_ids=torch.zeros(rollouts, tokens, dtype=torch.long),
            mask=mask,
            sampler_log_probs=old_log_probs,
            advantages=advantages,
            old_log_probs=old_log_probs,
            ref_log_probs=None,
        )

    return make
