from functools import partial

import pytest
import torch

from lit_rl.advantages import GAE, gae, return_to_go
from lit_rl.types import ValuedRollout

NAN, INF = torch.nan, torch.inf
close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
raw = partial(GAE, whiten=False)


def one_row(rewards, values, gamma, lam, mask=None, **end):
    rewards, values = torch.tensor([rewards]), torch.tensor([values])
    mask = torch.ones_like(rewards).bool() if mask is None else torch.tensor([mask])
    return gae(rewards, values, mask, gamma=gamma, lam=lam, **end)


@pytest.fixture
def make_valued(make_scored):
    """A rollout with values per token, and end values of 0 unless said otherwise."""

    def make(rewards, values, lengths, end_values=None, finished=None, **fields):
        return make_scored(
            rewards,
            lengths,
            stage=ValuedRollout,
            values=torch.tensor(values),
            end_values=torch.tensor(end_values or [0.0] * len(rewards)),
            finished=finished or [True] * len(rewards),
            **fields,
        )

    return make


@pytest.mark.parametrize("anything", [100.0, NAN, INF])
def test_what_stands_at_padding_changes_no_advantage(anything):
    result = one_row(
        [0.0, 1.0, anything], [0.0, 0.0, anything], 1.0, 0.95, mask=[True, True, False]
    )
    # 0.95 * 1 and 1; a value of 100 at the padding would have given 5.7 and 6.
    close(result, torch.tensor([[0.95, 1.0, 0.0]]))


@pytest.mark.parametrize("anything", [100.0, NAN, INF])
def test_what_stands_at_padding_changes_no_target(anything, make_valued):
    rows = [[0.0, 1.0, anything], [0.0, 0.0, 0.0]]
    valued = make_valued(rows, [[0.0, 0.0, anything], [0.0] * 3], lengths=[2, 3])
    close(raw().returns(valued)[0], torch.tensor([0.95, 1.0, 0.0]))


def test_the_reward_of_the_last_token_reaches_the_first_one_discounted():
    result = one_row([0.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 5, 0.9, 1.0, [True] * 3 + [False] * 2)
    close(result, torch.tensor([[0.81, 0.9, 1.0, 0.0, 0.0]]))


def test_errors_are_accumulated_backwards():
    # Errors -0.1 + 0.9 * 0.4 - 0.5 = -0.24, -0.2 + 0.9 * 0.3 - 0.4 = -0.33 and 0.7, then
    # -0.33 + 0.72 * 0.7 = 0.174 and -0.24 + 0.72 * 0.174 = -0.11472.
    result = one_row([-0.1, -0.2, 1.0], [0.5, 0.4, 0.3], 0.9, 0.8)
    close(result, torch.tensor([[-0.11472, 0.174, 0.7]]))


def test_exactly_the_tokens_that_count_have_an_advantage():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]
    assert torch.equal(gae(rewards, values, mask, gamma=0.9, lam=0.9) != 0, mask)


def test_a_lambda_of_zero_leaves_the_error_of_each_value():
    # 1 + 0.5 * 6 - 4 = 0, 2 + 0.5 * 2 - 6 = -3, 3 + 0.5 * 7 - 2 = 4.5.
    end_values = torch.tensor([7.0])
    result = one_row([1.0, 2.0, 3.0], [4.0, 6.0, 2.0], 0.5, 0.0, end_values=end_values)
    assert result.tolist() == [[0.0, -3.0, 4.5]]


def test_a_lambda_of_one_gives_the_return_to_go_less_the_value():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
    for gamma in (1.0, 0.9):
        expected = torch.where(mask, return_to_go(rewards, mask, gamma=gamma) - values, 0.0)
        torch.testing.assert_close(gae(rewards, values, mask, gamma=gamma, lam=1.0), expected)


def test_tokens_that_are_not_the_policys_own_are_skipped():
    # As if the first and the last two tokens stood side by side.
    holes = one_row(
        [-0.1, 50.0, NAN, -0.2, 1.0],
        [0.5, NAN, -50.0, 0.4, 0.3],
        0.9,
        0.8,
        mask=[True, False, False, True, True],
    )
    close(holes, torch.tensor([[-0.11472, 0.0, 0.0, 0.174, 0.7]]))


def test_each_rollout_may_have_its_own_lambda():
    rewards, values = torch.tensor([[1.0, 2.0]] * 2), torch.tensor([[4.0, 6.0]] * 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    together = gae(rewards, values, mask, gamma=0.5, lam=torch.tensor([0.25, 1.0]))
    # Errors 1 + 3 - 4 = 0 and 2 - 6 = -4.
    assert together.tolist() == [[0 - 0.125 * 4, -4.0], [0 - 0.5 * 4, -4.0]]


def test_without_columns_there_are_no_advantages():
    empty = torch.zeros(2, 0)
    assert torch.equal(gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0), empty)


