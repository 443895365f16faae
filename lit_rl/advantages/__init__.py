"""Advantage estimators: from rewards to one advantage per response token."""

from lit_rl.advantages.base import AdvantageEstimator, CriticEstimator
from lit_rl.advantages.baselines import Baseline, BatchMean, MovingAverage
from lit_rl.advantages.gae import GAE, gae
from lit_rl.advantages.greedy_baseline import GreedyBaseline, greedy_baseline
from lit_rl.advantages.group_centered import GroupCentered, group_centered
from lit_rl.advantages.group_centered_whitened import (
    GroupCenteredWhitened,
    group_centered_whitened,
)
from lit_rl.advantages.group_normalized import GroupNormalized, group_normalized
from lit_rl.advantages.groups import GroupEstimator
from lit_rl.advantages.leave_one_out import LeaveOneOut, leave_one_out
from lit_rl.advantages.normalized_parts import NormalizedParts, normalized_parts
from lit_rl.advantages.optimal_baseline import OptimalBaseline, optimal_baseline
from lit_rl.advantages.process_normalized import ProcessNormalized, process_normalized
from lit_rl.advantages.return_to_go import ReturnToGo, return_to_go
from lit_rl.advantages.whitened_return import WhitenedReturn, whitened_return

__all__ = [
    "GAE",
    "AdvantageEstimator",
    "Baseline",
    "BatchMean",
    "CriticEstimator",
    "GreedyBaseline",
    "GroupCentered",
    "GroupCenteredWhitened",
    "GroupEstimator",
    "GroupNormalized",
    "LeaveOneOut",
    "MovingAverage",
    "NormalizedParts",
    "OptimalBaseline",
    "ProcessNormalized",
    "ReturnToGo",
    "WhitenedReturn",
    "gae",
    "greedy_baseline",
    "group_centered",
    "group_centered_whitened",
    "group_normalized",
    "leave_one_out",
    "normalized_parts",
    "optimal_baseline",
    "process_normalized",
    "return_to_go",
    "whitened_return",
]
