import torch

from lit_rl.advantages import group_centered


def test_advantages_are_distances_from_the_mean_of_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 7.0, 3.0, 3.0, 3.0])
    result = group_centered(rewards, 4, valid=torch.ones(8, dtype=torch.bool))
    # Means 1/4 and 4.
    assert result.tolist() == [0.75, -0.25, -0.25, -0.25, 3.0, -1.0, -1.0, -1.0]
