import torch

from lit_rl.types import Prompts, ScoredRollout, at_last_token

NAN = torch.nan
# A full row, one with a hole, one whose end is no token of the policy, and none.
MASK = torch.tensor(
    [[True, True, True], [True, False, True], [True, False, False], [False, False, False]]
)


def scored_rollout(token_rewards, missing=(False,) * 4):
    names = ("",) * 4
    token_rewards = torch.tensor(token_rewards)
    return ScoredRollout(
        prompt_ids=torch.ones(4, 1, dtype=torch.long),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        response_ids=torch.zeros(4, 3, dtype=torch.long),
        mask=MASK,
        sampler_log_probs=torch.zeros(4, 3),
        finished=torch.ones(4, dtype=torch.bool),
        prompts=names,
        responses=names,
        answers=names,
        columns={},
        group_size=2,
        rewards=token_rewards.sum(dim=1),
        token_rewards=token_rewards,
        step_rewards=torch.full((4, 3), NAN),
        reward_parts={},
        missing=torch.tensor(missing),
    )


def test_a_value_stands_at_the_last_token_that_counts_and_nowhere_else():
    values = torch.tensor([1.0, 2.0, 3.0, NAN])
    expected = [[0.0, 0.0, 1.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert at_last_token(values, MASK).tolist() == expected


def test_without_columns_no_value_stands_anywhere():
    mask = torch.ones(1, 0, dtype=torch.bool)
    assert torch.equal(at_last_token(torch.tensor([1.0]), mask), torch.zeros(1, 0))


def test_other_rewards_change_what_the_last_token_earned():
    scored = scored_rollout([[0.5, 0.0, 1.0], [0.25, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0] * 3])
    other = scored.with_rewards(torch.tensor([2.0, -1.0, 0.0, 0.0]))
    assert other.rewards.tolist() == [2.0, -1.0, 0.0, 0.0]
    # 1 + 2 - 1.5; 0 - 1 - 0.25; 2 + 0 - 2.
    expected = [[0.5, 0.0, 1.5], [0.25, 0.0, -1.25], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert other.token_rewards.tolist() == expected
    assert torch.equal(other.token_rewards.sum(dim=1), other.rewards)
    assert scored.rewards.tolist() == [1.5, 0.25, 2.0, 0.0]


def test_a_missing_row_has_no_other_reward_either():
    scored = scored_rollout([[0.0] * 3] * 4, missing=[True, False, False, False])
    other = scored.with_rewards(torch.tensor([NAN, 3.0, 0.0, 0.0]))
    assert other.rewards.tolist() == [0.0, 3.0, 0.0, 0.0]
    assert other.token_rewards.tolist() == [[0.0] * 3, [0.0, 0.0, 3.0], [0.0] * 3, [0.0] * 3]


def test_prompts_in_parts_are_the_prompts_in_their_order():
    ids = torch.arange(10).view(5, 2)
    prompts = Prompts(
        ids=ids,
        mask=ids > 0,
        texts=tuple("abcde"),
        answers=tuple("12345"),
        columns={"level": tuple(range(5))},
        row_ids=(9, 8, 7, 6, 5),
    )
    parts = prompts.split(2)
    assert [part.row_ids for part in parts] == [(9, 8), (7, 6), (5,)]
    assert [part.texts for part in parts] == [("a", "b"), ("c", "d"), ("e",)]
    assert [part.answers for part in parts] == [("1", "2"), ("3", "4"), ("5",)]
    assert [part.columns["level"] for part in parts] == [(0, 1), (2, 3), (4,)]
    assert torch.equal(torch.cat([part.ids for part in parts]), ids)
    assert torch.equal(torch.cat([part.mask for part in parts]), ids > 0)
    assert [part.row_ids for part in prompts.split(5)] == [prompts.row_ids]
