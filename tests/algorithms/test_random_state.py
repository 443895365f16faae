"""The global generators go on where they were."""

import random

import numpy as np
import pytest
import torch

from lit_rl.algorithms.random_state import random_states, restore_random_states

CPU = torch.device("cpu")


def draws():
    return random.random(), float(np.random.normal()), float(torch.randn(()))


def test_each_generator_draws_what_it_would_have_drawn(tmp_path):
    """The second of two normal numbers is what NumPy's generator keeps from the first."""
    draws()
    torch.save(random_states(CPU), tmp_path / "states.pt")
    expected = draws()
    draws()
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    restore_random_states(states, rank=0, world_size=1, device=CPU)
    assert draws() == expected


def test_each_rank_takes_its_own():
    torch.manual_seed(1)
    (first,), first_draw = random_states(CPU), float(torch.randn(()))
    (second,), second_draw = random_states(CPU), float(torch.randn(()))
    restore_random_states([first, second], rank=1, world_size=2, device=CPU)
    assert float(torch.randn(())) == second_draw != first_draw


def test_states_of_other_ranks_in_number_are_left_alone_with_a_warning():
    states = random_states(CPU)
    torch.manual_seed(1)
    expected = float(torch.randn(()))
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="written by 1 ranks, this run has 2"):
        restore_random_states(states, rank=0, world_size=2, device=CPU)
    assert float(torch.randn(())) == expected
