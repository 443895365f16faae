"""The score that a data set of reasoning-gym gives an answer."""

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.types import Rollout


@cache
def scorer(data_set: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the scorer of a data set.

    Args:
        data_set: the dict of its `name` and `config`, as a Python literal: some scorers depend on
            the settings that the questions were made with.
    """
    import reasoning_gym

    settings = ast.literal_eval(data_set)
    return reasoning_gym.create_dataset(  # type: ignore[no-any-return]
        settings["name"], **settings["config"]
    ).score_answer


@dataclass(frozen=True)
class ReasoningGymScore(Reward):
    """What the scorer of the prompt's own data set says, usually in [0, 1].

    For prompts of `lit_rl.tasks.ReasoningGym`, whose columns `data_set` and `entry` it reads. The
    response is stripped first: some scorers give less for white space. The scorers differ: 1 is a
    right answer, but some give a wrong or empty text 0.01 to 0.05, and a few (such as
    game_of_life_halting) give some wrong texts 1; look at the samples before you trust a curve.
    Where a scorer raises on a text that it cannot read (as prime_factorization does), the value is
    0 and a warning counts such responses.
    """

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return the score of each response."""
        for column in ("data_set", "entry"):
            if column not in rollout.columns:
                raise ValueError(
                    f"there is no column {column!r} among {sorted(rollout.columns)}; "
                    "lit_rl.tasks.ReasoningGym makes it"
                )
        scores: list[float | None] = []
        errors: dict[int, Exception] = {}
        columns = zip(rollout.columns["data_set"], rollout.columns["entry"], strict=True)
        for row, (data_set, text) in enumerate(columns):
            score, entry = scorer(data_set), ast.literal_eval(text)
            try:
                scores.append(float(score(rollout.responses[row].strip(), entry)))
            except Exception as error:
                errors[row] = error
                scores.append(0.0)
        if errors:
            row, first = next(iter(errors.items()))
            warnings.warn(
                f"the scorer raised on {len(errors)} of {len(scores)} responses, which count as 0; "
                f"the first is row {row}, {shown(rollout.responses[row])} "
                f"({type(first).__name__}: {first})",
                stacklevel=2,
            )
        return scores
