"""The held-out metrics of a validation, as numbers and as text."""

import math
from collections.abc import Mapping

from lightning.pytorch import Trainer

STANDARD_ERROR = "_standard_error"


def held_out_metrics(trainer: Trainer) -> dict[str, float]:
    """Return what the last validation logged, by name."""
    metrics = trainer.callback_metrics.items()
    return {name: value.item() for name, value in metrics if name.startswith("val/")}


def held_out_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the held-out metrics, without those of their standard errors."""
    names = [name for name in metrics if name.startswith("val/")]
    return [name for name in names if not name.endswith(STANDARD_ERROR)]


def with_standard_error(metrics: Mapping[str, float], name: str) -> str:
    """Return a metric as text, with its standard error where that is known.

    Args:
        metrics: numbers by name; a standard error has the name of its metric and a suffix.
        name: one of them.

    Example:
        >>> with_standard_error({"val/a": 0.5, "val/a_standard_error": 0.02}, "val/a")
        '0.500 ± 0.020'
    """
    value = f"{metrics.get(name, math.nan):.3f}"
    error = metrics.get(name + STANDARD_ERROR)
    return value if error is None else f"{value} ± {error:.3f}"
