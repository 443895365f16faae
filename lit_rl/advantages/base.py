"""What every advantage estimator is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from lit_rl.types import ScoredRollout


class AdvantageEstimator(ABC):
    """From the rewards of a scored rollout to one advantage per response token.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it.

    Attributes:
        min_group_size: responses per prompt that the estimator needs.
    """

    min_group_size: ClassVar[int] = 1

    @abstractmethod
    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the advantages: zero where `scored.mask` is False or `scored.missing` is True."""
