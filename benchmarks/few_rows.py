"""Products of few rows with the weights of SmolLM2-135M: x @ W.T against W @ x.T.

    python benchmarks/few_rows.py --threads 2    # about a minute

Sampling multiplies in the second order where there are 2 to 32 rows
(`lit_rl/generation/weights_first.py`). Each weight stands in memory as often as it takes to come
from there, not from a cache, as in a model.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from compare.report import environment, table
from lit_rl.generation.weights_first import weight_first

SHAPES = [(192, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576)]
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
ENTRIES = 30_000_000
"""Of all copies of a weight: 120 MB."""


def states_first(states: Tensor, weight: Tensor) -> Tensor:
    return F.linear(states, weight)


def milliseconds(
    product: Callable[[Tensor, Tensor], Tensor], states: Tensor, weights: list[Tensor]
) -> float:
    """Return those of one product, over all copies of the weight."""
    begin = time.perf_counter()
    for weight in weights:
        product(states, weight)
    return (time.perf_counter() - begin) * 1e3 / len(weights)


@torch.no_grad()
def measured(rows: int, shape: tuple[int, int], repeats: int) -> tuple[float, float]:
    """Return the medians of both orders, which take turns."""
    outputs, inputs = shape
    weights = [torch.randn(shape) for _ in range(max(1, ENTRIES // (outputs * inputs)))]
    states = torch.randn(rows, inputs)
    orders = (states_first, weight_first)
    times = [[milliseconds(o, states, weights) for o in orders] for _ in range(repeats + 1)]
    first, second = (median(column) for column in zip(*times[1:], strict=True))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(environment("torch")["machine"])
    lines = []
    for rows in ROWS:
        times = [measured(rows, shape, options.repeats) for shape in SHAPES]
        cells = [f"{first:.2f} / {second:.2f} = {first / second:.2f}" for first, second in times]
        lines.append([str(rows), *cells])
        print(rows, *cells, sep="  ", flush=True)
    print(table(["rows", *(f"{o} x {i}" for o, i in SHAPES)], lines))


if __name__ == "__main__":
    main()
