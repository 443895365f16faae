"""The numerical parts of a step in a trust region: direction, length, line search."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradient(
    product: Product,
    target: Float[Tensor, " weights"],
    *,
    iterations: int,
    tolerance: float,
) -> Float[Tensor, " weights"]:
    """Solve product(x) = target for x, with a matrix that is known by its products alone.

    The method of Hestenes and Stiefel from x = 0: k iterations minimise x^T M x / 2 - target^T x
    over the span of target, M target, ..., M^(k-1) target. TRPO, arXiv:1502.05477, appendix C.

    It ends early where the residual is small enough, and where a direction d has d^T M d <= 0,
    which rounding makes possible. A target of 0 gives 0.

    Args:
        product: M times a vector; M symmetric, and positive definite on the span above.
        target: the right-hand side.
        iterations: the most products that are taken, at least 1.
        tolerance: length of the residual, relative to that of `target`, at which x is good enough.

    Returns:
        x, in the unit of `target` over that of M.

    Raises:
        ValueError: for less than one iteration or a negative tolerance.

    Example:
        >>> matrix, target = torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
        >>> conjugate_gradient(lambda x: matrix @ x, target, iterations=2, tolerance=0.0)
        tensor([0.0909, 0.6364])
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}, must be at least 1, usually 10")
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}, must be at least 0, for example 1e-5")
    solution, residual, direction = torch.zeros_like(target), target, target
    square = residual @ residual
    enough = tolerance**2 * square
    for _ in range(iterations):
        if square <= enough:
            break
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:
            break
        length = square / curvature
        solution = solution + length * direction
        residual = residual - length * image
        previous, square = square, residual @ residual
        direction = residual + square / previous * direction
    return solution


def longest_step(
    direction: Float[Tensor, " weights"], image: Float[Tensor, " weights"], *, max_kl: float
) -> Float[Tensor, " weights"]:
    """Sqrt(2 * max_kl / direction^T F direction) * direction: its quadratic KL is max_kl.

    KL(old || new) of a step s is s^T F s / 2, with F the Fisher information, up to the third power
    of s. TRPO, arXiv:1502.05477, appendix C.

    A direction along which F has no curvature, such as 0, gives 0.

    Args:
        direction: any vector of weights.
        image: F times the direction, without damping.
        max_kl: the size of the trust region, in nats per token, above 0.

    Returns:
        The step, in the unit of the weights.

    Example:
        >>> fisher, direction = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 0.0])
        >>> longest_step(direction, fisher @ direction, max_kl=0.01)
        tensor([0.1000, 0.0000])
    """
    curvature = direction @ image
    if not curvature > 0:
        return torch.zeros_like(direction)
    return (2 * max_kl / curvature).sqrt() * direction


class LineSearchStep(NamedTuple):
    """The step that a line search has accepted.

    Attributes:
        fraction: the accepted fraction of the full step; 0: none was accepted.
        improvement: by how much the objective rose, in its unit.
        kl: KL(old || new) of the step, in nats per token.
    """

    fraction: float
    improvement: float
    kl: float


def backtracking_line_search(
    measure: Callable[[float], tuple[float, float]],
    *,
    expected_improvement: float,
    max_kl: float,
    accept_ratio: float,
    backtrack_coef: float,
    max_steps: int,
) -> LineSearchStep:
    """Return the longest of the steps 1, b, b^2, ... that improves within the trust region.

    A fraction f is accepted if improvement > 0, improvement >= accept_ratio * f *
    expected_improvement, and kl <= max_kl. TRPO, arXiv:1502.05477, appendix C, asks for the first
    and the last; the ratio is that of its authors' code, where it is 0.1.

    A measure that is NaN accepts nothing.

    Args:
        measure: takes the fraction of the full step; returns how much the objective rises, in its
            unit, and KL(old || new), in nats per token.
        expected_improvement: what the full step would gain if the objective were linear.
        max_kl: the size of the trust region, in nats per token, above 0.
        accept_ratio: the least share of the linear gain that is accepted, in [0, 1).
        backtrack_coef: b, in (0, 1).
        max_steps: the number of fractions that are tried, at least 1.

    Returns:
        The step; fraction 0, improvement 0 and KL 0 if no fraction is accepted.

    Raises:
        ValueError: for an argument outside its range.

    Example:
        >>> backtracking_line_search(  # a step of 1 goes too far
        ...     lambda fraction: (fraction - fraction**2, 0.04 * fraction**2),
        ...     expected_improvement=1.0, max_kl=0.01, accept_ratio=0.1, backtrack_coef=0.5,
        ...     max_steps=10,
        ... )
        LineSearchStep(fraction=0.5, improvement=0.25, kl=0.01)
    """
    check_line_search(max_kl, accept_ratio, backtrack_coef, max_steps)
    fraction = 1.0
    for _ in range(max_steps):
        improvement, kl = measure(fraction)
        enough = improvement >= accept_ratio * fraction * expected_improvement
        if improvement > 0 and enough and kl <= max_kl:
            return LineSearchStep(fraction, improvement, kl)
        fraction *= backtrack_coef
    return LineSearchStep(0.0, 0.0, 0.0)


def check_line_search(
    max_kl: float, accept_ratio: float, backtrack_coef: float, max_steps: int
) -> None:
    """Raise a ValueError for an argument of `backtracking_line_search` outside its range."""
    if not max_kl > 0:
        raise ValueError(f"max_kl is {max_kl}, must be above 0 nats per token, for example 0.01")
    if not 0 <= accept_ratio < 1:
        raise ValueError(f"accept_ratio is {accept_ratio}, must be in [0, 1), for example 0.1")
    if not 0 < backtrack_coef < 1:
        raise ValueError(f"backtrack_coef is {backtrack_coef}, must be in (0, 1), for example 0.5")
    if max_steps < 1:
        raise ValueError(f"the line search has {max_steps} steps, must be at least 1, usually 10")
