"""On-policy optimization with the optimal baseline."""

from typing import Any

from lit_rl.advantages import OptimalBaseline
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.algorithms.reinforce import Reinforce


class OPO(Reinforce):
    """On-policy optimization with the optimal baseline (arXiv:2505.23585).

    The baseline of a group weighs each reward by the length of its response, which minimises the
    variance where the gradients of tokens are alike; exactly on-policy, without KL and entropy.

    Args:
        advantage: from rewards to advantages.
        group_size: responses per prompt.
        loop: the arguments of `Reinforce`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = OptimalBaseline(),
        group_size: int = 8,
        **loop: Any,
    ) -> None:
        super().__init__(advantage=advantage, group_size=group_size, **loop)
