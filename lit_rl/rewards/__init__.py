"""Rewards: from the texts of a rollout to one number per response, or one per step."""

from lit_rl.rewards.base import Reward
from lit_rl.rewards.exact_answer import ExactAnswer
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.in_workers import InWorkers
from lit_rl.rewards.length import Length
from lit_rl.rewards.math_equivalence import MathEquivalence
from lit_rl.rewards.number_in_text import NumberInText
from lit_rl.rewards.python_function import PythonFunction
from lit_rl.rewards.reasoning_gym_score import ReasoningGymScore
from lit_rl.rewards.regex_format import RegexFormat
from lit_rl.rewards.reward_model import RewardModel
from lit_rl.rewards.steps import Steps
from lit_rl.rewards.weighted_sum import WeightedSum

__all__ = [
    "ExactAnswer",
    "Failed",
    "InWorkers",
    "Length",
    "MathEquivalence",
    "NumberInText",
    "PythonFunction",
    "ReasoningGymScore",
    "RegexFormat",
    "Reward",
    "RewardModel",
    "Steps",
    "WeightedSum",
]
