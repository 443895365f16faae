"""Seconds and memory of one iteration of TRL's GRPOTrainer and of lit_rl, on the same work.

    python benchmarks/compare_trl.py short --pairs 5 --iterations 2 --threads 2

Each trainer runs in fresh processes, in turn. The results are written to `benchmarks/results`.
"""

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from compare.fixed_rollout import check_agreement
from compare.floor import Products, iteration_operations, operations_per_second
from compare.process import Job, run_fresh
from compare.report import Comparison, Pair
from compare.workloads import WORKLOADS, planned_lengths, write_model

RESULTS = Path(__file__).parent / "results"


def losses_on_one_rollout(job: Job) -> dict[str, dict[str, float]]:
    """Compare the losses of both trainers, so that their work is known to be the same."""
    few = replace(job.workload, num_prompts=2, group_size=4)
    losses = {
        side: run_fresh(side, replace(job, task="agree", workload=few))
        for side in ("trl", "lit_rl")
    }
    check_agreement(losses["trl"], losses["lit_rl"])
    return losses


def measured_pair(job: Job, sides: list[str], products: Products) -> Pair:
    """Run one process of each trainer, in the given order."""
    load, rate = os.getloadavg()[0], operations_per_second(products)
    results = {}
    for side in sides:
        results[side] = run_fresh(side, job)
        seconds = ", ".join(f"{entry['iteration']:.3g}" for entry in results[side]["iterations"])
        peak = results[side]["peak_bytes"] / 2**20
        print(f"{side}: {seconds} seconds per iteration, {peak:,.0f} MiB", flush=True)
    plan = [
        planned_lengths(job.workload, job.seed, iteration)
        for iteration in range(job.workload.warm_up, job.total_iterations)
    ]
    return Pair(
        sides=results,
        tokens=[sum(lengths) for lengths in plan],
        operations=[iteration_operations(products, job.workload, lengths) for lengths in plan],
        operations_per_second=rate,
        load=load,
    )


def compare(name: str, job: Job, num_pairs: int) -> Comparison:
    """Run all processes of a workload; the trainer that begins alternates."""
    products = Products.of(write_model(job.workload, Path(job.folder)))
    alone = job.workload.algorithm == "PPO"
    agreement = {} if alone else losses_on_one_rollout(job)
    pairs = []
    for number in range(num_pairs):
        sides = ["lit_rl"] if alone else ["trl", "lit_rl"] if number % 2 == 0 else ["lit_rl", "trl"]
        pairs.append(measured_pair(replace(job, seed=number), sides, products))
    return Comparison(
        name=name,
        workload=job.workload,
        command=shlex.join(["python", "benchmarks/compare_trl.py", *sys.argv[1:]]),
        threads=job.threads,
        pairs=pairs,
        agreement=agreement,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--pairs", type=int, default=5, help="processes of each trainer")
    parser.add_argument("--iterations", type=int, default=2, help="of each process, after warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, help="of lit_rl; its default if left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            workload=WORKLOADS[arguments.workload],
            folder=str(Path(folder, "model")),
            iterations=arguments.iterations,
            threads=arguments.threads,
            micro_batch_tokens=arguments.micro_batch_tokens,
        )
        comparison = compare(arguments.workload, job, arguments.pairs)
    comparison.write(arguments.out)
    print(comparison.markdown())


if __name__ == "__main__":
    main()
