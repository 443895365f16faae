"""Norms and their limit by parameter group."""

import pytest
import torch

from lit_rl.strategies.clipping import clip_grad_norms, let_rest


def optimizer_of(**parameters):
    groups = [{"params": [p], "name": name} for name, p in parameters.items()]
    return torch.optim.SGD(groups, lr=1.0)


def test_groups_are_clipped_apart():
    """Gradients (3, 4) and 0.5 have norms 5 and 0.5; a limit of 1 scales the first by 1/5 only."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
    norms = clip_grad_norms(optimizer_of(actor=a, critic=b), 1.0)
    assert norms == {"actor": pytest.approx(5.0), "critic": pytest.approx(0.5)}
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.8, 0.5]))


def test_no_limit_measures_only():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([7.0])
    assert clip_grad_norms(optimizer_of(actor=parameter), None) == {"actor": 7.0}
    assert parameter.grad == 7.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norm_that_is_not_finite_is_returned_for_the_step_to_be_skipped(value):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([value])
    norms = clip_grad_norms(optimizer_of(critic=parameter), 1.0)
    assert norms == {"critic": pytest.approx(value, nan_ok=True)}


def test_a_group_that_rests_is_left_as_it_is_by_a_step_with_decay():
    """Learning rate 1 and gradient 1 move the other by -1; the decay of 0.5 of 2 adds another."""
    rests, moves = (torch.nn.Parameter(torch.full((1,), 2.0)) for _ in range(2))
    rests.grad, moves.grad = torch.ones(1), torch.ones(1)
    groups = [{"params": [rests], "name": "actor"}, {"params": [moves], "name": "critic"}]
    optimizer = torch.optim.SGD(groups, lr=1.0, weight_decay=0.5)
    let_rest(optimizer, frozenset({"actor"}))
    optimizer.step()
    assert (rests.item(), moves.item()) == (2.0, 0.0)
