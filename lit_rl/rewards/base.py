"""What every reward is: a rollout in, a value per response out."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce

import torch

from lit_rl.rewards.checked_scores import checked_scores, named_failure, shown
from lit_rl.rewards.steps import Scores, Value
from lit_rl.types import Rollout, ScoredRollout, at_last_token


class Reward(ABC):
    """From the texts of a rollout to one value per response. A subclass gives `values`.

    A value is one of these, all numbers finite and in the unit that the task chooses:

    - a number for the response as a whole, an outcome;
    - `Steps`, the numbers of its steps at the tokens that end them (a process reward), or a list
      with one entry per token that counts, the end token included: a number where a step ends, else
      None. The reward of the response is their sum, 0 for a response without a step;
    - None where the reward does not apply;
    - `Failed` where judging the response failed.

    A response to which nothing applies, or on which any part failed, is `missing`: it leaves its
    group, and the first time a warning says so. A wrong number of values and a value that is no
    number are errors that name the reward. A reward that applies to no response on any rank is an
    error of the algorithm that asks it, or a matter of chance once the algorithm has been trained
    with it.
    """

    _warned: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """What logs and errors call this reward: the name of its class, in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    def setup(self) -> None:
        """Get ready: load what `values` needs, and refuse what is not there.

        Called on every rank before models are built and prompts are answered, maybe more than once.
        The default does nothing.
        """
        return

    def check_columns(self, names: Collection[str]) -> None:
        """Refuse data whose columns it cannot read.

        Called on every rank after `setup`, once for the held-out prompts and once for those to
        train on. The default does nothing.

        Args:
            names: the columns of the data set beside `prompt` and `answer`.
        """
        return

    def teardown(self) -> None:
        """End what `setup` has begun, such as processes; called when a run is over.

        Whoever asks for values later begins anew. The default does nothing.
        """
        return

    @property
    def models(self) -> dict[str, str]:
        """Names of the frozen models that judge, each with a hash of its weights; after `setup`.

        A run does not go on from a checkpoint of one with others. The default is none.
        """
        return {}

    @abstractmethod
    def values(self, rollout: Rollout) -> Sequence[Value]:
        """Return one value per response, in their order; True and False count as 1 and 0."""

    def begin(self, rollout: Rollout) -> Callable[[], Sequence[Value]]:
        """Begin to judge a rollout, and return what waits for its values.

        More responses are sampled before it is called, and further rollouts may be begun. A reward
        that judges elsewhere, in other processes or over a network, overrides this, and `values`
        with `return self.begin(rollout)()`. The default begins when it is called.
        """
        return partial(self.values, rollout)

    @property
    def named_parts(self) -> "dict[str, Reward]":
        """What judges, by the name under which it is logged."""
        return {self.name: self}

    def begin_parts(self, rollout: Rollout) -> Callable[[], dict[str, Scores]]:
        """Begin to judge, and return what waits for the named parts before weighting."""
        begun: dict[str, Callable[[], Sequence[Value]]] = {}
        for name, reward in self.named_parts.items():
            with named_failure(name):
                begun[name] = reward.begin(rollout)
        return lambda: {
            name: checked_scores(name, values, rollout) for name, values in begun.items()
        }

    def total(self, parts: dict[str, Scores]) -> Scores:
        """Return the reward that the parts make."""
        return parts[self.name]

    def __call__(self, rollout: Rollout) -> ScoredRollout:
        """Return the rollout with its rewards, float32 on the device of the rollout.

        In `token_rewards` an outcome stands at the last token that counts. In `step_rewards` it
        does not: there are the steps alone that the reward has judged.

        Raises:
            WrongValueError: if the values are not as `Reward` says.
            RuntimeError: if computing them failed; the failure is its cause.
        """
        return self.judging(rollout)()

    def judging(self, rollout: Rollout) -> Callable[[], ScoredRollout]:
        """Begin to judge, and return what waits for the rollout with its rewards, see `__call__`.

        Raises:
            RuntimeError: if the beginning failed; the failure is its cause.
        """
        parts = self.begin_parts(rollout)
        return lambda: self._scored(rollout, parts())

    def _scored(self, rollout: Rollout, parts: dict[str, Scores]) -> ScoredRollout:
        total = self.total(parts)
        missing = total.outcomes.isnan()
        failed = torch.zeros_like(missing)
        failed[list(total.failures)] = True
        if total.failures:
            row = min(total.failures)
            self._warn_once(
                "failed",
                f"the reward {self.name} failed on {len(total.failures)} of {len(rollout)} "
                f"responses, which leave their groups and are counted in reward/errors; the first "
                f"is row {row}, {shown(rollout.responses[row])}: {total.failures[row]}",
            )
        if (inapplicable := missing & ~failed).any():
            row = int(inapplicable.nonzero()[0, 0])
            self._warn_once(
                "inapplicable",
                f"no part of the reward {self.name} applies to {int(inapplicable.sum())} of "
                f"{len(rollout)} responses, which leave their groups; the first is row {row}, "
                f"{shown(rollout.responses[row])}",
            )
        outcomes = total.outcomes.masked_fill(missing, 0.0)
        earned = total.steps.masked_fill(total.steps.isnan(), 0.0)
        return rollout.extended(
            ScoredRollout,
            rewards=outcomes + earned.sum(1),
            token_rewards=earned + at_last_token(outcomes, rollout.mask),
            step_rewards=total.steps,
            reward_parts={
                name: part.totals.masked_fill(failed, torch.nan) for name, part in parts.items()
            },
            missing=missing,
            failed=failed,
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            # A reward may be a frozen dataclass.
            object.__setattr__(self, "_warned", self._warned | {about})
            warnings.warn(message, stacklevel=3)


Judging = Callable[[], ScoredRollout]
"""Waits for a rollout with its rewards, see `Reward.judging`."""


def judged(parts: Sequence[Judging]) -> ScoredRollout:
    """Wait for the parts of a rollout, one at least, and return them as one."""
    return reduce(ScoredRollout.followed_by, (wait() for wait in parts))


def no_response(reward: Reward) -> str:
    """Return what is wrong with a reward whose values are None for every response."""
    return (
        f"the reward {reward.name} applied to no response: all its values are None, or judging "
        "failed; a response that it covers needs a number, such as 0.0"
    )
