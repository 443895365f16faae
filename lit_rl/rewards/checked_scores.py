"""From what a reward returns to tensors; whatever is wrong with it is named here."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_rl.rewards.failed import Failed
from lit_rl.rewards.steps import Scores, Steps
from lit_rl.types import Rollout

_LARGEST = torch.finfo(torch.float32).max


class WrongValueError(ValueError):
    """A reward gave what is no reward; the message says what it gave, and what would be one."""


@contextmanager
def named_failure(name: str) -> Iterator[None]:
    """Say whose exception it is.

    Raises:
        RuntimeError: in the place of any exception, which is its cause.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"the reward {name} raised {type(error).__name__}: {error}") from error


def checked_scores(name: str, values: Callable[[], Any], rollout: Rollout) -> Scores:
    """Return what a reward gives a rollout, float32 on the device of the rollout.

    Args:
        name: what errors call the reward.
        values: gives one value per response, see `Reward`.
        rollout: what the reward is asked about.

    Raises:
        WrongValueError: if it does not give one value per response, each of them finite numbers at
            tokens that the response has.
        RuntimeError: if it raises; its exception is the cause.
    """
    with named_failure(name):
        given = plain(values())
    if not isinstance(given, Sequence) or len(given) != len(rollout):
        got = f"{len(given)} values" if isinstance(given, Sequence) else shown(given)
        raise WrongValueError(
            f"the reward {name} must give {len(rollout)} values, one per response, in a list; "
            f"got {got}"
        )
    mask = rollout.mask.cpu()
    outcomes = [0.0] * len(rollout)
    steps = torch.full(mask.shape, torch.nan)
    failures: dict[int, str] = {}
    lengths = mask.sum(1).tolist()
    for row, value in enumerate(map(plain, given)):
        try:
            checked = checked_value(value, lengths[row])
        except ValueError as error:
            raise WrongValueError(
                f"the reward {name} gave {shown(value)} for row {row}, whose response is "
                f"{shown(rollout.responses[row])}; {error}"
            ) from None
        if isinstance(checked, dict):
            columns = mask[row].nonzero()[:, 0]
            steps[row, columns[list(checked)]] = torch.tensor(list(checked.values()))
        elif isinstance(checked, Failed):
            outcomes[row], failures[row] = math.nan, checked.reason
        else:
            outcomes[row] = math.nan if checked is None else checked
    device = rollout.mask.device
    totals = torch.tensor(outcomes, dtype=torch.float32, device=device)
    return Scores(outcomes=totals, steps=steps.to(device), failures=failures)


def checked_value(value: Any, length: int) -> float | dict[int, float] | Failed | None:
    """Return what a reward gave one response: an outcome, or the values of its steps by position.

    Args:
        value: what it gave.
        length: tokens of the response.

    Raises:
        ValueError: if it is none of what `Reward` says; the message tells what would be.
    """
    if value is None or isinstance(value, Failed):
        return value
    if isinstance(value, Steps | list | tuple):
        return _by_position(value, length)
    return _number(value)


def plain(value: Any) -> Any:
    """Return an array or tensor as numbers in lists, and anything else as it is."""
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


def _number(value: Any) -> float:
    if not _is_finite(value):
        raise ValueError(
            "a value is a finite number such as 0.0, None where the reward does not apply, a list "
            "with a number or None per token, or Steps(positions=[3, 7], values=[0.5, 1.0])"
        )
    return float(value)


def _is_finite(value: Any) -> bool:
    # False for NaN, for infinity, and for what float32 cannot hold. `Real` has no <= for types.
    return isinstance(value, Real) and bool(abs(value) <= _LARGEST)  # type: ignore[operator]


def _by_position(value: Any, length: int) -> dict[int, float]:
    """Return the values of the steps of one response by position.

    Args:
        value: what the reward gave.
        length: tokens of the response.
    """
    if isinstance(value, Steps):
        positions, values = plain(value.positions), plain(value.values)
        _check_positions(positions, values, length)
    else:
        if len(value) != length:
            raise ValueError(
                f"a list has one number, or None, for each token of the response, which are "
                f"{length}, not {len(value)}; steps alone are given as {_example(length)}"
            )
        positions = [position for position, entry in enumerate(value) if entry is not None]
        values = [value[position] for position in positions]
    for position, entry in zip(positions, values, strict=True):
        if not _is_finite(entry):
            raise ValueError(
                f"the value at position {position} is {shown(entry)}, not a finite number "
                "such as 0.5"
            )
    return dict(zip(map(int, positions), map(float, values), strict=True))


def _check_positions(positions: Any, values: Any, length: int) -> None:
    for given in (positions, values):
        if not isinstance(given, Sequence):
            raise ValueError(f"{shown(given)} of Steps is no list, such as {_example(length)}")
    if len(positions) != len(values):
        raise ValueError(
            f"there are {len(positions)} positions and {len(values)} values, and must be as many "
            f"of both, such as {_example(length)}"
        )
    before = -1
    for position in positions:
        whole = isinstance(position, Integral) and not isinstance(position, bool)
        if not whole or not before < position < length:
            raise ValueError(
                f"position {shown(position)} is wrong: positions are numbers of tokens, each "
                f"greater than the one before, from 0 and below the {length} tokens of the "
                f"response, such as {_example(length)}"
            )
        before = position


def _example(length: int) -> str:
    return repr(Steps([length - 1], [0.5]) if length else Steps([], []))


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
