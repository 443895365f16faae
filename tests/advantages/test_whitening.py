import torch

from lit_rl.advantages.whitening import whitened


def test_advantages_are_whitened_by_the_deviation_of_a_sample():
    advantages = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    mask = torch.tensor([[True, True], [True, False]])
    # Mean 2, squares 1 + 0 + 1, divided by 2.
    torch.testing.assert_close(whitened(advantages, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_epsilon_is_added_to_the_variance():
    # +-1e-4 has the sample variance 2e-8: 1e-4 / sqrt(3e-8).
    advantages = torch.tensor([[1e-4, -1e-4]], dtype=torch.float64)
    result = whitened(advantages, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(result, torch.tensor([[3**-0.5, -(3**-0.5)]]).double())


def test_a_single_advantage_and_equal_ones_become_zero():
    one = torch.tensor([[True, False]])
    assert whitened(torch.tensor([[2.0, 0.0]]), one).tolist() == [[0.0, 0.0]]
    assert whitened(torch.full((3, 7), 0.1), torch.ones(3, 7, dtype=torch.bool)).eq(0).all()
