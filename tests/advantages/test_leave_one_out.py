import torch

from lit_rl.advantages import leave_one_out


def test_the_baseline_is_the_mean_of_the_others_and_nothing_is_divided_by_a_deviation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 7.0, 1.0, 4.0, 0.0])
    result = leave_one_out(rewards, 4, valid=torch.ones(8, dtype=torch.bool))
    # 1 - 0 and 0 - 1/3; then 7 - 5/3, 1 - 11/3, 4 - 8/3, 0 - 12/3.
    expected = torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 16 / 3, -8 / 3, 4 / 3, -4.0])
    torch.testing.assert_close(result, expected)


def test_a_row_that_does_not_count_is_not_among_the_others():
    valid = torch.tensor([True, True, False, True])
    result = leave_one_out(torch.tensor([1.0, 0.0, 10.0, 2.0]), 4, valid=valid)
    # 1 - 2/2, 0 - 3/2, excluded, 2 - 1/2.
    torch.testing.assert_close(result, torch.tensor([0.0, -1.5, 0.0, 1.5]))
