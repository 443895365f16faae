"""What is done to the reward of a response before its advantage is estimated, in training only.

Held-out measures and the metrics `reward/` are of the reward as it was given.
"""

from abc import ABC, abstractmethod

from lit_rl.types import ScoredRollout


class RewardShaping(ABC):
    """From a scored rollout to the same rollout with other rewards.

    A subclass is a frozen dataclass of its hyper-parameters.
    """

    @abstractmethod
    def __call__(self, scored: ScoredRollout) -> ScoredRollout:
        """Return the rollout with its new rewards: `rewards` and `token_rewards` agree.

        A row that is `missing` keeps its reward of 0.
        """
