"""The history of a run and its picture."""

import csv
import gc

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.image import imread

from lit_rl.callbacks import LearningCurve, RewardMetrics
from lit_rl.callbacks.learning_curve import learning_curve


def test_collects_rewards_and_validations_by_iteration(fit, tiny_module, tmp_path):
    curve = LearningCurve()
    module = tiny_module(accuracies=[0.0, 0.25, 0.75])
    fit(module, RewardMetrics(), curve, iterations=4, num_sanity_val_steps=-1)
    # The two rewards of every iteration are 0 and 1.
    assert curve.rewards == [{"iteration": i, "reward": 0.5} for i in (1, 2, 3, 4)]
    assert [point["iteration"] for point in curve.validations] == [0, 2, 4]
    assert [point["val/greedy_accuracy"] for point in curve.validations] == [0.0, 0.25, 0.75]
    assert imread(tmp_path / "curve.png").ndim == 3


def test_loggers_get_the_validation_before_training_as_iteration_zero(fit, tiny_module, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    module = tiny_module(accuracies=[0.125, 0.25])
    fit(module, LearningCurve(), iterations=2, num_sanity_val_steps=-1, logger=logger)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    accuracies = {
        row["step"]: row["val/greedy_accuracy"] for row in rows if row["val/greedy_accuracy"]
    }
    assert accuracies == {"0": "0.125", "2": "0.25"}
    assert rows[0]["iteration"] == "0.0"


def test_goes_on_after_a_resume(fit, tiny_module, tmp_path):
    first = LearningCurve()
    trainer = fit(tiny_module(), RewardMetrics(), first, iterations=2, num_sanity_val_steps=-1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = LearningCurve()
    fit(
        tiny_module(),
        RewardMetrics(),
        resumed,
        iterations=2,
        max_epochs=2,
        ckpt_path=tmp_path / "run.ckpt",
        num_sanity_val_steps=-1,
    )
    assert [point["iteration"] for point in resumed.rewards] == [1, 2, 3, 4]
    assert [point["iteration"] for point in resumed.validations] == [0, 2, 4]


def test_a_run_without_reward_metrics_has_validations_only(fit, tiny_module):
    curve = LearningCurve()
    fit(tiny_module(), curve, iterations=2)
    assert curve.rewards == []
    assert len(curve.validations) == 1


@pytest.fixture
def figure():
    rewards = [{"iteration": float(i), "reward": float(i % 2)} for i in range(1, 41)]
    validations = [
        {
            "iteration": float(i),
            "val/greedy_accuracy": i / 40,
            "val/greedy_accuracy_standard_error": 0.1,
            "val/pass@4": 1.0,
            "val/reward": 3.0,
        }
        for i in (0, 20, 40)
    ]
    return learning_curve(rewards, validations)


def test_axes_say_what_they_show(figure):
    upper, lower = figure.axes
    assert upper.get_ylabel() == "reward (task units)"
    assert lower.get_ylabel() == "fraction of held-out prompts"
    assert lower.get_xlabel() == "iteration (batches of prompts)"
    labels = [text.get_text() for text in lower.get_legend().get_texts()]
    assert labels == ["greedy accuracy", "pass@4"]


def test_curves_are_the_points(figure):
    upper, lower = figure.axes
    raw, smooth = upper.get_lines()
    assert raw.get_xydata()[:3].tolist() == [[1, 1], [2, 0], [3, 1]]
    # 40 iterations are smoothed over 2; rewards alternate between 0 and 1.
    assert smooth.get_xydata()[0].tolist() == [2, 0.5]
    assert np.ptp(smooth.get_ydata()) == 0
    assert lower.get_lines()[0].get_xydata().tolist() == [[0, 0], [20, 0.5], [40, 1]]


def test_band_is_one_standard_error_on_each_side(figure):
    _, lower = figure.axes
    band = lower.collections[0].get_paths()[0].vertices
    at_20 = band[band[:, 0] == 20][:, 1]
    assert sorted(at_20) == pytest.approx([0.4, 0.6])


def test_a_run_without_points_still_has_a_picture(tmp_path):
    learning_curve([], []).savefig(tmp_path / "empty.png")
    assert imread(tmp_path / "empty.png").ndim == 3


def test_no_picture_stays_in_memory(fit, tiny_module):
    """Not even without the collections that Python runs by itself, now and then."""

    def figures():
        return sum(type(thing) is Figure for thing in gc.get_objects())

    gc.collect()
    before = figures()
    gc.disable()
    try:
        fit(tiny_module(), LearningCurve(), iterations=4)
        assert figures() == before
        assert not gc.isenabled()
    finally:
        gc.enable()
