import pytest
import torch

from lit_rl.functional import (
    masked_centered,
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    top_fraction,
)

NAN, INF = torch.nan, torch.inf
VALUES = torch.tensor([1.0, 2.0, 3.0, 100.0])
MASK = torch.tensor([True, True, True, False])


def whitened(values, mask, *, unbiased=False, epsilon=1e-8, epsilon_inside_sqrt=True):
    return masked_whiten(
        values, mask, unbiased=unbiased, epsilon=epsilon, epsilon_inside_sqrt=epsilon_inside_sqrt
    )


REDUCTIONS = {
    "sum": masked_sum,
    "mean": masked_mean,
    "centered": masked_centered,
    "variance": lambda values, mask: masked_variance(values, mask, unbiased=True),
    "population variance": lambda values, mask: masked_variance(values, mask, unbiased=False),
    "whiten": whitened,
    "whiten, epsilon outside": lambda values, mask: whitened(
        values, mask, unbiased=True, epsilon_inside_sqrt=False
    ),
}
over_reductions = pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS.keys())


def test_sums_and_means_along_an_axis():
    values = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, INF]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    # Row 0: 1 + 2 over two; row 1: 4 over one.
    torch.testing.assert_close(masked_sum(values, mask, dim=1), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, 4.0]))
    # All three: 7 over three.
    torch.testing.assert_close(masked_mean(values, mask), torch.tensor(7 / 3))
    assert masked_sum(values, mask, dim=1, keepdim=True).tolist() == [[3.0], [4.0]]


def test_variance_along_an_axis_uses_each_rows_own_mean_and_count():
    values = torch.tensor([[1.0, 3.0, 9.0], [4.0, 6.0, 8.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # Row 0: (1 + 1) / 1 and / 2; row 1: (4 + 0 + 4) / 2 and / 3.
    sample = masked_variance(values, mask, unbiased=True, dim=1)
    torch.testing.assert_close(sample, torch.tensor([2.0, 4.0]))
    population = masked_variance(values, mask, unbiased=False, dim=1)
    torch.testing.assert_close(population, torch.tensor([1.0, 8 / 3]))


@pytest.mark.parametrize("epsilon_inside_sqrt", [True, False])
@pytest.mark.parametrize(
    ("unbiased", "expected"),
    # std 1 with divisor 2, sqrt(2/3) with divisor 3: 1 / 0.81650 = 1.22474.
    [(True, [-1.0, 0.0, 1.0, 0.0]), (False, [-1.224745, 0.0, 1.224745, 0.0])],
)
def test_whitening_takes_the_mean_away(unbiased, expected, epsilon_inside_sqrt):
    result = whitened(VALUES, MASK, unbiased=unbiased, epsilon_inside_sqrt=epsilon_inside_sqrt)
    torch.testing.assert_close(result, torch.tensor(expected))


def test_epsilon_stands_where_it_is_said_to_stand():
    values, mask = torch.tensor([1.0, 3.0]), torch.tensor([True, True])
    # Variance 2: sqrt(2 + 2) = 2 inside, sqrt(2) + 2 outside.
    inside = whitened(values, mask, unbiased=True, epsilon=2.0, epsilon_inside_sqrt=True)
    torch.testing.assert_close(inside, torch.tensor([-0.5, 0.5]))
    outside = whitened(values, mask, unbiased=True, epsilon=2.0, epsilon_inside_sqrt=False)
    torch.testing.assert_close(outside, torch.tensor([-1.0, 1.0]) / (2 + 2**0.5))


@pytest.mark.parametrize("epsilon", [0.0, -1e-8, NAN])
def test_whitening_refuses_an_epsilon_that_is_not_above_zero(epsilon):
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        whitened(VALUES, MASK, epsilon=epsilon)


@over_reductions
@pytest.mark.parametrize("anything", [NAN, INF, -INF, 1e30])
def test_what_is_masked_changes_nothing_and_gets_no_gradient(reduction, anything):
    clean = VALUES.clone().requires_grad_()
    dirty = torch.where(MASK, VALUES, anything).requires_grad_()
    weights = torch.tensor([1.0, -2.0, 5.0, 7.0])
    for values in (clean, dirty):
        (reduction(values, MASK) * weights).sum().backward()

    assert torch.equal(reduction(dirty, MASK), reduction(clean, MASK))
    assert torch.equal(dirty.grad, clean.grad)
    assert dirty.grad[3] == 0


@over_reductions
@pytest.mark.parametrize("num_valid", [0, 1])
def test_zero_or_one_valid_value_is_finite_with_a_finite_gradient(reduction, num_valid):
    values = torch.tensor([2.0, NAN], requires_grad=True)
    result = reduction(values, torch.arange(2) < num_valid)
    result.sum().backward()

    assert result.isfinite().all()
    assert values.grad.isfinite().all()


def test_a_single_value_is_whitened_to_zero():
    result = whitened(torch.tensor([[2.0, 0.0]]), torch.tensor([[True, False]]), unbiased=True)
    assert result.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("count", [3, 6, 7])
def test_equal_values_are_centered_to_exactly_zero(count):
    # In float32 the mean of some of these differs from 0.1 by the last bit.
    values = torch.full((count,), 0.1, requires_grad=True)
    mask = torch.ones(count, dtype=torch.bool)
    assert masked_centered(values, mask).tolist() == [0.0] * count
    result = whitened(values, mask, epsilon_inside_sqrt=False)
    assert result.tolist() == [0.0] * count
    result.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("name", ["sum", "mean", "centered", "variance", "population variance"])
def test_gradients_agree_with_finite_differences(name):
    values = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: REDUCTIONS[name](x, MASK), values)


def test_mean_and_deviation_of_whitening_carry_no_gradient():
    values = VALUES.clone().requires_grad_()
    weights = torch.tensor([1.0, -2.0, 5.0, 7.0])
    (whitened(values, MASK, unbiased=False) * weights).sum().backward()
    # The weights over a deviation of sqrt(2/3) that is held fixed.
    torch.testing.assert_close(values.grad, weights * MASK * 1.5**0.5)


# The highest values.


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    # Of five values: ceil(0.2 * 5) = 1, ceil(0.21 * 5) = 2, ceil(0.4 * 5) = 2, all.
    [(0.2, [5.0]), (0.21, [4.0, 5.0]), (0.4, [4.0, 5.0]), (1.0, [1.0, 2.0, 3.0, 4.0, 5.0])],
)
def test_the_highest_share_of_the_values_is_chosen(fraction, chosen):
    values = torch.tensor([[3.0, 1.0, 5.0], [9.0, 4.0, 2.0]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    result = top_fraction(values, mask, fraction)
    assert sorted(values[result].tolist()) == chosen
    assert not result[~mask].any()


def test_values_equal_to_the_lowest_chosen_one_are_chosen_too():
    values, mask = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.ones(4, dtype=torch.bool)
    assert top_fraction(values, mask, 0.5).tolist() == [False, True, True, True]


@pytest.mark.parametrize("anything", [NAN, INF, -INF, 1e30])
def test_what_is_masked_is_never_chosen_and_displaces_nothing(anything):
    values = torch.where(MASK, VALUES, anything)
    assert top_fraction(values, MASK, 0.3).tolist() == [False, False, True, False]


def test_of_nothing_nothing_is_chosen():
    assert not top_fraction(torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool), 0.5).any()
