"""Time and memory of log-probs and entropy in chunks against those of the full log-softmax."""

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lit_rl.functional import token_log_probs_and_entropy

HIDDEN_BY_VOCAB = {14: 64, 49152: 576, 151936: 896}
"""Heads of the embedded model, of SmolLM2-135M and of Qwen2.5-0.5B."""

TEMPERATURE = 0.9
MIN_SECONDS = 1.0
"""Small heads are timed more often than asked for, until this much time has passed."""


@dataclass(frozen=True)
class Problem:
    """A head with random weights, and states of tokens that all count."""

    head: nn.Linear
    hidden: Tensor
    targets: Tensor

    @staticmethod
    def of(vocab: int, tokens: int) -> "Problem":
        torch.manual_seed(0)
        hidden = HIDDEN_BY_VOCAB[vocab]
        return Problem(
            head=nn.Linear(hidden, vocab, bias=False),
            hidden=torch.randn(1, tokens, hidden, requires_grad=True),
            targets=torch.randint(vocab, (1, tokens)),
        )


def full(problem: Problem) -> tuple[Tensor, Tensor]:
    log_probs = (problem.head(problem.hidden) / TEMPERATURE).log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, problem.targets[..., None]).squeeze(-1), entropy


def chunked(problem: Problem) -> tuple[Tensor, Tensor]:
    return token_log_probs_and_entropy(
        problem.hidden,
        problem.head,
        problem.targets,
        mask=torch.ones_like(problem.targets, dtype=torch.bool),
        temperature=TEMPERATURE,
    )


IMPLEMENTATIONS: dict[str, Callable[[Problem], tuple[Tensor, Tensor]]] = {
    "full": full,
    "chunked": chunked,
}


def forward_backward(name: str, problem: Problem) -> list[Tensor]:
    """Return values and gradients of one implementation, with another weight on each output."""
    outputs = IMPLEMENTATIONS[name](problem)
    weights = torch.linspace(-1.0, 1.0, 2 * problem.targets.numel()).view(2, 1, -1)
    inputs = [problem.hidden, problem.head.weight]
    gradients = torch.autograd.grad(outputs, inputs, list(weights))
    return [*(output.detach() for output in outputs), *gradients]


def check_equal(problem: Problem) -> None:
    """Compare no speed of different results: they agree within 1e-5 of their largest entry."""
    expected, actual = (forward_backward(name, problem) for name in IMPLEMENTATIONS)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * float(one.abs().max()))


def milliseconds(problem: Problem, repeats: int) -> dict[str, float]:
    """Return the median processor time of forward and backward; the implementations take turns."""
    check_equal(problem)
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    begin = process_time()
    while len(times["chunked"]) < repeats or process_time() - begin < MIN_SECONDS:
        for name, measured in times.items():
            start = process_time()
            forward_backward(name, problem)
            measured.append(process_time() - start)
    return {name: 1000 * median(measured) for name, measured in times.items()}


def peak_mebibytes() -> float:
    # In bytes on a Mac, in KiB on Linux.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def added_mebibytes(name: str, vocab: int, tokens: int) -> int:
    """Return by how much forward and backward raise the peak memory of this process."""
    # What the libraries set up at the first use is no memory of the implementation.
    forward_backward(name, Problem.of(vocab=14, tokens=1024))
    problem = Problem.of(vocab, tokens)
    before = peak_mebibytes()
    forward_backward(name, problem)
    return round(peak_mebibytes() - before)


def memory(vocab: int, tokens: int) -> dict[str, int]:
    """Return the added memory of each implementation in a fresh process of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {
            name: pool.apply(added_mebibytes, (name, vocab, tokens)) for name in IMPLEMENTATIONS
        }


def cells(measured: Mapping[str, float], form: str) -> list[str]:
    full, chunked = measured["full"], measured["chunked"]
    return [f"{full:{form}}", f"{chunked:{form}}", f"{chunked / full:.2f}" if full else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=768, help="response tokens of the batch")
    parser.add_argument("--repeats", type=int, default=3, help="runs that the median is taken of")
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", choices=HIDDEN_BY_VOCAB, default=[14, 49152]
    )
    arguments = parser.parse_args()
    # A process begins with the peak of the one that starts it: memory first, while this one is
    # small.
    added = {vocab: memory(vocab, arguments.tokens) for vocab in arguments.vocabularies}
    table = Table(title=f"{arguments.tokens} tokens, forward and backward, float32, processor time")
    for column in ("head", "full ms", "chunked ms", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("full MiB", "chunked MiB", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for vocab in arguments.vocabularies:
        times = milliseconds(Problem.of(vocab, arguments.tokens), arguments.repeats)
        sizes = f"{vocab} x {HIDDEN_BY_VOCAB[vocab]}"
        table.add_row(sizes, *cells(times, ".1f"), *cells(added[vocab], "d"))
    Console().print(table)


if __name__ == "__main__":
    main()
