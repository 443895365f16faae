"""The steps of a response that a process reward judges, and what a reward gave a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.rewards.failed import Failed


@dataclass(frozen=True)
class Steps:
    """The value of each step of one response, at the token that ends the step.

    Args:
        positions: the last token of each step, by its number among the tokens of the response
            that count, from 0; each greater than the one before. No step: no positions.
        values: one finite number per step.

    Example:
        Two steps of a response of five tokens; the first one ends with its second token:

        >>> Steps(positions=[1, 4], values=[0.2, 0.5])
        Steps(positions=[1, 4], values=[0.2, 0.5])
    """

    positions: Sequence[int]
    values: Sequence[float]


# What a reward may say of one response, see `Reward`.
Value = float | Sequence[float | None] | Steps | Failed | None


@dataclass(frozen=True)
class Scores:
    """What a reward, or one part of it, gave the responses of a rollout.

    Attributes:
        outcomes: what each response earned as a whole; 0 where its steps earned everything, NaN
            where the reward does not apply.
        steps: the value of each step at the token that ends it; NaN where no step ends.
        failures: why judging a response failed, by its row; such a row is NaN in both.
    """

    outcomes: Float[Tensor, " rollouts"]
    steps: Float[Tensor, "rollouts tokens"]
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def totals(self) -> Float[Tensor, " rollouts"]:
        """The outcome and the values of all steps together; NaN where the reward does not apply."""
        return self.outcomes + self.steps.nansum(1)

    def weighted(self, weight: float) -> "Scores":
        """Return the scores times a weight: a step stays a step, whatever the weight."""
        return replace(self, outcomes=weight * self.outcomes, steps=weight * self.steps)


def summed(scores: Sequence[Scores]) -> Scores:
    """Return the sum of what several parts gave; steps that end at the same token add up.

    What does not apply adds nothing; where nothing applies, and where no step ends, it is NaN.
    Where one of the parts failed, so has the sum.

    Args:
        scores: of the same rollout, at least one.
    """
    outcomes = _sum_of_present(torch.stack([part.outcomes for part in scores]))
    steps = _sum_of_present(torch.stack([part.steps for part in scores]))
    failures = {row: reason for part in reversed(scores) for row, reason in part.failures.items()}
    outcomes[list(failures)] = torch.nan
    steps[list(failures)] = torch.nan
    return Scores(outcomes=outcomes, steps=steps, failures=failures)


def _sum_of_present(values: Float[Tensor, "parts ..."]) -> Float[Tensor, "..."]:
    return values.nansum(0).masked_fill(values.isnan().all(0), torch.nan)
