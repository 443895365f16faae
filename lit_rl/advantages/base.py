"""What every advantage estimator is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.types import ScoredRollout, ValuedRollout


class AdvantageEstimator(ABC):
    """From the rewards of a scored rollout to one advantage per response token.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it. Statistics over the batch are taken over all ranks, so every rank calls it.

    Attributes:
        min_group_size: responses per prompt that the estimator needs.
        reads: the stage of the rollout that the estimator needs; an algorithm that does not provide
            it refuses to start.
        sees_final_reward: whether the advantages come from the reward as shaping and a KL in the
            reward leave it; False: from its parts or its steps, as the reward gave them.
    """

    min_group_size: ClassVar[int] = 1
    reads: ClassVar[type[ScoredRollout]] = ScoredRollout
    sees_final_reward: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the advantages: zero where `scored.mask` is False or `scored.missing` is True."""

    def observe(self, scored: ScoredRollout) -> None:
        """Take in a rollout after its advantages are known, once per iteration; default: nothing.

        Only an estimator whose baseline remembers earlier iterations has something to do here.
        """
        return

    def state_dict(self) -> dict[str, float]:
        """Return what `observe` has remembered, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put back what `state_dict` returned."""
        return


class CriticEstimator(AdvantageEstimator):
    """An estimator that reads a critic's values, and says what they should have been.

    `__call__` is given a `ValuedRollout`.
    """

    reads: ClassVar[type[ScoredRollout]] = ValuedRollout

    @abstractmethod
    def returns(self, scored: ValuedRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the targets of the values, in reward units: zero where the mask is False."""


def tokens_that_count(scored: ScoredRollout) -> Bool[Tensor, "rollouts tokens"]:
    """Return the mask without the rollouts that are missing their reward.

    Args:
        scored: the rollouts.
    """
    return scored.mask & ~scored.missing[:, None]
