"""Advantage estimators: from rewards to one advantage per response token."""

from lit_rl.advantages.base import AdvantageEstimator, CriticEstimator
from lit_rl.advantages.group_centered import GroupCentered, group_centered
from lit_rl.advantages.group_normalized import GroupNormalized, group_normalized
from lit_rl.advantages.groups import GroupEstimator
from lit_rl.advantages.leave_one_out import LeaveOneOut, leave_one_out

__all__ = [
    "AdvantageEstimator",
    "CriticEstimator",
    "GroupCentered",
    "GroupEstimator",
    "GroupNormalized",
    "LeaveOneOut",
    "group_centered",
    "group_normalized",
    "leave_one_out",
]
