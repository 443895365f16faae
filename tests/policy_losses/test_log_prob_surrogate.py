import math
from dataclasses import replace

import pytest
import torch

from lit_rl.policy_losses import LogProbSurrogate, log_prob_surrogate, surrogate

ALL = torch.ones(1, 2, dtype=torch.bool)


def test_the_log_prob_is_weighted_with_the_advantage():
    log_probs = torch.tensor([[-2.0, -0.5]], requires_grad=True)
    loss = log_prob_surrogate(log_probs, torch.tensor([[3.0, -1.0]]), ALL)
    loss.sum().backward()
    assert loss.tolist() == [[6.0, -0.5]]
    assert log_probs.grad.tolist() == [[-3.0, 1.0]]


def test_the_gradient_is_that_of_the_surrogate_at_the_old_policy():
    log_probs = torch.tensor([[-2.0, -0.5]], requires_grad=True)
    advantages = torch.tensor([[3.0, -1.0]])
    plain = log_prob_surrogate(log_probs, advantages, ALL).sum()
    with_ratio = surrogate(log_probs, log_probs.detach(), advantages, ALL).sum()
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (plain, with_ratio)]
    torch.testing.assert_close(*gradients)


def test_the_old_log_probs_are_not_read(experience):
    batch = experience(torch.zeros(1, 2), torch.ones(1, 2), ALL)
    log_probs = torch.tensor([[-2.0, -0.5]])
    loss = LogProbSurrogate()(log_probs, replace(batch, old_log_probs=None))
    assert loss.tolist() == [[2.0, 0.5]]
    assert LogProbSurrogate().clipped(log_probs, batch) == {}


def test_bfloat16_is_multiplied_in_float32():
    # 3 * 1.0009766 has more digits than bfloat16 holds.
    log_probs = torch.tensor([[-3.0, -3.0]], dtype=torch.bfloat16)
    loss = log_prob_surrogate(log_probs, torch.full((1, 2), 1.0009765625), ALL)
    assert loss.tolist() == [[3.0029296875] * 2]


@pytest.mark.parametrize(("log_prob", "advantage"), [(math.nan, 0.0), (-1.0, math.nan)])
def test_nan_at_a_token_that_counts_is_not_hidden(log_prob, advantage):
    log_probs, advantages = torch.full((1, 2), log_prob), torch.full((1, 2), advantage)
    assert log_prob_surrogate(log_probs, advantages, ALL).isnan().all()
