"""How the cost of an iteration grows with group size, lengths, vocabulary and model size.

    python benchmarks/scaling.py            # under ten minutes on two cores
    python benchmarks/scaling.py --quick    # smaller points

GRPO on random Llama models; one number is varied at a time. The results are written to
`benchmarks/results`: a figure, a table of the fitted exponents, and all numbers as JSON.
"""

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from transformers.utils.logging import disable_progress_bar

from compare.process import Job, run_here
from compare.report import PACKAGES, environment, table
from compare.workloads import Workload
from lit_rl.models import RandomCausalLM, save_pretrained

RESULTS = Path(__file__).parent / "results"
STAGES = ("generate", "log_probs", "update", "iteration")
CHARACTERS = "0123456789+=\n" + "".join(map(chr, range(0x4E00, 0x9000)))
LAYERS = 4


@dataclass(frozen=True)
class Point:
    """An iteration on two prompts.

    Attributes:
        group_size: responses per prompt.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens of each response.
        vocabulary: tokens that the model knows.
        hidden_size: width of the model.
    """

    group_size: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 32
    vocabulary: int = 4096
    hidden_size: int = 128

    @property
    def layer_parameters(self) -> int:
        """Weights of the layers: four square matrices and three to or from the wide space."""
        return LAYERS * (4 + 3 * 3) * self.hidden_size**2

    def source(self) -> RandomCausalLM:
        heads = self.hidden_size // 32
        config = {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        return RandomCausalLM(config=config, alphabet=CHARACTERS[: self.vocabulary - 3])

    def seconds(self, iterations: int, threads: int) -> dict[str, float]:
        """Return the median seconds of each stage."""
        workload = Workload(
            about="",
            model="random",
            num_prompts=2,
            prompt_tokens=self.prompt_tokens,
            min_new_tokens=self.new_tokens,
            max_new_tokens=self.new_tokens,
            group_size=self.group_size,
        )
        source = self.source()
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(source.model(seed=0), source.tokenizer(), folder)
            job = Job(workload=workload, folder=folder, iterations=iterations, threads=threads)
            measured = run_here("lit_rl", job)["iterations"]
        return {stage: median(entry[stage] for entry in measured) for stage in STAGES}


VARIED = {
    "group_size": (2, 4, 8, 16, 32, 64),
    "prompt_tokens": (32, 64, 128, 256, 512, 1024),
    "new_tokens": (8, 16, 32, 64, 128, 256),
    "vocabulary": (512, 1024, 2048, 4096, 8192, 16384),
    "layer_parameters": (64, 128, 256, 512),  # given as hidden_size
}


def points(name: str, *, quick: bool) -> list[Point]:
    """Return the points of one axis."""
    field = "hidden_size" if name == "layer_parameters" else name
    values = VARIED[name][: 3 if quick else None]
    return [replace(Point(), **{field: value}) for value in values]


LONGER = {"prompt_tokens": (64, 512), "group_size": (2, 8, 32)}
"""What a longer prompt costs is measured for each of these group sizes."""


@dataclass(frozen=True)
class Curve:
    """Seconds of each stage against one number."""

    name: str
    points: list[Point]
    seconds: list[dict[str, float]]

    @property
    def x(self) -> np.ndarray:
        return np.array([getattr(point, self.name) for point in self.points], dtype=float)

    def stage(self, name: str) -> np.ndarray:
        return np.array([entry[name] for entry in self.seconds])

    def power_law(self, stage: str, last: int = 0) -> tuple[float, float]:
        """Return exponent and factor: least squares of the logarithms, of all or the last points.

        What does not depend on the number lowers the exponent, and the less so the larger it is.
        """
        x, seconds = self.x[-last:], self.stage(stage)[-last:]
        exponent, offset = np.polyfit(np.log(x), np.log(seconds), deg=1)
        return float(exponent), float(np.exp(offset))

    def rows(self) -> Iterable[list[str]]:
        for stage in STAGES:
            seconds = self.stage(stage)
            yield [
                f"{self.name} {self.x[0]:,.0f} to {self.x[-1]:,.0f}",
                stage,
                f"{seconds[0]:.3g} to {seconds[-1]:.3g}",
                f"{self.power_law(stage)[0]:.2f}",
                f"{self.power_law(stage, last=3)[0]:.2f}",
            ]


def draw(curves: list[Curve], file: Path) -> None:
    """Draw seconds against each number, with the power laws of the last three points."""
    figure = Figure(figsize=(16, 3.6), layout="constrained")
    engineering = EngFormatter(places=0, sep="")
    axes = figure.subplots(1, len(curves), sharey=True)
    for axis, curve in zip(axes, curves, strict=True):
        for stage in STAGES:
            exponent, factor = curve.power_law(stage, last=3)
            (line,) = axis.plot(curve.x, curve.stage(stage), "o", label=f"{stage}: {exponent:.2f}")
            axis.plot(curve.x[-3:], factor * curve.x[-3:] ** exponent, color=line.get_color())
        axis.set(xscale="log", yscale="log", xlabel=curve.name.replace("_", " "))
        axis.set_xticks(curve.x, [engineering(x) for x in curve.x])
        axis.minorticks_off()
        axis.legend(title="exponent", fontsize="small")
    axes[0].set_ylabel("seconds")
    figure.savefig(file, dpi=110)


Longer = dict[int, list[dict[str, float]]]


def longer_rows(longer: Longer) -> Iterable[list[str]]:
    for group_size, (short, long) in longer.items():
        yield [str(group_size), *(f"{long[stage] - short[stage]:.3g}" for stage in STAGES)]


def write(curves: list[Curve], longer: Longer, command: str, threads: int, folder: Path) -> None:
    """Write `scaling.json`, `scaling.md` and `scaling.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    where = environment(*PACKAGES)
    numbers = {c.name: list(zip(c.x.tolist(), c.seconds, strict=True)) for c in curves}
    everything = {
        **where,
        "command": command,
        "threads": threads,
        "seconds": numbers,
        "seconds_by_group_size_of_a_short_and_a_long_prompt": longer,
    }
    (folder / "scaling.json").write_text(json.dumps(everything, indent=1) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    least, most = LONGER["prompt_tokens"]
    text = [
        "# scaling",
        f"`{command}`, {where['date']}. {where['machine']}; {threads} threads; {versions}. "
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.",
        f"Two prompts and {LAYERS} layers; what is not varied is {Point()}.",
        table(
            ["varied", "stage", "seconds", "exponent", "of the largest three"],
            [row for curve in curves for row in curve.rows()],
        ),
        f"Seconds that prompts of {most} tokens cost more than prompts of {least}:",
        table(["group size", *STAGES], longer_rows(longer)),
        "![seconds against each number](scaling.png)",
    ]
    (folder / "scaling.md").write_text("\n\n".join(text) + "\n")
    draw(curves, folder / "scaling.png")


def quiet() -> None:
    """Leave out what the libraries say of each model and each run."""
    disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three small points of each number")
    parser.add_argument("--iterations", type=int, default=3, help="per point, after one of warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    quiet()
    measure = partial(Point.seconds, iterations=arguments.iterations, threads=arguments.threads)
    curves = []
    for name in VARIED:
        varied = points(name, quick=arguments.quick)
        curves.append(Curve(name, varied, [measure(point) for point in varied]))
        print(name, [f"{seconds:.3g}" for seconds in curves[-1].stage("iteration")], flush=True)
    longer = {
        size: [
            measure(replace(Point(), group_size=size, prompt_tokens=tokens))
            for tokens in LONGER["prompt_tokens"]
        ]
        for size in LONGER["group_size"]
    }
    command = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
    write(curves, longer, command, arguments.threads, arguments.out)
    print((arguments.out / "scaling.md").read_text())


if __name__ == "__main__":
    main()
