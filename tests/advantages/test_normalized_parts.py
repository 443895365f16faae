import pytest
import torch

from lit_rl.advantages import NormalizedParts, normalized_parts

NAN = torch.nan
HALF = 2**-0.5


def normalized(parts, weights=None, group_size=2, valid=None):
    parts = {name: torch.tensor(part).double() for name, part in parts.items()}
    rollouts = len(next(iter(parts.values())))
    valid = torch.ones(rollouts, dtype=torch.bool) if valid is None else torch.tensor(valid)
    weights = weights or dict.fromkeys(parts, 1.0)
    return normalized_parts(parts, weights, group_size, valid=valid, epsilon=1e-9)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected).double(), rtol=0, atol=1e-6)


def test_two_rewards_count_alike_whatever_their_scales():
    # In each group the parts are +-0.7071; the sums are 2h, -2h, 0 and 0 with h = 0.7071, whose
    # mean is 0 and whose squares are 4, divided by 3.
    result = normalized({"right": [1.0, 0.0, 1.0, 0.0], "short": [900.0, 0.0, 0.0, 900.0]})
    scale = (4 / 3) ** 0.5
    close(result, [2 * HALF / scale, -2 * HALF / scale, 0.0, 0.0])


def test_winning_both_parts_is_more_than_winning_one():
    # The sums 1 and 2 of the rewards against 0 would be the same within their groups.
    result = normalized({"right": [1.0, 0.0, 1.0, 0.0], "short": [0.0, 0.0, 1.0, 0.0]})
    # Sums h, -h, 2h, -2h: squares 10 * h^2 = 5, divided by 3.
    scale = (5 / 3) ** 0.5
    close(result, [h / scale for h in (HALF, -HALF, 2 * HALF, -2 * HALF)])


def test_weights_come_after_the_normalisation_of_the_parts():
    parts = {"right": [1.0, 0.0, 0.0, 3.0], "short": [0.0, 1.0, 0.0, 0.0]}
    # 3h - h = 2h, -2h; -3h, 3h: squares 26 * h^2 = 13, divided by 3.
    scale = (13 / 3) ** 0.5
    result = normalized(parts, {"right": 3.0, "short": 1.0})
    close(result, [h / scale for h in (2 * HALF, -2 * HALF, -3 * HALF, 3 * HALF)])
    close(normalized(parts, {"right": 0.3, "short": 0.1}), result.tolist())


def test_every_rollout_counts_once_in_the_batch_however_long_it_is(make_scored):
    parts = {"right": torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])}
    long = make_scored([0.0] * 6, [9, 1, 1, 2, 3, 4], group_size=3, reward_parts=parts)
    short = make_scored([0.0] * 6, [1] * 6, group_size=3, reward_parts=parts)
    assert torch.equal(NormalizedParts()(long)[:, :1], NormalizedParts()(short))


def test_a_part_that_does_not_apply_moves_no_mean_of_that_part():
    parts = {"right": [1.0, 0.0, 0.0], "short": [NAN, 4.0, 2.0]}
    # right: mean 1/3, squares 2/3, divided by 2: 2/sqrt(3) and -1/sqrt(3). short: 0, h and -h.
    sums = torch.tensor([2 / 3**0.5, -1 / 3**0.5 + HALF, -1 / 3**0.5 - HALF]).double()
    close(normalized(parts, group_size=3), (sums / sums.std()).tolist())


def test_a_rollout_that_does_not_count_is_in_no_statistic():
    parts = {"right": [1.0, 0.0, NAN], "short": [0.0, 9.0, 1e30]}
    weights = {"right": 2.0, "short": 1.0}
    result = normalized(parts, weights, group_size=3, valid=[True, True, False])
    close(result, [HALF, -HALF, 0.0])


def test_parts_that_are_equal_within_their_groups_give_exactly_zero():
    assert normalized({"right": [0.1, 0.1, 3.0, 3.0], "short": [2.0] * 4}).eq(0).all()


def test_without_weights_every_part_counts_once(make_scored):
    parts = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([9.0, 0.0])}
    scored = make_scored([0.0, 0.0], [1, 1], group_size=2, reward_parts=parts)
    ones = NormalizedParts(weights={"right": 1.0, "short": 1.0})
    assert torch.equal(NormalizedParts()(scored), ones(scored))
    close(NormalizedParts()(scored)[:, 0].double(), [HALF, -HALF])


@pytest.mark.parametrize("weights", [{"wrong": 1.0}, {"right": 1.0}, {}])
def test_weights_name_exactly_the_parts_of_the_reward(weights, make_scored):
    parts = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([9.0, 0.0])}
    scored = make_scored([0.0, 0.0], [1, 1], group_size=2, reward_parts=parts)
    with pytest.raises(ValueError, match=r"weights names .*the reward are right, short.*such as"):
        NormalizedParts(weights=weights)(scored)


@pytest.mark.parametrize("weight", [NAN, torch.inf])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match=r"the weight of right must be finite, such as 1.0"):
        NormalizedParts(weights={"right": weight})


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, NAN])
def test_an_epsilon_that_is_not_above_zero_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        NormalizedParts(epsilon=epsilon)


def test_a_kl_in_the_reward_does_not_reach_the_parts():
    assert not NormalizedParts.sees_final_reward
