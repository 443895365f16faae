"""Where the time and the peak memory of an iteration go."""

import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

STAGES = ("generate", "score", "log_probs", "update", "rest")


def _peak_since_last_call() -> int:
    # ru_maxrss would begin with the peak of the process that started this one.
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return int(lines["VmHWM"].split()[0]) * 1024


class StageClock:
    """Adds up the seconds of each stage of an iteration, and keeps the peak memory of each.

    Time that belongs to no stage is `rest`. An iteration lasts from the end of the one before to
    its own end, so the data are part of it.

    Attributes:
        iterations: seconds by stage, `iteration` for the whole, and `processor`, the time that the
            processors worked for this process, all threads together.
        peaks: largest resident memory of this process within each stage of any iteration, and
            before the first (`set_up`), in bytes; not on Linux: the peak up to then.
    """

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self.peaks: dict[str, int] = defaultdict(int, set_up=_peak_since_last_call())
        self._stage = "rest"
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._begin = perf_counter()
        self._processor = process_time()

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
        processor, self._processor = process_time() - self._processor, process_time()
        self.iterations.append({**self._seconds, "iteration": whole, "processor": processor})
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def result(self, warm_up: int) -> dict[str, object]:
        """Return what was measured, without the iterations of the warm-up."""
        return {
            "iterations": self.iterations[warm_up:],
            "warm_up": self.iterations[:warm_up],
            "stage_peak_bytes": dict(self.peaks),
            "peak_bytes": max(self.peaks.values()),
        }
