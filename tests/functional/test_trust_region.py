"""Direction and line search of a step in a trust region, on problems that are solved by hand."""

import math

import pytest
import torch

from lit_rl.functional.trust_region import (
    LineSearchStep,
    backtracking_line_search,
    conjugate_gradient,
    longest_step,
)

# ----- conjugate gradient


def counted(matrix):
    """The products with a matrix, and a list that grows with each."""
    taken = []

    def product(vector):
        taken.append(vector)
        return matrix @ vector

    return product, taken


def test_each_iteration_is_that_of_the_method_by_hand():
    """M = diag(1, 3), b = (1, 1).

    From r = d = b: length 2 / 4 = 1/2, x = (1/2, 1/2), r = (1/2, -1/2), beta = (1/2) / 2 = 1/4,
    d = (3/4, -1/4); the second step ends at the solution (1, 1/3).
    """
    product, _ = counted(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    target = torch.ones(2)
    first = conjugate_gradient(product, target, iterations=1, tolerance=0.0)
    torch.testing.assert_close(first, torch.tensor([0.5, 0.5]))
    second = conjugate_gradient(product, target, iterations=2, tolerance=0.0)
    torch.testing.assert_close(second, torch.tensor([1.0, 1 / 3]))


def test_as_many_iterations_as_unknowns_solve_the_system():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T + torch.eye(6, dtype=torch.float64)
    target = torch.randn(6, generator=generator, dtype=torch.float64)
    solution = conjugate_gradient(counted(matrix)[0], target, iterations=6, tolerance=0.0)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, target))


def test_it_takes_no_product_more_than_the_tolerance_asks_for():
    """One product solves a multiple of the identity; a target of 0 is solved by none."""
    product, taken = counted(2 * torch.eye(3))
    solution = conjugate_gradient(product, torch.ones(3), iterations=10, tolerance=1e-6)
    assert torch.equal(solution, torch.full((3,), 0.5))
    assert len(taken) == 1
    assert conjugate_gradient(product, torch.zeros(3), iterations=10, tolerance=0.0).eq(0).all()
    assert len(taken) == 1