def test_targets_are_unwhitened_advantages_plus_values(make_valued):
    valued = make_valued([[-0.1, -0.2, 1.0]], [[0.5, 0.4, 0.3]], lengths=[3])
    estimator = GAE(gamma=0.9, lam=0.8)
    close(estimator.returns(valued), torch.tensor([[0.38528, 0.574, 1.0]]))
    # The advantages -0.11472, 0.174 and 0.7: mean 0.2530933, sample standard deviation 0.4130787.
    close(estimator(valued), torch.tensor([[-0.8904196, -0.1914728, 1.0818924]]))


@pytest.mark.parametrize("estimator", [GAE(), raw()], ids=["whitened", "raw"])
def test_a_single_token_has_a_finite_advantage(estimator, make_valued):
    valued = make_valued([[2.0]], [[0.0]], lengths=[1])
    assert estimator(valued).tolist() == [[0.0 if estimator.whiten else 2.0]]


@pytest.mark.parametrize("estimator", [GAE(), raw()], ids=["whitened", "raw"])
def test_without_tokens_nothing_has_an_advantage(estimator, make_valued):
    valued = make_valued([[2.0, 1.0]], [[NAN, NAN]], lengths=[2], missing=[0])
    assert estimator(valued).tolist() == [[0.0, 0.0]]
    assert estimator.returns(valued).tolist() == [[0.0, 0.0]]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens(make_valued):
    valued = make_valued([[1.0, 5.0, 2.0], [3.0, -4.0, 0.0]], [[0.5] * 3] * 2, lengths=[3, 2])
    tokens = GAE()(valued)[valued.mask]
    torch.testing.assert_close(tokens.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(tokens.std(), torch.tensor(1.0))


def test_the_critic_may_have_a_lambda_of_its_own(make_valued):
    valued = make_valued([[-0.1, -0.2, 1.0]], [[0.5, 0.4, 0.3]], lengths=[3])
    decoupled = raw(gamma=0.9, lam=0.8, critic_lam=1.0)
    assert torch.equal(decoupled(valued), raw(gamma=0.9, lam=0.8)(valued))
    # The return to go: -0.1 + 0.9 * 0.7, -0.2 + 0.9 and 1, whatever the values.
    close(decoupled.returns(valued), torch.tensor([[0.53, 0.7, 1.0]]))


def test_the_lambda_of_the_policy_grows_with_the_length_of_the_response(make_valued):
    lengths = [1, 2, 4]
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    valued = make_valued(rewards, [[0.0] * 4] * 3, lengths=lengths)
    result = raw(length_adaptive=1.0, critic_lam=1.0)(valued)
    # lambda 1 - 1 = 0, 1 - 1/2 and 1 - 1/4, to the power of the distance to the reward.
    expected = [[1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0], [0.421875, 0.5625, 0.75, 1.0]]
    assert result.tolist() == expected


def test_a_lambda_of_a_length_is_never_negative(make_valued):
    valued = make_valued([[0.0, 1.0]], [[0.0, 0.0]], lengths=[2])
    # 1 - 1 / (0.05 * 2) is -9.
    assert raw(length_adaptive=0.05)(valued).tolist() == [[0.0, 1.0]]


def test_without_its_own_lambda_the_critic_has_that_of_the_length(make_valued):
    valued = make_valued([[0.0, 1.0]], [[0.5, 0.0]], lengths=[2])
    # Errors -0.5 and 1, lambda 1/2: advantages 0 and 1.
    assert raw(length_adaptive=1.0).returns(valued).tolist() == [[0.5, 1.0]]


def test_a_truncated_response_bootstraps_if_it_is_asked_to(make_valued):
    valued = make_valued(
        [[0.0, 0.0]], [[0.1, 0.2]], lengths=[2], end_values=[0.5], finished=[False]
    )
    close(raw(lam=1.0, bootstrap_truncated=True)(valued), torch.tensor([[0.4, 0.3]]))
    close(raw(lam=1.0)(valued), torch.tensor([[-0.1, -0.2]]))
    close(raw(lam=1.0, bootstrap_truncated=True).returns(valued), torch.tensor([[0.5, 0.5]]))


def test_the_width_of_the_batch_does_not_say_which_response_was_truncated(make_valued):
    # The longest one ended; the shorter one was cut off by a limit of its own.
    valued = make_valued(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        lengths=[3, 2],
        end_values=[NAN, 0.5],
        finished=[True, False],
    )
    result = raw(lam=1.0, bootstrap_truncated=True)(valued)
    assert result.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]


@pytest.mark.parametrize("name", ["gamma", "lam", "critic_lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, NAN])
def test_a_discount_or_a_lambda_outside_the_unit_interval_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], for example 1.0"):
        GAE(**{name: value})


@pytest.mark.parametrize("value", [0.0, -0.05, NAN])
def test_an_adaptive_length_that_is_not_above_zero_is_refused(value):
    with pytest.raises(ValueError, match=r"length_adaptive must be above 0, for example 0.05"):
        GAE(length_adaptive=value)
