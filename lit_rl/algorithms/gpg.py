"""Group policy gradient."""

from typing import Any

from lit_rl.advantages import GroupCentered
from lit_rl.advantages.base import AdvantageEstimator
from lit_rl.algorithms.reinforce import Reinforce


class GPG(Reinforce):
    """Group policy gradient (arXiv:2504.02546): the plain gradient with the group as baseline.

    No ratio, no clip, no reference: the log-prob times the reward less the mean of its group, over
    all tokens. The paper also scales by the share of groups with signal; that is left out, since
    it is a factor of the learning rate that changes from batch to batch.

    Args:
        advantage: from rewards to advantages.
        group_size: responses per prompt.
        loop: the arguments of `Reinforce`.
    """

    def __init__(
        self,
        advantage: AdvantageEstimator = GroupCentered(),
        group_size: int = 8,
        **loop: Any,
    ) -> None:
        super().__init__(advantage=advantage, group_size=group_size, **loop)
