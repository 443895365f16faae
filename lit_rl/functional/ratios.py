"""How much more likely a token is now than it was when it was sampled."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest log-ratio, in nats and in either direction, that is exponentiated."""


def log_ratio(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """log_ratio = log_probs - old_log_probs, in float32 or better.

    A NaN at a position that counts stays NaN.

    Args:
        log_probs: under one policy, in nats.
        old_log_probs: under the other, in nats.
        mask: True where a token counts.

    Returns:
        Nats, of either sign; 0, and without gradient, where the mask is False.

    Example:
        >>> log_probs, old_log_probs = torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]])
        >>> log_ratio(log_probs, old_log_probs, mask=torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    precise = torch.promote_types(log_probs.dtype, torch.float32)
    return torch.where(mask, log_probs.to(precise) - old_log_probs.to(precise), 0.0)


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)).

    An infinite ratio times an advantage of 0 would be NaN. Beyond the bound (ratio 4.9e8 or
    2.1e-9) the gradient is 0. A NaN stays NaN.

    Args:
        log_ratio: in nats.

    Returns:
        Ratios without a unit.

    Example:
        >>> bounded_exp(torch.tensor([0.0, 100.0]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def probability_ratio(
    log_probs: Float[Tensor, "rollouts tokens"],
    old_log_probs: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
) -> Float[Tensor, "rollouts tokens"]:
    """probability_ratio = exp(log_probs - old_log_probs).

    See `log_ratio` and `bounded_exp`: the difference is taken in float32 or better and bounded to
    +-`MAX_LOG_RATIO`, beyond which the gradient is 0. A NaN at a position that counts stays NaN.

    Args:
        log_probs: under the current policy, in nats.
        old_log_probs: under the policy before the update, in nats.
        mask: True where a token counts.

    Returns:
        Ratios without a unit; 1, and without gradient, where the mask is False.

    Example:
        >>> half, one = torch.tensor([[0.5, 9.0]]).log(), torch.zeros(1, 2)
        >>> probability_ratio(half, one, mask=torch.tensor([[True, False]]))
        tensor([[0.5000, 1.0000]])
    """
    return bounded_exp(log_ratio(log_probs, old_log_probs, mask))
