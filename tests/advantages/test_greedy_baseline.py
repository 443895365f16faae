import torch

from lit_rl.advantages import GreedyBaseline
from lit_rl.types import BaselinedRollout


def test_the_reward_of_the_baseline_response_is_deducted_at_every_token(make_scored):
    scored = make_scored(
        [[0.5, 1.0], [2.0, 0.0], [1.0, 1.0]],
        lengths=[2, 1, 2],
        missing=[2],
        stage=BaselinedRollout,
        baseline_rewards=[1.0, 3.0, torch.nan],
    )
    # 1.5 - 1 and 1 - 1; 2 - 3; the last one is missing its reward.
    assert GreedyBaseline()(scored).tolist() == [[0.5, 0.0], [-1.0, 0.0], [0.0, 0.0]]


def test_one_response_per_prompt_is_enough():
    assert GreedyBaseline.min_group_size == 1
