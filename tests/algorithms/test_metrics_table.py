"""The table in the documentation knows every metric that an algorithm logs by itself."""

from pathlib import Path

import pytest

from lit_rl.algorithms import DAPO, GRPO, PPO, TRPO, PenalizedTRPO
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {}),
        (PPO, {}),
        (DAPO, {"filter_truncated": False}),
        (TRPO, {}),
        (PenalizedTRPO, {"target_kl": 0.1, "update_epochs": 2}),
    ],
)
def test_every_metric_of_an_algorithm_stands_in_the_table(algorithm, fit, kind, settings):
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    documented = {line.split("`")[1] for line in lines}
    trainer = fit(algorithm(kind, reward=PythonFunction(num_fives), **settings), iterations=1)
    logged = trainer.callback_metrics.keys() - {"step"}
    assert len(logged) > 6
    assert logged <= documented
