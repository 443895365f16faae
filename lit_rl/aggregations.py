"""From a loss per token to the scalar whose gradient an optimizer step follows.

An aggregation divides once, by counts taken over the whole optimizer step. Its values on disjoint
micro-batches, with the totals of all of them, therefore sum to its value on the whole: neither the
size of a micro-batch nor the number of devices changes the gradient. Across devices, the totals are
those of all ranks, and the sum over ranks is the loss.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import masked_mean, masked_sum


class Totals(NamedTuple):
    """What one optimizer step counts, over all its micro-batches and ranks.

    Attributes:
        tokens: tokens that count.
        sequences: responses with at least one token that counts; a fully masked one is none.
    """

    tokens: Float[Tensor, ""]
    sequences: Float[Tensor, ""]

    @staticmethod
    def of(mask: Bool[Tensor, "rollouts tokens"]) -> "Totals":
        """Return the totals of a step that consists of these rows.

        Args:
            mask: True where a token counts.

        Example:
            >>> import torch
            >>> Totals.of(torch.tensor([[True, True], [True, False], [False, False]]))
            Totals(tokens=tensor(3.), sequences=tensor(2.))
        """
        return Totals(tokens=mask.sum().float(), sequences=mask.any(dim=1).sum().float())


class Aggregation(ABC):
    """From a loss per token to a scalar.

    A subclass is a frozen dataclass of its hyper-parameters. The examples are of two responses with
    losses [4] and [1, 1, 1].
    """

    @abstractmethod
    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the share of these rows in the loss of the step; 0 where nothing counts.

        Args:
            loss: loss of each token.
            mask: True where a token counts.
            totals: counts of the whole optimizer step that these rows are part of.
        """


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """sum over tokens / tokens: each token weighs the same, so long responses weigh more.

    DAPO, arXiv:2503.14476, section 3.3.

    Example:
        >>> import torch
        >>> loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> TokenMean()(loss, mask=loss > 0, totals=Totals.of(loss > 0))
        tensor(1.7500)
    """

    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the rows' share of the mean over the tokens of the step."""
        return masked_sum(loss, mask) / totals.tokens.clamp(min=1)


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Mean over sequences of the mean over their tokens: each response weighs the same.

    GRPO, arXiv:2402.03300, equation 3.

    Example:
        >>> import torch
        >>> loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> SequenceMean()(loss, mask=loss > 0, totals=Totals.of(loss > 0))
        tensor(2.5000)
    """

    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the rows' share of the mean over the sequences of the step."""
        return masked_mean(loss, mask, dim=1).sum() / totals.sequences.clamp(min=1)


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """Mean over sequences of the sum over their tokens: the loss of a whole response.

    RLOO, arXiv:2402.14740: a response is one action.

    Example:
        >>> import torch
        >>> loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> SequenceSum()(loss, mask=loss > 0, totals=Totals.of(loss > 0))
        tensor(3.5000)
    """

    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the rows' share of the mean over the sequences of the step."""
        return masked_sum(loss, mask) / totals.sequences.clamp(min=1)


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """sum over tokens / (sequences * length): the sum of a response, scaled by a constant.

    Dr. GRPO, arXiv:2503.20783, section 3.2. The constant is a setting and never the padded width,
    which depends on the other responses of a batch.

    Args:
        length: the constant, in tokens: usually the largest response length.

    Example:
        >>> import torch
        >>> loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> FixedLength(length=8)(loss, mask=loss > 0, totals=Totals.of(loss > 0))
        tensor(0.4375)
    """

    length: int

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise ValueError(
                f"length must be above 0, for example the largest response length, "
                f"not {self.length}"
            )

    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the rows' share of the mean over the sequences of the step, over `length`."""
        return masked_sum(loss, mask) / (totals.sequences.clamp(min=1) * self.length)


@dataclass(frozen=True)
class TokenSum(Aggregation):
    """sum over tokens: divides by nothing, so the step grows with the batch.

    Example:
        >>> import torch
        >>> loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> TokenSum()(loss, mask=loss > 0, totals=Totals.of(loss > 0))
        tensor(7.)
    """

    def __call__(
        self,
        loss: Float[Tensor, "rollouts tokens"],
        mask: Bool[Tensor, "rollouts tokens"],
        totals: Totals,
    ) -> Float[Tensor, ""]:
        """Return the sum over the rows' tokens."""
        return masked_sum(loss, mask)
