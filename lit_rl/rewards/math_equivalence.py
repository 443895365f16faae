"""1 for a text whose mathematics equals the reference's."""

import importlib.util
import logging
import sys
from dataclasses import dataclass
from functools import cached_property

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.in_workers import InWorkers
from lit_rl.rewards.on_error import OnError
from lit_rl.rewards.steps import Value
from lit_rl.types import Rollout

MARKS = ("$", r"\boxed", r"\(", r"\[")
EQUAL, DIFFERENT, UNREADABLE_ANSWER = 1.0, 0.0, -1.0
MEMORY_LIMIT_MIB = 1024 if sys.platform == "linux" else None


def verdict(answer: str, response: str) -> float:
    """Compare a response with a reference answer.

    Args:
        answer: one expression; one without a mark of LaTeX mathematics is read as LaTeX.
        response: a text that holds numbers, or LaTeX between marks.

    Returns:
        `EQUAL`; `DIFFERENT`, also for a response without an expression; or `UNREADABLE_ANSWER`.
    """
    from math_verify import parse, verify

    marked = answer if any(mark in answer for mark in MARKS) else f"${answer}$"
    expected = parse(marked, fallback_mode="no_fallback", parsing_timeout=None)
    if not expected:
        return UNREADABLE_ANSWER
    given = parse(response, fallback_mode="no_fallback", parsing_timeout=None)
    equal = verify(expected, given, timeout_seconds=None, raise_on_error=True)
    return EQUAL if equal else DIFFERENT


class MathVerdict(Reward):
    """`verdict` of each response, None where there is no answer.

    To be asked in a worker: a model can write `$10^{10^{10}}$`, which keeps sympy busy in code that
    no signal interrupts.
    """

    def setup(self) -> None:
        """Load sympy, and keep math-verify from logging what it cannot read."""
        logging.disable()
        verdict("1", "1")

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return the verdicts."""
        pairs = zip(rollout.responses, rollout.answers, strict=True)
        return [verdict(answer, r) if answer.strip() else None for r, answer in pairs]


@dataclass(frozen=True)
class MathEquivalence(Reward):
    r"""1 where the response states what is mathematically equal to the reference, else 0.

    math-verify decides, in a worker process, so that the reward works in any thread and no response
    can stop a run. The response marks mathematics as LaTeX (`$...$`, `\boxed{...}`); a bare number
    or fraction is found too. A response without an expression gets 0. One that cannot be compared,
    in time or at all, is left out or ends the run, as `on_error` says. The reference answer is one
    expression, in LaTeX (`\frac{1}{2}`, `x^2+1`, `$(1,2)$`); one that cannot be read is an error.
    The reward does not apply to a prompt whose answer is empty.

    Args:
        timeout_seconds: longest time for one response.
        num_workers: processes, on each rank.
        on_error: as in `InWorkers`.

    Raises:
        ValueError: if the time is not positive or there is no worker.
        ImportError: if math-verify is not installed.
    """

    timeout_seconds: float = 5.0
    num_workers: int = 1
    on_error: OnError = "exclude"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathEquivalence needs math-verify: pip install 'lit-rl[reasoning]'")
        _ = self._verdicts

    @cached_property
    def _verdicts(self) -> InWorkers:
        return InWorkers(
            MathVerdict(), self.num_workers, self.timeout_seconds, MEMORY_LIMIT_MIB, self.on_error
        )

    def setup(self) -> None:
        """Start the workers."""
        self._verdicts.setup()

    def teardown(self) -> None:
        """End the workers."""
        self._verdicts.teardown()

    def values(self, rollout: Rollout) -> list[Value]:
        """Return 1, 0, None where there is no answer, or that comparing them failed."""
        verdicts = self._verdicts.values(rollout)
        if UNREADABLE_ANSWER in verdicts:
            answer = rollout.answers[verdicts.index(UNREADABLE_ANSWER)]
            raise ValueError(
                f"math-verify cannot read the reference answer {shown(answer)}; "
                r"it must be one expression, such as \frac{1}{2}"
            )
        return verdicts
