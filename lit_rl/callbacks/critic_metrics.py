"""How well the critic foresees what a response earns."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.evaluation import Statistics, Summary
from lit_rl.types import CriticExperience, CriticOutput, Experience, ScoredRollout, Update

NAMES = ("value", "return", "residual", "value_loss", "clipped")


def explained_variance(residuals: Summary, returns: Summary) -> float:
    """explained_variance = 1 - variance(returns - values) / variance(returns).

    1: the values are the returns, up to a constant. 0: they explain no more than a constant does.
    Below 0: less. NaN where the returns have no variance, or are none.

    Args:
        residuals: of the differences returns - values.
        returns: of the returns, over the same tokens.

    Example:
        >>> from lit_rl.evaluation import Summary
        >>> halves = Summary(num_values=4, total=0.0, std=0.5, minimum=-0.5, maximum=0.5)
        >>> ones = Summary(num_values=4, total=0.0, std=1.0, minimum=-1.0, maximum=1.0)
        >>> explained_variance(halves, ones)
        0.75
    """
    return 1 - (residuals.std / returns.std) ** 2 if returns.std else math.nan


class CriticMetrics(RLCallback):
    """Logs explained variance, values, returns and the value loss, over all ranks.

    Values, returns and the explained variance are those of the critic at the time of the rollout,
    over every response token; the value loss and its clip fraction are over every token of every
    optimizer step. An algorithm without a critic logs nothing.
    """

    def __init__(self) -> None:
        self._statistics: Statistics
        self._has_critic = False

    def on_rollout(
        self, trainer: Trainer, module: Any, scored: ScoredRollout, experience: Experience
    ) -> None:
        """Begin the statistics of an iteration and take in values and returns."""
        self._has_critic = isinstance(experience, CriticExperience)
        if not isinstance(experience, CriticExperience):
            return
        statistics = self._statistics = Statistics(NAMES, experience.mask.device)
        values = experience.old_values[experience.mask].to(statistics.total)
        returns = experience.returns[experience.mask].to(statistics.total)
        statistics.update("value", values)
        statistics.update("return", returns)
        statistics.update("residual", returns - values)

    def on_minibatch(self, trainer: Trainer, module: Any, update: Update) -> None:
        """Take in the tokens of one optimizer step."""
        for experience, output in update.passes:
            if isinstance(output, CriticOutput):
                loss = module.value_loss(output.values, experience)
                clipped = module.value_loss.clipped(output.values, experience)
                self._statistics.update("value_loss", loss[experience.mask])
                self._statistics.update("clipped", clipped[experience.mask])

    def on_iteration_end(self, trainer: Trainer, module: Any) -> None:
        """Reduce over the ranks and log."""
        if self._has_critic:
            values = _metrics(self._statistics.compute())
            module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)


def _metrics(of: Mapping[str, Summary]) -> dict[str, float]:
    return {
        "critic/explained_variance": explained_variance(of["residual"], of["return"]),
        "critic/value_mean": of["value"].mean,
        "critic/return_mean": of["return"].mean,
        "critic/value_loss": of["value_loss"].mean,
        "critic/clip_fraction": of["clipped"].mean,
    }
