"""From a critic's values to a loss per response token."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.types import CriticExperience


class ValueLoss(ABC):
    """From values and their targets to a loss per response token; an aggregation reduces it.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it.
    """

    @abstractmethod
    def __call__(
        self, values: Float[Tensor, "rollouts tokens"], experience: CriticExperience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the loss per token: zero, and without gradient, where the mask is False.

        Args:
            values: the critic's value of the state before each token now, in reward units.
            experience: the rows they belong to.
        """

    def clipped(
        self, values: Float[Tensor, "rollouts tokens"], experience: CriticExperience
    ) -> Bool[Tensor, "rollouts tokens"]:
        """Return the tokens at which a clip binds: the gradient stops there. Default: none."""
        return torch.zeros_like(experience.mask)


def clipped_value_loss(
    values: Float[Tensor, "rollouts tokens"],
    old_values: Float[Tensor, "rollouts tokens"],
    returns: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip: float | None,
) -> Float[Tensor, "rollouts tokens"]:
    """clipped_value_loss = 0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    The value loss of OpenAI's PPO, which the paper (arXiv:1707.06347) does not state: the larger of
    both errors counts, so a value that has moved away from its target keeps its gradient. Where
    both are the same, it is that of the value itself. Without a clip: 0.5 * (V - R)^2.

    Args:
        values: the critic's values now, in reward units.
        old_values: its values at the time of the rollout.
        returns: what the values are moved towards.
        mask: True where a token counts.
        clip: how far a value may move from its old one, in reward units, above 0; None: any
            distance.

    Returns:
        Loss per token, at least 0, in squared reward units; 0, and without gradient, where the mask
        is False.

    Example:
        >>> values, mask = torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]])
        >>> old_values, returns = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, -1.0]])
        >>> clipped_value_loss(values, old_values, returns, mask, clip=0.2)  # 0.8^2 / 2, 1.5^2 / 2
        tensor([[0.3200, 1.1250]])
    """
    error, clipped_error = _squared_errors(values, old_values, returns, mask, clip)
    return 0.5 * torch.where(clipped_error > error, clipped_error, error)


def value_clip_binds(
    values: Float[Tensor, "rollouts tokens"],
    old_values: Float[Tensor, "rollouts tokens"],
    returns: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    clip: float | None,
) -> Bool[Tensor, "rollouts tokens"]:
    """Return the tokens at which the clip of `clipped_value_loss` binds: the gradient is 0 there.

    A value that has moved further than `clip` in the direction of its target: the error of the
    clipped value is the larger one.

    Args:
        values: the critic's values now, in reward units.
        old_values: its values at the time of the rollout.
        returns: what the values are moved towards.
        mask: True where a token counts.
        clip: as in `clipped_value_loss`; None: it binds nowhere.

    Returns:
        True where the clip binds; False where the mask is False.

    Example:
        >>> values, mask = torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]])
        >>> old_values, returns = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, -1.0]])
        >>> value_clip_binds(values, old_values, returns, mask, clip=0.2)
        tensor([[ True, False]])
    """
    error, clipped_error = _squared_errors(values, old_values, returns, mask, clip)
    return clipped_error > error


def _squared_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the squared error of the values, and of the values near the old ones."""
    values, old_values, returns = (
        torch.where(mask, tensor, 0.0) for tensor in (values, old_values, returns)
    )
    error = (values - returns).square()
    if clip is None:
        return error, error
    return error, (values.clamp(old_values - clip, old_values + clip) - returns).square()


@dataclass(frozen=True)
class ClippedSquaredError(ValueLoss):
    """`clipped_value_loss` of an experience.

    Args:
        clip: how far a value may move from its old one, in reward units, above 0; None: any
            distance.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"clip must be above 0, for example 0.2, not {self.clip}; null for no clip"
            )

    def __call__(
        self, values: Float[Tensor, "rollouts tokens"], experience: CriticExperience
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return `clipped_value_loss`: in squared reward units, 0 where the mask is False."""
        return clipped_value_loss(
            values, experience.old_values, experience.returns, experience.mask, clip=self.clip
        )

    def clipped(
        self, values: Float[Tensor, "rollouts tokens"], experience: CriticExperience
    ) -> Bool[Tensor, "rollouts tokens"]:
        """Return `value_clip_binds`."""
        return value_clip_binds(
            values, experience.old_values, experience.returns, experience.mask, clip=self.clip
        )
