import math

import pytest
import torch

from lit_rl.reward_shaping import (
    ClipReward,
    MissingEndPenalty,
    ScaleReward,
    SoftOverlongPunishment,
)
from lit_rl.types import ScoredRollout, at_last_token

NAN = math.nan


def outcomes(rewards, lengths=None, finished=None, missing=()):
    """Responses that are rewarded as a whole; of one token each unless `lengths` says otherwise."""
    rewards, count = torch.tensor(rewards), len(rewards)
    lengths = torch.tensor(lengths or [1] * count)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    texts = tuple(str(row) for row in range(count))
    return ScoredRollout(
        prompt_ids=torch.zeros(count, 1, dtype=torch.long),
        prompt_mask=torch.ones(count, 1, dtype=torch.bool),
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        sampler_log_probs=torch.zeros(mask.shape),
        finished=torch.tensor(finished or [True] * count),
        prompts=texts,
        responses=texts,
        answers=texts,
        columns={},
        group_size=1,
        rewards=rewards,
        token_rewards=at_last_token(rewards, mask),
        step_rewards=torch.full(mask.shape, NAN),
        reward_parts={"reward": rewards},
        missing=torch.tensor([row in missing for row in range(count)]),
    )


@pytest.fixture
def steps():
    """A response of three tokens with a step of 0.5 at the first one and an outcome of 2."""
    return ScoredRollout(
        **{
            **vars(outcomes([2.5], lengths=[3])),
            "token_rewards": torch.tensor([[0.5, 0.0, 2.0]]),
            "step_rewards": torch.tensor([[0.5, NAN, NAN]]),
        }
    )


def test_a_factor_scales_outcomes_and_steps(steps):
    scaled = ScaleReward(0.5)(steps)
    assert scaled.rewards.tolist() == [1.25]
    assert scaled.token_rewards.tolist() == [[0.25, 0.0, 1.0]]
    torch.testing.assert_close(
        scaled.step_rewards, torch.tensor([[0.25, NAN, NAN]]), equal_nan=True
    )
    # What is logged is what the reward gave.
    assert scaled.reward_parts["reward"].tolist() == [2.5]


def test_a_clip_bounds_the_reward_and_leaves_its_steps(steps):
    clipped = ClipReward(-1.0, 1.0)(steps)
    assert clipped.rewards.tolist() == [1.0]
    # The last token takes 1 - 2.5 on top of its 2.
    assert clipped.token_rewards.tolist() == [[0.5, 0.0, 0.5]]
    assert clipped.step_rewards is steps.step_rewards


def test_a_clip_has_two_sides_and_either_may_be_open():
    scored = outcomes([-3.0, 0.5, 3.0])
    assert ClipReward(-1.0, 1.0)(scored).rewards.tolist() == [-1.0, 0.5, 1.0]
    assert ClipReward(-1.0, math.inf)(scored).rewards.tolist() == [-1.0, 0.5, 3.0]
    assert ClipReward(-math.inf, 1.0)(scored).rewards.tolist() == [-3.0, 0.5, 1.0]


def test_a_missing_row_keeps_its_0_outside_the_clip():
    clipped = ClipReward(1.0, 2.0)(outcomes([0.0, 0.0], missing=[1]))
    assert clipped.rewards.tolist() == [1.0, 0.0]
    assert clipped.token_rewards.tolist() == [[1.0], [0.0]]


def test_the_penalty_of_a_truncated_response_is_subtracted_from_its_reward():
    """A response that a custom stop string ended is finished and pays nothing."""
    scored = outcomes([0.5, 0.5], lengths=[2, 2], finished=[False, True])
    punished = MissingEndPenalty(1.0)(scored)
    assert punished.rewards.tolist() == [-0.5, 0.5]
    assert punished.token_rewards.tolist() == [[0.0, -0.5], [0.0, 0.5]]


def test_the_overlong_punishment_begins_at_the_cache_and_is_whole_at_the_limit():
    lengths = [1, 79, 80, 81, 85, 90, 99, 100, 101, 150]
    scored = outcomes([1.0] * 10, lengths=lengths)
    punished = SoftOverlongPunishment(max_tokens=100, cache_tokens=20)(scored)
    # (80 - length) / 20 between 80 and 100 tokens.
    expected = [0.0, 0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert (punished.rewards - 1.0).tolist() == pytest.approx(expected, abs=1e-6)
    assert punished.token_rewards[4, 84] == 0.75


def test_a_cache_of_the_whole_response_punishes_every_token():
    punished = SoftOverlongPunishment(4, 4)(outcomes([0.0] * 3, lengths=[1, 3, 5]))
    assert punished.rewards.tolist() == [-0.25, -0.75, -1.0]


@pytest.mark.parametrize(
    ("shaping", "arguments", "message"),
    [
        (ScaleReward, (0.0,), "factor is 0.0, must be above 0 and finite, such as 0.1"),
        (ScaleReward, (-1.0,), "factor is -1.0"),
        (ScaleReward, (math.inf,), "factor is inf"),
        (ScaleReward, (NAN,), "factor is nan"),
        (ClipReward, (1.0, 1.0), "minimum is 1.0 and maximum is 1.0; .* such as -5.0 and 5.0"),
        (ClipReward, (NAN, 1.0), "minimum is nan"),
        (MissingEndPenalty, (0.0,), "penalty is 0.0, must be above 0 and finite, such as 1.0"),
        (MissingEndPenalty, (-1.0,), "penalty is -1.0"),
        (MissingEndPenalty, (NAN,), "penalty is nan"),
        (SoftOverlongPunishment, (100, 0), "cache_tokens is 0 and max_tokens is 100"),
        (SoftOverlongPunishment, (100, 101), "cache_tokens is 101 .* such as 4096 and 20480"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_right_one(shaping, arguments, message):
    with pytest.raises(ValueError, match=message):
        shaping(*arguments)
