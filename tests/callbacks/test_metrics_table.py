"""The table in the documentation knows every metric that is logged."""

import re
from pathlib import Path

from lit_rl.callbacks import CriticMetrics, RatioMetrics, RewardMetrics, StopOnKL, Throughput
from lit_rl.sampler_corrections import TruncatedImportance

OF_THE_ALGORITHM = (
    "iteration",
    "loss",
    "num_updates",
    "skipped_iterations",
    "skipped_updates",
    "grad_norm",
    "critic/grad_norm",
    "learning_rate",
    "critic/learning_rate",
    "kl_coef",
    "entropy_coef",
    "trust_region/",
    "dynamic_sampling/",
    "old_policy_kl",
    "val/",
)
TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows():
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: [cell.strip() for cell in line.split("|")[1:-1]] for line in lines}


def test_every_metric_of_the_callbacks_stands_in_the_table_and_no_other(fit, tiny_module):
    class WithReferenceAndCritic(tiny_module):
        uses_reference = has_critic = True

    callbacks = (RewardMetrics(), RatioMetrics(), CriticMetrics(), StopOnKL(0.1), Throughput())
    module = WithReferenceAndCritic()
    module.sampler_correction = TruncatedImportance("token")
    trainer = fit(module, *callbacks, iterations=1, limit_val_batches=0)
    # The module's own, and the one part of its reward.
    logged = trainer.callback_metrics.keys() - {"step", "iteration", "reward/exact"}
    documented = {name for name in rows() if not name.startswith(OF_THE_ALGORITHM)}
    assert documented - {"reward/<part>"} == logged


def test_every_row_says_unit_numerator_denominator_and_reduction():
    table = rows()
    assert len(table) > 30
    for name, cells in table.items():
        assert len(cells) == 5, name
        assert all(cells), name
        # A fraction has a denominator.
        assert not (re.search("fraction", cells[1]) and cells[3] == "-"), name
