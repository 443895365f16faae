"""What every policy loss is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.types import Experience


class PolicyLoss(ABC):
    """From log-probs and advantages to a loss per response token; an aggregation reduces it.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it.

    Attributes:
        single_update: whether the loss is right for one update per rollout only: with more it would
            need a ratio to the policy that sampled, which it does not have.
    """

    single_update: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the loss per token: zero, and without gradient, where the mask is False.

        Args:
            log_probs: log-probs of the response tokens under the current policy, in nats.
            experience: the rows they belong to; `old_log_probs` is present.
        """

    def clipped(
        self, log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
    ) -> dict[str, Bool[Tensor, "rollouts tokens"]]:
        """Return, by name, the tokens at which a clip binds: their gradient is another for it.

        It stops there, except in `ClippedWeight`, where its size is bounded. The names are `low`,
        `high`, `dual` and `off_policy` where the loss has such a clip; the default is none. At a
        token at most one of them binds.
        """
        return {}


def ratio_arguments(
    log_probs: Float[Tensor, "rollouts tokens"], experience: Experience
) -> tuple[
    Float[Tensor, "rollouts tokens"],
    Float[Tensor, "rollouts tokens"],
    Float[Tensor, "rollouts tokens"],
    Bool[Tensor, "rollouts tokens"],
]:
    """Return what a loss of the ratio reads: log-probs now and before, advantages, mask.

    Args:
        log_probs: under the current policy, in nats.
        experience: the rows they belong to.
    """
    assert experience.old_log_probs is not None
    return log_probs, experience.old_log_probs, experience.advantages, experience.mask
