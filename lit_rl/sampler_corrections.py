"""What is done about a sampler whose probabilities are not those of the trainer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional import bounded_exp, log_ratio, masked_sum
from lit_rl.types import Experience

Level = Literal["token", "sequence"]


class SamplerCorrection(ABC):
    """A weight per token by which the policy loss is multiplied, from old and sampler log-probs.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it.
    """

    @abstractmethod
    def weights(self, experience: Experience) -> Float[Tensor, "rollouts tokens"]:
        """Return the weights, without gradient: at least 0; 1 where the mask is False.

        Args:
            experience: `old_log_probs` is present.
        """


def _own(difference: Tensor, mask: Tensor) -> Tensor:
    return difference


def _summed(difference: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, masked_sum(difference, mask, dim=1, keepdim=True), 0.0)


LOG_RATIO_OF_LEVEL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _own,
    "sequence": _summed,
}


def check_level(level: str) -> None:
    """Refuse a level that does not exist.

    Raises:
        ValueError: unless it is `token` or `sequence`.
    """
    if level not in LOG_RATIO_OF_LEVEL:
        raise ValueError(f"level must be token or sequence, not {level!r}")


@torch.no_grad()
def sampler_ratio(
    old_log_probs: Float[Tensor, "rollouts tokens"],
    sampler_log_probs: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    level: Level,
) -> Float[Tensor, "rollouts tokens"]:
    """sampler_ratio = exp(old_log_probs - sampler_log_probs), of a token or of a whole response.

    At level `sequence` every token has the ratio of its response, the product over its tokens: the
    unbiased weight of the response, with a variance that grows with its length. At level `token`
    each has its own, which leaves out that the tokens before it came from the sampler too. The
    difference is taken in float32 or better and its sum is bounded as in `bounded_exp`.

    Args:
        old_log_probs: of the trainer's policy before the update, in nats.
        sampler_log_probs: of the generator, in nats.
        mask: True where a token counts.
        level: what the ratio is of.

    Returns:
        Ratios without a unit and without gradient; 1 where the mask is False.

    Example:
        >>> old, sampler = torch.tensor([[2.0, 3.0]]).log(), torch.zeros(1, 2)
        >>> mask = torch.tensor([[True, True]])
        >>> sampler_ratio(old, sampler, mask, level="token")
        tensor([[2., 3.]])
        >>> sampler_ratio(old, sampler, mask, level="sequence")
        tensor([[6., 6.]])
    """
    difference = log_ratio(old_log_probs, sampler_log_probs, mask)
    return bounded_exp(LOG_RATIO_OF_LEVEL[level](difference, mask))


def truncated_importance(
    old_log_probs: Float[Tensor, "rollouts tokens"],
    sampler_log_probs: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    level: Level,
    maximum: float,
) -> Float[Tensor, "rollouts tokens"]:
    """truncated_importance = min(sampler_ratio, maximum).

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (TIS,
    per token); Liu et al., "When Speed Kills Stability", 2025 (also per sequence). A smaller
    maximum means less variance and more bias.

    Args:
        old_log_probs: of the trainer's policy before the update, in nats.
        sampler_log_probs: of the generator, in nats.
        mask: True where a token counts.
        level: what the ratio is of, see `sampler_ratio`.
        maximum: the largest weight, at least 1.

    Returns:
        Weights in (0, maximum], without gradient; 1 where the mask is False.

    Example:
        >>> old, sampler = torch.tensor([[0.5, 3.0]]).log(), torch.zeros(1, 2)
        >>> mask = torch.tensor([[True, True]])
        >>> truncated_importance(old, sampler, mask, level="token", maximum=2.0)
        tensor([[0.5000, 2.0000]])
    """
    return sampler_ratio(old_log_probs, sampler_log_probs, mask, level=level).clamp(max=maximum)


def importance_mask(
    old_log_probs: Float[Tensor, "rollouts tokens"],
    sampler_log_probs: Float[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    *,
    level: Level,
    minimum: float,
    maximum: float,
) -> Float[Tensor, "rollouts tokens"]:
    """importance_mask = sampler_ratio if minimum <= sampler_ratio <= maximum else 0.

    IcePop, arXiv:2510.18855 (per token, with a band on both sides); Liu et al., "When Speed Kills
    Stability", 2025 (masked, per token and per sequence, with a maximum only). A token without
    weight has no gradient and still counts in every denominator. A NaN stays NaN.

    Args:
        old_log_probs: of the trainer's policy before the update, in nats.
        sampler_log_probs: of the generator, in nats.
        mask: True where a token counts.
        level: what the ratio is of, see `sampler_ratio`.
        minimum: the smallest ratio that is trained, in [0, 1].
        maximum: the largest ratio that is trained, at least 1.

    Returns:
        Weights, 0 or in [minimum, maximum], without gradient; 1 where the mask is False.

    Example:
        >>> old, sampler = torch.tensor([[0.4, 0.5, 3.0]]).log(), torch.zeros(1, 3)
        >>> mask = torch.tensor([[True, True, True]])
        >>> importance_mask(old, sampler, mask, level="token", minimum=0.45, maximum=2.0)
        tensor([[0.0000, 0.5000, 0.0000]])
    """
    ratio = sampler_ratio(old_log_probs, sampler_log_probs, mask, level=level)
    return torch.where((ratio < minimum) | (ratio > maximum), 0.0, ratio)


def effective_sample_size(weight_sum: float, squared_weight_sum: float) -> float:
    """effective_sample_size = (sum w)^2 / sum w^2: how many equal weights would do as well.

    Kish, "Survey Sampling", 1965. It is taken from two sums, so that these can be added over
    micro-batches, updates and ranks first: sizes of parts do not add up to that of the whole.

    Args:
        weight_sum: sum of the weights.
        squared_weight_sum: sum of their squares.

    Returns:
        A number of samples: at most that of the weights that are not 0, which it is where they are
        all equal; 0 where all weights are 0.

    Example:
        >>> weights = torch.tensor([1.0, 1.0, 0.0, 0.0])
        >>> effective_sample_size(weights.sum().item(), weights.square().sum().item())
        2.0
    """
    return weight_sum**2 / squared_weight_sum if squared_weight_sum else 0.0


@dataclass(frozen=True)
class TruncatedImportance(SamplerCorrection):
    """`truncated_importance` of an experience.

    Args:
        level: `token` or `sequence`: what the ratio is of.
        maximum: the largest weight, at least 1.
    """

    level: Level
    maximum: float = 2.0

    def __post_init__(self) -> None:
        check_level(self.level)
        if not self.maximum >= 1:
            raise ValueError(f"maximum must be at least 1, for example 2.0, not {self.maximum}")

    def weights(self, experience: Experience) -> Float[Tensor, "rollouts tokens"]:
        """Return `truncated_importance`: in (0, maximum]; 1 where the mask is False."""
        assert experience.old_log_probs is not None
        return truncated_importance(
            experience.old_log_probs,
            experience.sampler_log_probs,
            experience.mask,
            level=self.level,
            maximum=self.maximum,
        )


@dataclass(frozen=True)
class ImportanceMask(SamplerCorrection):
    """`importance_mask` of an experience.

    Args:
        level: `token` or `sequence`: what the ratio is of.
        minimum: the smallest ratio that is trained, in [0, 1]; 0: without bound.
        maximum: the largest ratio that is trained, at least 1.
    """

    level: Level
    minimum: float = 0.5
    maximum: float = 2.0

    def __post_init__(self) -> None:
        check_level(self.level)
        if not 0 <= self.minimum <= 1 <= self.maximum:
            raise ValueError(
                "minimum must be in [0, 1] and maximum at least 1, for example 0.5 and 2.0, not "
                f"{self.minimum} and {self.maximum}"
            )

    def weights(self, experience: Experience) -> Float[Tensor, "rollouts tokens"]:
        """Return `importance_mask`: 0 or in the band; 1 where the mask is False."""
        assert experience.old_log_probs is not None
        return importance_mask(
            experience.old_log_probs,
            experience.sampler_log_probs,
            experience.mask,
            level=self.level,
            minimum=self.minimum,
            maximum=self.maximum,
        )
