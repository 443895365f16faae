"""Where the time and the peak memory of an iteration go."""

import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

STAGES = ("generate", "score", "log_probs", "update", "rest")
LINUX = sys.platform == "linux"


def memory_bytes(name: str) -> int:
    """Return a number that Linux keeps of this process: `VmRSS`, or its peak, `VmHWM`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def _peak_since_last_call() -> int:
    # The peak of a fresh program: ru_maxrss would begin with that of the process that started it.
    if not LINUX:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac
    peak = memory_bytes("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return peak


class StageClock:
    """Adds up the seconds of each stage of an iteration, and keeps the peak memory of each.

    Time that belongs to no stage is `rest`. An iteration lasts from the end of the one before to
    its own end, so the data are part of it.

    Attributes:
        iterations: seconds by stage, and `iteration` for the whole.
        peaks: largest resident memory within each stage of any iteration, in bytes; on systems
            other than Linux the peak up to then.
        start_bytes: resident memory when the first iteration began.
    """

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self.peaks: dict[str, int] = defaultdict(int)
        self.start_bytes = memory_bytes("VmRSS") if LINUX else 0
        self._stage = "rest"
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._begin = perf_counter()

    def switch(self, stage: str) -> str:
        """Begin a stage and return the one that it ends."""
        now = perf_counter()
        ended, self._stage = self._stage, stage
        self._seconds[ended] += now - self._begin
        self._begin = now
        self.peaks[ended] = max(self.peaks[ended], _peak_since_last_call())
        return ended

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a block as a stage; the one before goes on behind it."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def end_iteration(self) -> None:
        """Close an iteration; the next one begins."""
        self.switch("rest")
        whole = sum(self._seconds.values())
        self.iterations.append({**self._seconds, "iteration": whole})
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def result(self, warm_up: int) -> dict[str, object]:
        """Return what was measured, without the iterations of the warm-up."""
        return {
            "iterations": self.iterations[warm_up:],
            "warm_up": self.iterations[:warm_up],
            "start_bytes": self.start_bytes,
            "stage_peak_bytes": dict(self.peaks),
            "peak_bytes": max(self.peaks.values()),
        }
