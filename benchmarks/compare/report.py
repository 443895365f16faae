"""What a comparison found, as numbers and tables."""

import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from compare.clock import STAGES
from compare.workloads import Workload

PACKAGES = ("lit-rl", "torch", "transformers", "lightning")
MEBIBYTE = 2**20
SECONDS = (*STAGES, "iteration", "processor")


@dataclass(frozen=True)
class Pair:
    """One process of each trainer, one after the other.

    Attributes:
        sides: what each process measured, see `StageClock.result`.
        tokens: response tokens of each iteration that counts.
        operations: floating-point operations of its matrix products, by stage.
        operations_per_second: rate of matrix products, measured just before.
        load: processes that wanted to run on this machine in the minute before.
    """

    sides: dict[str, dict[str, Any]]
    tokens: list[int]
    operations: list[dict[str, int]]
    operations_per_second: float
    load: float

    def seconds(self, side: str, stage: str = "iteration") -> float:
        """Return the median over the iterations of a trainer, or of the `floor`."""
        if side == "floor":
            whole = stage == "iteration"
            needed = [sum(s.values()) if whole else s.get(stage, 0) for s in self.operations]
            return median(needed) / self.operations_per_second
        return median(stages[stage] for stages in self.sides[side]["iterations"])

    def ratio(self, stage: str = "iteration") -> float:
        """Return the seconds of TRL over those of lit_rl."""
        return self.seconds("trl", stage) / self.seconds("lit_rl", stage)

    def over_floor(self, side: str) -> float:
        """Return how many times longer than its matrix products an iteration takes."""
        return self.seconds(side) / self.seconds("floor")

    def tokens_per_second(self, side: str, stage: str) -> float:
        """Return the response tokens of an iteration over the seconds of a stage."""
        return median(self.tokens) / self.seconds(side, stage)

    def peak(self, side: str, stage: str | None = None) -> float:
        """Return the largest resident memory in MiB: in a stage, or anywhere."""
        result = self.sides[side]
        number = result["peak_bytes"] if stage is None else result["stage_peak_bytes"][stage]
        return number / MEBIBYTE

    def peak_ratio(self) -> float:
        """Return the peak memory of TRL over that of lit_rl."""
        return self.peak("trl") / self.peak("lit_rl")


@dataclass(frozen=True)
class Comparison:
    """All pairs of a workload, and how they were run.

    Attributes:
        name: the workload's.
        workload: the work.
        command: what was typed.
        threads: threads of each process.
        pairs: in the order in which they ran.
        agreement: loss and gradient norm of each trainer on the fixed rollout; empty for one.
    """

    name: str
    workload: Workload
    command: str
    threads: int
    pairs: list[Pair]
    agreement: dict[str, dict[str, float]]

    @property
    def sides(self) -> list[str]:
        """The trainers, TRL first."""
        return sorted(self.pairs[0].sides, reverse=True)

    @property
    def environment(self) -> dict[str, Any]:
        """Date, machine and versions."""
        return environment(*PACKAGES, *(["trl"] if "trl" in self.sides else []))

    def median(self, value: Callable[..., float], *arguments: Any) -> float:
        """Return the median over the pairs of a method of `Pair`."""
        return median(value(pair, *arguments) for pair in self.pairs)

    def write(self, folder: Path) -> None:
        """Write `compare_trl-NAME.json` with all numbers, and `.md` with the tables."""
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {**self.environment, **asdict(self)}
        file = folder / f"compare_trl-{self.name}"
        file.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
        file.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return the report."""
        where, first = self.environment, self.pairs[0].sides["lit_rl"]
        versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
        loads = ", ".join(f"{pair.load:.1f}" for pair in self.pairs)
        parts = [
            f"# {self.name}",
            f"{self.workload.about}.",
            f"`{self.command}`, {where['date']}. {where['machine']}; {self.threads} threads; "
            f"{versions}. Load of the machine before each pair: {loads}.",
            f"Medians over {len(self.pairs)} pairs of the median of {len(first['iterations'])} "
            f"iterations, behind {self.workload.warm_up} of warm-up.",
            table(["seconds", *SECONDS, "x floor"], self._seconds()),
            table(["", "generated tokens/s", "trained tokens/s", "peak MiB"], self._rates()),
            table(["peak MiB", "set-up", *STAGES], self._peaks()),
            f"Matrix products: {self._products()}.",
        ]
        if self.agreement:
            parts.append(table(["TRL / lit_rl", "median", "min", "max", "pairs"], self._ratios()))
            parts.append(f"On the same rollout: {self._agreement()}.")
        return "\n\n".join(parts) + "\n"

    def _seconds(self) -> Iterable[list[str]]:
        for side in (*self.sides, "floor"):
            stages = [self.median(Pair.seconds, side, stage) for stage in SECONDS]
            over = self.median(Pair.over_floor, side)
            yield [side, *(f"{s:.4g}" if s else "" for s in stages), f"{over:.2f}"]

    def _rates(self) -> Iterable[list[str]]:
        for side in self.sides:
            rates = [
                self.median(Pair.tokens_per_second, side, stage) for stage in ("generate", "update")
            ]
            peak = self.median(Pair.peak, side)
            yield [side, *(f"{rate:,.1f}" for rate in rates), f"{peak:,.0f}"]

    def _peaks(self) -> Iterable[list[str]]:
        for side in self.sides:
            peaks = [self.median(Pair.peak, side, stage) for stage in ("set_up", *STAGES)]
            yield [side, *(f"{peak:,.0f}" for peak in peaks)]

    def _products(self) -> str:
        operations = self.median(lambda pair: median(sum(s.values()) for s in pair.operations))
        rates = ", ".join(f"{pair.operations_per_second / 1e9:.1f}" for pair in self.pairs)
        return f"{operations / 1e9:.2f} GFLOP per iteration; GFLOP/s before each pair: {rates}"

    def _ratios(self) -> Iterable[list[str]]:
        for name, ratios in (
            ("seconds", [pair.ratio() for pair in self.pairs]),
            ("processor seconds", [pair.ratio("processor") for pair in self.pairs]),
            ("peak memory", [pair.peak_ratio() for pair in self.pairs]),
        ):
            numbers = [f"{number:.2f}" for number in (median(ratios), min(ratios), max(ratios))]
            yield [name, *numbers, ", ".join(f"{ratio:.2f}" for ratio in ratios)]

    def _agreement(self) -> str:
        return "; ".join(
            f"{name} {' and '.join(f'{self.agreement[side][name]:.8g}' for side in self.sides)}"
            for name in self.agreement["trl"]
        )


def environment(*packages: str) -> dict[str, Any]:
    """Return date, machine and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(": ")[2] if names else platform.processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {name}, {memory:.0f} GiB, {platform.system()}",
        "versions": {
            "Python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a markdown table with its first column to the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
