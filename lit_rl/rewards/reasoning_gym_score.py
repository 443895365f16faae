"""The score that a data set of reasoning-gym gives an answer."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.on_error import OnError, check_on_error, with_failures
from lit_rl.rewards.steps import Value
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
    made = reasoning_gym.create_dataset(settings["name"], **settings["config"])
    score: Callable[[str, dict[str, Any]], float] = made.score_answer
    return score


@dataclass(frozen=True)
class ReasoningGymScore(Reward):
    """What the scorer of the prompt's own data set says, usually in [0, 1].

    For prompts of `lit_rl.tasks.ReasoningGym`, whose columns `data_set` and `entry` it reads. The
    response is stripped first: some scorers give less for white space. The scorers differ: 1 is a
    right answer, but some give a wrong or empty text 0.01 to 0.05, and a few (such as
    game_of_life_halting) give some wrong texts 1; look at the samples before you trust a curve.
    Some scorers raise on a text that they cannot read (as that of prime_factorization).

    Args:
        on_error: what happens to such a response. `exclude`: it is missing, see `Failed`, and a
            warning says so the first time. `raise`: the run ends with an error that names it.

    Raises:
        ValueError: for another policy.
    """

    on_error: OnError = "exclude"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)

    def values(self, rollout: Rollout) -> list[Value]:
        """Return the score of each response, or that its scorer raised."""
        for column in ("data_set", "entry"):
            if column not in rollout.columns:
                raise ValueError(
                    f"there is no column {column!r} among {sorted(rollout.columns)}; "
                    "lit_rl.tasks.ReasoningGym makes it"
                )
        columns = zip(rollout.columns["data_set"], rollout.columns["entry"], strict=True)
        scores = [
            score(data_set, ast.literal_eval(entry), response)
            for (data_set, entry), response in zip(columns, rollout.responses, strict=True)
        ]
        return with_failures(scores, rollout, self.on_error)


def score(data_set: str, entry: dict[str, Any], response: str) -> float | Failed:
    """Return the score of one response, or with what its scorer raised.

    Args:
        data_set: as in `scorer`.
        entry: what the data set keeps of the question.
        response: the text.
    """
    ask = scorer(data_set)
    try:
        return float(ask(response.strip(), entry))
    except Exception as error:
        return Failed(f"its scorer raised {type(error).__name__}: {shown(str(error))}")