def test_the_tolerance_is_relative_to_the_target():
    """After one step of the first test the residual is half the length of the target."""
    product, taken = counted(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    for scale in (1e-3, 1e3):
        taken.clear()
        conjugate_gradient(product, torch.full((2,), scale), iterations=10, tolerance=0.51)
        assert len(taken) == 1
        conjugate_gradient(product, torch.full((2,), scale), iterations=10, tolerance=0.49)
        assert len(taken) == 3


def test_a_direction_without_curvature_ends_it():
    """M = diag(1, 0): of b = (0, 1) nothing is known. Of b = (1, 0) everything is."""
    product, _ = counted(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    flat = conjugate_gradient(product, torch.tensor([0.0, 1.0]), iterations=5, tolerance=0.0)
    assert torch.equal(flat, torch.zeros(2))
    curved = conjugate_gradient(product, torch.tensor([2.0, 0.0]), iterations=5, tolerance=0.0)
    assert torch.equal(curved, torch.tensor([2.0, 0.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0, "tolerance": 0.0}, "iterations is 0, must be at least 1"),
        ({"iterations": 1, "tolerance": -1.0}, r"tolerance is -1.0, must be at least 0"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        conjugate_gradient(lambda vector: vector, torch.ones(1), **settings)


# ----- the length


def test_the_quadratic_kl_of_the_longest_step_is_the_limit():
    """For a softmax over four actions F = diag(p) - p p^T, and the true KL is close to it."""
    logits = torch.tensor([0.5, -1.0, 0.0, 1.0], dtype=torch.float64)
    p = logits.softmax(-1)
    fisher = torch.diag(p) - torch.outer(p, p)
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    gradient = p * (advantages - p @ advantages)
    direction = conjugate_gradient(lambda v: fisher @ v, gradient, iterations=4, tolerance=1e-12)
    step = longest_step(direction, fisher @ direction, max_kl=1e-4)
    assert float(step @ fisher @ step / 2) == pytest.approx(1e-4, rel=1e-12)
    kl = (p * (p.log() - (logits + step).log_softmax(-1))).sum()
    assert float(kl) == pytest.approx(1e-4, rel=0.02)
    # g = F A: the natural gradient of a softmax policy is its advantages, up to a constant.
    torch.testing.assert_close(direction - direction.mean(), advantages - advantages.mean())


def test_a_direction_without_curvature_has_no_step():
    p = torch.tensor([0.5, -1.0]).softmax(-1)
    fisher = torch.diag(p) - torch.outer(p, p)
    for direction in (torch.zeros(2), torch.tensor([torch.nan, 1.0])):
        assert longest_step(direction, fisher @ direction, max_kl=0.01).eq(0).all()


# ----- the line search

SETTINGS = {
    "expected_improvement": 1.0,
    "max_kl": 0.01,
    "accept_ratio": 0.0,
    "backtrack_coef": 0.5,
    "max_steps": 4,
}


def searched(improvement, kl, **settings):
    """The step, and the fractions that were tried."""
    tried = []

    def measure(fraction):
        tried.append(fraction)
        return improvement(fraction), kl(fraction)

    return backtracking_line_search(measure, **{**SETTINGS, **settings}), tried


def test_a_full_step_that_improves_within_the_region_is_taken():
    step, tried = searched(lambda f: 0.7 * f, lambda f: 0.01 * f * f)
    assert step == LineSearchStep(fraction=1.0, improvement=0.7, kl=0.01)
    assert tried == [1.0]


def test_steps_shrink_until_the_kl_fits():
    """KL 0.04 f^2 <= 0.01 from f = 1/2 on; with b = 0.8 the powers are 1, 0.8, 0.64, 0.512."""
    step, tried = searched(lambda f: f, lambda f: 0.04 * f * f)
    assert step == LineSearchStep(fraction=0.5, improvement=0.5, kl=0.01)
    assert tried == [1.0, 0.5]
    step, tried = searched(lambda f: f, lambda f: 0.04 * f * f, backtrack_coef=0.8)
    assert step.fraction == 0.0
    assert tried == pytest.approx([1.0, 0.8, 0.64, 0.512])
    step, _ = searched(lambda f: f, lambda f: 0.04 * f * f, backtrack_coef=0.8, max_steps=5)
    assert step.fraction == pytest.approx(0.4096)


def test_steps_shrink_until_the_objective_rises():
    """f - 3 f^2 is -2, -1/4 and 1/16 at 1, 1/2 and 1/4; a rise of exactly 0 is none."""
    step, _ = searched(lambda f: f - 3 * f * f, lambda f: 0.0)
    assert step == LineSearchStep(fraction=0.25, improvement=0.0625, kl=0.0)
    step, tried = searched(lambda f: 0.0, lambda f: 0.0)
    assert step == LineSearchStep(fraction=0.0, improvement=0.0, kl=0.0)
    assert len(tried) == 4


def test_the_ratio_asks_for_a_share_of_the_linear_gain_of_the_same_fraction():
    """f - 3 f^2 at 1/4 is 1/4 of the linear gain f; at 1/8 it is 5/8 of it."""
    step, _ = searched(lambda f: f - 3 * f * f, lambda f: 0.0, accept_ratio=0.25)
    assert step.fraction == 0.25
    step, _ = searched(lambda f: f - 3 * f * f, lambda f: 0.0, accept_ratio=0.26)
    assert step.fraction == 0.125


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_a_number_accepts_nothing(number):
    step, _ = searched(lambda f: 1.0, lambda f: number)
    assert step.fraction == 0.0
    step, _ = searched(lambda f: -number, lambda f: 0.0)
    assert step.fraction == 0.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_kl": 0.0}, "max_kl is 0.0, must be above 0"),
        ({"accept_ratio": 1.0}, "accept_ratio is 1.0, must be in"),
        ({"accept_ratio": -0.1}, "accept_ratio is -0.1, must be in"),
        ({"backtrack_coef": 1.0}, "backtrack_coef is 1.0, must be in"),
        ({"max_steps": 0}, "0 steps, must be at least 1"),
    ],
)
def test_line_search_refuses(setting, message):
    with pytest.raises(ValueError, match=message):
        searched(lambda f: f, lambda f: f, **setting)
