"""Copies of models that have their weights only while they are used."""

import torch
from torch import nn

from lit_rl.strategies.replicas import Replica, without_weights


def tied():
    """Two layers of one weight, [[0, 1], [2, 3]], and a buffer."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(torch.arange(4.0).view(2, 2))
    model.register_buffer("offset", torch.ones(2))
    return model


def test_a_copy_without_weights_keeps_ties_and_buffers():
    model = tied()
    copy = without_weights(model)
    assert copy[0].weight is copy[1].weight
    assert copy[0].weight.numel() == 0
    assert not copy[0].weight.requires_grad
    assert torch.equal(copy.offset, torch.ones(2))
    assert model[0].weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_replica_computes_what_the_model_does_while_it_is_filled_and_is_empty_before_and_after():
    """By hand: W [1, 1] = [1, 5], and W [1, 5] = [5, 17]."""
    model = tied()
    replica = Replica(model, lambda name: model.get_parameter(name).detach(), torch.device("cpu"))
    with replica.filled() as copy:
        assert copy(torch.ones(2)).tolist() == [5.0, 17.0]
        with replica.filled() as again:  # at once: filled once, emptied by the outer one
            assert again is copy
        assert copy[0].weight.numel() == 4
    assert replica.model[0].weight.numel() == 0
    assert model(torch.ones(2)).tolist() == [5.0, 17.0]


def test_a_replica_follows_the_weights():
    model = tied()
    replica = Replica(model, lambda name: model.get_parameter(name).detach(), torch.device("cpu"))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with replica.filled() as copy:  # by hand: 2 W 2 W [1, 1] is four times as much
        assert copy(torch.ones(2)).tolist() == [20.0, 68.0]
