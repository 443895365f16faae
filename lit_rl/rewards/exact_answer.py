"""1 for the reference answer, letter by letter."""

from dataclasses import dataclass

from lit_rl.rewards.base import Reward
from lit_rl.types import Rollout


@dataclass(frozen=True)
class ExactAnswer(Reward):
    """1 where the response is the reference answer, else 0.

    It does not apply to a prompt whose answer is empty. Whether the response was finished does not
    matter.

    Args:
        strip: compare without white space at both ends.
        ignore_case: compare without regard to upper and lower case.
    """

    strip: bool = True
    ignore_case: bool = False

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return 1, 0, or None where there is no answer."""
        pairs = zip(rollout.responses, rollout.answers, strict=True)
        return [
            float(self._compared(response) == self._compared(answer)) if answer.strip() else None
            for response, answer in pairs
        ]

    def _compared(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
