"""What every reward is: a rollout in, one number per response out."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.types import Rollout, ScoredRollout, at_last_token

_LARGEST = torch.finfo(torch.float32).max


class Reward(ABC):
    """From the texts of a rollout to one number per response. A subclass gives `values`.

    A value is a finite number, in the unit that the task chooses, or None where the reward does
    not apply to the response. A response to which nothing applies is `missing`: it leaves its
    group. A wrong number of values and a value that is no number are errors that name the reward.
    A reward that applies to no response on any rank is an error of the algorithm that asks it.
    """

    @property
    def name(self) -> str:
        """What logs and errors call this reward: the name of its class, in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def values(self, rollout: Rollout) -> Sequence[float | None]:
        """Return one value per response, in their order; True and False count as 1 and 0."""

    def parts(self, rollout: Rollout) -> dict[str, Float[Tensor, " rollouts"]]:
        """Return the named parts before weighting; NaN where a part does not apply."""
        return {self.name: checked_values(self.name, self, rollout)}

    def total(self, parts: dict[str, Float[Tensor, " rollouts"]]) -> Float[Tensor, " rollouts"]:
        """Return the reward that the parts make; NaN where none of them applies."""
        return parts[self.name]

    def __call__(self, rollout: Rollout) -> ScoredRollout:
        """Return the rollout with its rewards, float32 on the device of the rollout.

        Raises:
            ValueError: if the values are not one number or None per response.
            RuntimeError: if computing them failed; the failure is its cause.
        """
        parts = self.parts(rollout)
        total = self.total(parts)
        missing = total.isnan()
        if missing.any():
            row = int(missing.nonzero()[0, 0])
            warnings.warn(
                f"no part of the reward {self.name} applies to {int(missing.sum())} of "
                f"{len(rollout)} responses, which leave their groups; the first is row {row}, "
                f"{shown(rollout.responses[row])}",
                stacklevel=2,
            )
        rewards = total.masked_fill(missing, 0.0)
        return rollout.extended(
            ScoredRollout,
            rewards=rewards,
            token_rewards=at_last_token(rewards, rollout.mask),
            step_rewards=torch.full(rollout.mask.shape, torch.nan, device=rollout.mask.device),
            reward_parts=parts,
            missing=missing,
        )


def checked_values(name: str, reward: Reward, rollout: Rollout) -> Float[Tensor, " rollouts"]:
    """Return the values of a reward as a tensor; NaN where it does not apply.

    Args:
        name: what errors call the reward.
        reward: gives the values.
        rollout: what it is asked about.

    Raises:
        ValueError: if the values are not one finite number or None per response.
        RuntimeError: if the reward raises; its exception is the cause.
    """
    try:
        values: Any = reward.values(rollout)
    except Exception as error:
        raise RuntimeError(f"the reward {name} raised {type(error).__name__}: {error}") from error
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or len(values) != len(rollout):
        got = f"{len(values)} values" if isinstance(values, Sequence) else shown(values)
        raise ValueError(
            f"the reward {name} must give {len(rollout)} values, one per response, in a list; "
            f"got {got}"
        )
    numbers = [_number(name, value, rollout, row) for row, value in enumerate(values)]
    return torch.tensor(numbers, dtype=torch.float32, device=rollout.mask.device)


def _number(name: str, value: Any, rollout: Rollout, row: int) -> float:
    if value is None:
        return float("nan")
    # False for NaN, for infinity, and for what float32 cannot hold.
    if isinstance(value, Real) and abs(value) <= _LARGEST:  # type: ignore[operator]
        return float(value)
    raise ValueError(
        f"the reward {name} gave {shown(value)} for row {row}, whose response is "
        f"{shown(rollout.responses[row])}; a value is a finite number such as 0.0, or None where "
        "the reward does not apply"
    )


def no_response(reward: Reward) -> str:
    """Return what is wrong with a reward whose values are None for every response."""
    return (
        f"the reward {reward.name} applied to no response: all its values are None; a response "
        "that it covers needs a number, such as 0.0"
    )


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
