"""GDPO's estimator: each part of the reward is normalised by itself before they are summed."""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.advantages.base import AdvantageEstimator, tokens_that_count
from lit_rl.advantages.group_normalized import group_normalized
from lit_rl.functional import masked_whiten
from lit_rl.types import ScoredRollout


def normalized_parts(
    parts: dict[str, Float[Tensor, " rollouts"]],
    weights: dict[str, float],
    group_size: int,
    *,
    valid: Bool[Tensor, " rollouts"],
    epsilon: float,
) -> Float[Tensor, " rollouts"]:
    """A_i = (S_i - mean(S)) / (std(S) + epsilon), with S_i = sum_k weight_k * N_ki.

    N_k is `group_normalized` of part k. GDPO, arXiv:2601.05242, equations 4 to 6: mean and standard
    deviation of S are over the rollouts of the batch, on all ranks, each of which counts once
    however long it is. Both standard deviations are those of a sample, and both have `epsilon`; the
    paper says neither. A part that does not apply to a rollout is 0 in its sum and moves no mean of
    that part. Only the ratios of the weights matter. Parts that are equal within every group give
    exactly 0.

    Args:
        parts: one number per rollout and part, the rows of a group contiguous; NaN where a part
            does not apply.
        weights: weight of each part, by the same names.
        group_size: rollouts per prompt, at least 2.
        valid: True where a rollout counts.
        epsilon: added to the standard deviations, in the unit of the parts, above 0.

    Returns:
        Advantages without a unit, with mean 0 over the rollouts of all ranks; 0 where `valid` is
        False.

    Raises:
        ValueError: if `group_size` is below 2 or does not divide the number of rollouts.

    Example:
        >>> parts = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([0.0, 9.0])}
        >>> valid = torch.tensor([True, True])
        >>> normalized_parts(parts, {"right": 2.0, "short": 1.0}, 2, valid=valid, epsilon=1e-6)
        tensor([ 0.7071, -0.7071])
    """
    total = torch.stack(
        [
            weights[name]
            * group_normalized(part, group_size, valid=valid & ~part.isnan(), epsilon=epsilon)
            for name, part in parts.items()
        ]
    ).sum(dim=0)
    return masked_whiten(total, valid, unbiased=True, epsilon=epsilon, epsilon_inside_sqrt=False)


@dataclass(frozen=True)
class NormalizedParts(AdvantageEstimator):
    """`normalized_parts` of the parts of the reward, the same for each token of a response.

    The parts are read as the reward gave them, before its own weights: neither these nor a shaping
    of the reward changes an advantage.

    Args:
        weights: weight of each part of the reward, by name; None: 1 for each.
        epsilon: added to the standard deviations, in the unit of the parts.
    """

    weights: dict[str, float] | None = None
    epsilon: float = 1e-6

    min_group_size: ClassVar[int] = 2
    sees_final_reward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, for example 1e-6, not {self.epsilon}")
        for name, weight in (self.weights or {}).items():
            if not isfinite(weight):
                raise ValueError(f"the weight of {name} must be finite, such as 1.0, not {weight}")

    def __call__(self, scored: ScoredRollout) -> Float[Tensor, "rollouts tokens"]:
        """Return the advantage of each rollout at each of its tokens that count."""
        mask = tokens_that_count(scored)
        advantages = normalized_parts(
            scored.reward_parts,
            self._weights(scored.reward_parts),
            scored.group_size,
            valid=mask.any(dim=1),
            epsilon=self.epsilon,
        )
        return torch.where(mask, advantages[:, None], 0.0)

    def _weights(self, parts: dict[str, Tensor]) -> dict[str, float]:
        if self.weights is None:
            return dict.fromkeys(parts, 1.0)
        if self.weights.keys() != parts.keys():
            raise ValueError(
                f"weights names {', '.join(self.weights) or 'nothing'}, but the parts of the "
                f"reward are {', '.join(parts)}: each needs a weight, such as 1.0, or 0.0 to leave "
                "it out"
            )
        return self.weights
