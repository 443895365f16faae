import itertools

import pytest
import torch

from lit_rl.advantages import BatchMean, MovingAverage, return_to_go

ONE = torch.tensor([[True]])


def returns_of(*values):
    return torch.tensor([values])


def test_the_batch_mean_counts_every_token_once():
    returns = torch.tensor([[1.0, 1.0, 1.0], [5.0, torch.nan, torch.nan]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    # (3 * 1 + 5) / 4, not the mean of the responses, which is 3.
    assert BatchMean()(returns, mask).item() == 2.0


@pytest.mark.parametrize("baseline", [BatchMean(), MovingAverage()])
def test_a_baseline_of_no_token_is_zero(baseline):
    nothing = torch.tensor([[torch.nan]])
    baseline.observe(nothing, ~ONE)
    assert baseline(nothing, ~ONE).item() == 0.0


@pytest.mark.parametrize(
    ("baseline", "share"),
    # BatchMean's own share of itself is 1 / n; a constant leaves the gradient as it is.
    [(BatchMean(), 2 / 3), (MovingAverage(), 1.0)],
)
def test_the_expected_gradient_with_a_baseline_is_what_its_docstring_says(baseline, share):
    # Three responses of one token; action a has probability p_a and reward r_a. The derivative of
    # log p_1 with respect to its logit is 1 - p_1 if it was taken, else -p_1. All 2^3 outcomes.
    probability, reward = torch.tensor([0.25, 0.75]).double(), torch.tensor([3.0, 5.0]).double()
    mask = torch.ones(3, 1, dtype=torch.bool)
    baseline.observe(torch.tensor([[4.0]]), ONE)
    expected = 0.0
    for actions in map(list, itertools.product([0, 1], repeat=3)):
        returns = return_to_go(reward[actions][:, None], mask, gamma=1.0)
        score = torch.tensor(actions) - probability[1]
        gradient = ((returns - baseline(returns, mask))[:, 0] * score).mean()
        expected += probability[actions].prod() * gradient
    # p_1 * (1 - p_1) * (r_1 - r_0) = 0.1875 * 2.
    torch.testing.assert_close(expected, torch.tensor(0.375 * share).double())


def test_the_first_mean_is_the_first_average_and_older_ones_fade():
    baseline = MovingAverage(decay=0.5)
    seen = []
    for value in (8.0, 4.0, 0.0):
        baseline.observe(returns_of(value), ONE)
        seen.append(baseline(returns_of(0.0), ONE).item())
    # 8; (8 + 4) / 2; (6 + 0) / 2.
    assert seen == [8.0, 6.0, 3.0]


def test_an_iteration_without_tokens_leaves_the_average():
    baseline = MovingAverage()
    baseline.observe(returns_of(8.0), ONE)
    baseline.observe(returns_of(torch.nan), ~ONE)
    assert baseline.state_dict() == {"average": 8.0}


def test_an_average_goes_through_a_checkpoint():
    baseline = MovingAverage(decay=0.5)
    assert baseline.state_dict() == {}
    baseline.observe(returns_of(8.0), ONE)
    other = MovingAverage(decay=0.5)
    other.load_state_dict(baseline.state_dict())
    for each in (baseline, other):
        each.observe(returns_of(4.0), ONE)
    assert other.average == baseline.average == 6.0
    other.load_state_dict({})
    assert other(returns_of(1.0), ONE).item() == 0.0


@pytest.mark.parametrize("decay", [-0.1, 1.0, torch.nan])
def test_a_decay_that_never_forgets_or_is_no_share_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), for example 0.9"):
        MovingAverage(decay=decay)
