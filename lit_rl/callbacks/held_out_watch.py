"""Whether a policy gets worse on held-out prompts, whatever the training reward says."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lit_rl.callbacks.held_out import STANDARD_ERROR
from lit_rl.callbacks.metric_history import MetricHistory

ACCURACY = "val/greedy_accuracy"
REWARD = "reward/mean"
STANDARD_ERRORS = 3
"""How many standard errors of the difference a fall has to be."""


class HeldOutWatch:
    """Compares the held-out accuracy of each validation with the best one before it.

    Args:
        max_drop: largest fall below the best; it counts only if it is also three standard errors.
            None: nothing is said.
    """

    def __init__(self, max_drop: float | None) -> None:
        self.max_drop = max_drop
        self.points: list[dict[str, float]] = []

    def message(
        self, iteration: int, metrics: Mapping[str, float], history: MetricHistory
    ) -> str | None:
        """Take in a validation; return what is wrong, or None.

        Args:
            iteration: the finished iterations.
            metrics: what the validation logged.
            history: of the reward of training.
        """
        if self.max_drop is None or ACCURACY not in metrics:
            return None
        rewards = history.last[REWARD][-history.num_first :]
        point = {
            "iteration": float(iteration),
            "accuracy": metrics[ACCURACY],
            "standard_error": metrics.get(ACCURACY + STANDARD_ERROR, 0.0),
            "reward": fmean(rewards) if rewards else math.nan,
        }
        # A second `fit` of one trainer may begin with the validation that ended the first.
        before = [p for p in self.points if p["iteration"] < iteration]
        self.points = [*before, point]
        if not before:
            return None
        best = _best(before)
        drop = best["accuracy"] - point["accuracy"]
        noise = math.hypot(best["standard_error"], point["standard_error"])
        if drop <= max(self.max_drop, STANDARD_ERRORS * noise):
            return None
        return _sentence(best, point)

    def best_iteration(self) -> int:
        """Return the iteration of the best validation before the last one."""
        return int(_best(self.points[:-1])["iteration"])

    def state_dict(self) -> dict[str, Any]:
        """Return the validations so far, for a checkpoint."""
        return {"points": [dict(point) for point in self.points]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the validations of a checkpoint."""
        self.points = [dict(point) for point in state_dict["points"]]


def _best(points: list[dict[str, float]]) -> dict[str, float]:
    return max(points, key=lambda point: point["accuracy"])


def _sentence(best: Mapping[str, float], now: Mapping[str, float]) -> str:
    fall = (
        f"held-out accuracy fell from {best['accuracy']:.3f} after iteration "
        f"{best['iteration']:.0f} to {now['accuracy']:.3f}"
    )
    if now["reward"] < best["reward"]:
        return (
            f"{fall} and the reward of training fell, too: the policy has got worse, as after "
            "steps that are too large; go back to the checkpoint of then with a lower learning rate"
        )
    return (
        f"{fall} while the reward of training did not: the policy exploits the reward or has "
        "learnt the training prompts by heart; look at the samples, check the reward, use more "
        "prompts or a KL to the reference, and keep the best checkpoint by "
        "IterationCheckpoint(monitor='val/greedy_accuracy')"
    )
