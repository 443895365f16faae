"""The course of a learning rate."""

import math
from collections.abc import Callable
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def schedule(
    shape: Shape, *, warmup_steps: int, total_steps: int | None, first_step: int = 0
) -> Callable[[int], float]:
    """Return the factor of the learning rate by optimizer step, for `LambdaLR`.

    With s steps since `first_step`, W of warm-up and T in all (from `first_step` on): s / W up to
    W; then 1 (constant), (T - s) / (T - W) (linear), or half of 1 + cos(pi (s - W) / (T - W))
    (cosine). The factor before `first_step` is that of `first_step`.

    Args:
        shape: the course after the warm-up.
        warmup_steps: steps over which the factor rises from 0.
        total_steps: the step at which `linear` and `cosine` reach 0; None for a run without end.
        first_step: the step at which the course begins.

    Raises:
        ValueError: for a course that falls to 0 at the end of a run without end.

    Example:
        >>> factor = schedule("linear", warmup_steps=2, total_steps=6)
        >>> [factor(step) for step in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if total_steps is None:
        if shape != "constant":
            raise ValueError(
                f"lr_schedule {shape} falls to 0 at the end of the run, and this run has no end. "
                "Set trainer.max_epochs to a number such as 4, or lr_schedule to constant"
            )
        total_steps = 0
    length = max(1, total_steps - first_step - warmup_steps)

    def factor(step: int) -> float:
        passed = max(0, step - first_step)
        if passed < warmup_steps:
            return passed / warmup_steps
        progress = min(1.0, (passed - warmup_steps) / length)
        courses = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }
        return courses[shape]

    return factor
