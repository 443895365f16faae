"""Trains every algorithm on the embedded task and writes the table of results into the README.

    python benchmarks/results.py                      # every configuration, seed 0
    python benchmarks/results.py ppo grpo --seeds 0 1 2 --print

One run at a time, each a process of its own: `train.py fit --config configs/algorithm/X.yaml`.
"""

import argparse
import csv
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PACKAGES = ("torch", "lightning", "transformers")


@dataclass(frozen=True)
class Result:
    """What one run reached."""

    algorithm: str
    seed: int
    before: dict[str, float]
    after: dict[str, float]
    iterations: int
    samples: int
    seconds: float

    def row(self) -> str:
        """Return the run as a row of the table."""
        cells = [f"[`{self.algorithm}`](configs/algorithm/{self.algorithm}.yaml)", str(self.seed)]
        for metric in ("greedy_accuracy", "sampled_accuracy"):
            name = f"val/{metric}"
            error = self.after[f"{name}_standard_error"]
            cells.append(f"{self.before[name]:.3f}")
            cells.append(f"{self.after[name]:.3f} ± {error:.3f}")
        cells += [str(self.iterations), f"{self.samples:,}", f"{self.seconds:.0f}"]
        return f"| {' | '.join(cells)} |"


def run(algorithm: str, seed: int, arguments: list[str]) -> Result:
    """Train one algorithm in a process of its own and read its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(ROOT / "train.py"), "fit"),
            *("--config", str(ROOT / "configs" / "algorithm" / f"{algorithm}.yaml")),
            *("--seed_everything", str(seed), "--trainer.default_root_dir", folder),
            *arguments,
        ]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-3000:]}")
        (file,) = Path(folder).glob("*/metrics.csv")
        with file.open() as lines:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    validations = [row for row in rows if "val/greedy_accuracy" in row]
    last = [row for row in rows if "total/responses" in row][-1]
    return Result(
        algorithm=algorithm,
        seed=seed,
        before=validations[0],
        after=validations[-1],
        iterations=int(last["iteration"]),
        samples=int(last["total/responses"]),
        seconds=last["total/seconds"],
    )


def table(results: list[Result], command: str) -> str:
    """Return the results as a table, with the command and the versions that gave them."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    header = "| algorithm | seed | greedy before | after | sampled before | after | iterations "
    lines = [
        f"`{command}`, {versions}, Python {platform.python_version()}, on the CPU with one thread:",
        "",
        f"{header}| samples | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(result.row() for result in results),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for and write the table."""
    known = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=", ".join(known))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--print", action="store_true", help="print the table, change no file")
    options, arguments = parser.parse_known_args()
    if unknown := set(options.algorithms) - set(known):
        parser.error(f"no configuration for {sorted(unknown)}; there are {', '.join(known)}")
    runs = [(name, seed) for name in options.algorithms or known for seed in options.seeds]
    results = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(runs))
        for name, seed in runs:
            progress.update(task, description=f"{name}, seed {seed}")
            results.append(run(name, seed, arguments))
            progress.advance(task)
            progress.console.print(results[-1].row(), markup=False, soft_wrap=True)
    text = table(results, "make results")
    if options.print:
        print(text)
        return
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    print(f"written to {README}")


if __name__ == "__main__":
    main()
