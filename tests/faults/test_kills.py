"""A run that is killed at any moment goes on as if it had not been."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))

pytestmark = pytest.mark.slow


def test_twenty_kills_change_nothing(run_python):
    """Weights, optimizer, rows of metrics and samples are those of the run left alone."""
    report = run_python(
        ROOT / "benchmarks" / "soak.py",
        *("--iterations", 40, "--kills", 20, "--seconds", 0.5, "--seed", 3),
    )
    assert report["differences"] == []
    assert report["restarts"] == 20
    assert {"rollout", "update", "checkpoint"} <= set(report["killed in"])


def test_a_kill_behind_an_iteration_loses_neither_a_validation_nor_the_export(run_python):
    """Rows of metrics and export are those of the run left alone, of 8 iterations, 4 per epoch.

    In the validation of iteration 3, within an epoch, of 4, at the end of one, and of 8, the last;
    in the export, with a validation due by the last checkpoint, and with none.
    """
    moments = ["validation:1:3", "validation:1:4", "validation:2:4", "export:1:4", "export:1:3"]
    report = run_python(Path(__file__).with_name("ends.py"), *moments)
    assert report == {moment: [] for moment in moments}


def test_every_algorithm_resumes_within_an_epoch(run_python):
    """4 iterations are 2, a kill in the third, and the rest."""
    report = run_python(Path(__file__).with_name("algorithms.py"), *ALGORITHMS)
    assert report == {name: [] for name in ALGORITHMS}
    assert len(ALGORITHMS) >= 17
