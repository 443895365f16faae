"""Where the old log-probs of the ratio come from: three choices."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from lit_rl.types import ScoredRollout


class OldLogProbs(ABC):
    """Gives the log-probs of a rollout under the policy before its updates.

    Attributes:
        single_update: whether the choice is right for one update per rollout only.
        from_sampler: whether the log-probs are those that the generator reported.
    """

    single_update: ClassVar[bool] = False
    from_sampler: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, scored: ScoredRollout, recomputed: Callable[[], Float[Tensor, "rollouts tokens"]]
    ) -> Float[Tensor, "rollouts tokens"] | None:
        """Return log-probs in nats; None: the update's own, detached.

        Args:
            scored: the rollout.
            recomputed: scores the rollout with the trainer's own pass, when it is called.
        """


@dataclass(frozen=True)
class RecomputedLogProbs(OldLogProbs):
    """A pass of the trainer over the rollout: exact, at the cost of one forward pass."""

    def __call__(
        self, scored: ScoredRollout, recomputed: Callable[[], Float[Tensor, "rollouts tokens"]]
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the trainer's log-probs."""
        return recomputed()


@dataclass(frozen=True)
class SamplerLogProbs(OldLogProbs):
    """What the generator said while it sampled: free, as exact as generator and trainer agree.

    The metrics `sampler/abs_difference_*` show how far they do.
    """

    from_sampler: ClassVar[bool] = True

    def __call__(
        self, scored: ScoredRollout, recomputed: Callable[[], Float[Tensor, "rollouts tokens"]]
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the generator's log-probs."""
        return scored.sampler_log_probs


@dataclass(frozen=True)
class CurrentLogProbs(OldLogProbs):
    """The update's own, detached: free and exact for exactly one update per rollout."""

    single_update: ClassVar[bool] = True

    def __call__(
        self, scored: ScoredRollout, recomputed: Callable[[], Float[Tensor, "rollouts tokens"]]
    ) -> None:
        """Return None: the update fills them in."""
        return
