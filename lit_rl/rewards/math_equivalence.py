"""1 for a text whose mathematics equals the reference's."""

import importlib.util
import json
import subprocess
import sys
import warnings
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.types import Rollout


class MathWorker:
    """A process that compares; it is started when needed and ends with this object.

    Args:
        timeout_seconds: longest time for one comparison.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, answer: str, response: str) -> str:
        """Return the verdict, see `math_worker.verdict`; "failed" if the process ended."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([answer, response]), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline().strip()
        if not reply:
            _end(self._process)
            return f"failed: no result within {self.timeout_seconds} s"
        return reply

    def _start(self) -> "subprocess.Popen[str]":
        script = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(self.timeout_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        assert process.stdout is not None
        weakref.finalize(self, _end, process)
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{sys.executable} {script} did not start; see its error above")
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    # Waits, and closes what is open of the pipes.
    process.communicate()


@dataclass(frozen=True)
class MathEquivalence(Reward):
    r"""1 where the response states what is mathematically equal to the reference, else 0.

    math-verify decides, in a process of its own, so that the reward works in any thread and no
    response can stop a run. The response marks mathematics as LaTeX (`$...$`, `\boxed{...}`); a
    bare number or fraction is found too. A response without an expression gets 0. One that cannot
    be compared, in time or at all, gets 0 with a warning that counts it. The reference answer is
    one expression, in LaTeX (`\frac{1}{2}`, `x^2+1`, `$(1,2)$`); one that cannot be read is an
    error. The reward does not apply to a prompt whose answer is empty.

    Args:
        timeout_seconds: longest time for one response.

    Raises:
        ValueError: if the time is not positive.
        ImportError: if math-verify is not installed.
    """

    timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {self.timeout_seconds}, must be above 0, as 5.0")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathEquivalence needs math-verify: pip install 'lit-rl[reasoning]'")

    @cached_property
    def _worker(self) -> MathWorker:
        return MathWorker(self.timeout_seconds)

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return 1, 0, or None where there is no answer."""
        pairs = zip(rollout.responses, rollout.answers, strict=True)
        verdicts = [self._worker(a, response) if a.strip() else None for response, a in pairs]
        if "unreadable answer" in verdicts:
            answer = rollout.answers[verdicts.index("unreadable answer")]
            raise ValueError(
                f"math-verify cannot read the reference answer {shown(answer)}; "
                r"it must be one expression, such as \frac{1}{2}"
            )
        failed = [row for row, v in enumerate(verdicts) if v is not None and v.startswith("failed")]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(verdicts)} responses could not be compared with their "
                f"answers and count as 0; the first is row {failed[0]}, "
                f"{shown(rollout.responses[failed[0]])} ({verdicts[failed[0]]})",
                stacklevel=2,
            )
        return [None if verdict is None else float(verdict == "equal") for verdict in verdicts]
