"""1 for a text of a given form."""

import re
from dataclasses import dataclass

from lit_rl.rewards.base import Reward
from lit_rl.types import Rollout


@dataclass(frozen=True)
class RegexFormat(Reward):
    r"""1 where the whole response matches a regular expression, else 0.

    Args:
        pattern: the regular expression; its dot matches line breaks too. `(?i)` at its start
            ignores case.
        prompt_tail: what a chat template may already have opened the response with, such as
            `"<think>\n"`: where the prompt ends in it, it stands in front of the response.

    Raises:
        ValueError: if the pattern is not a regular expression.
    """

    pattern: str
    prompt_tail: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is not a regular expression ({error}); "
                "an example is '<think>.*</think>.*'"
            ) from error

    def values(self, rollout: Rollout) -> list[float | None]:
        """Return 1 or 0."""
        texts = (
            f"{self.prompt_tail if prompt.endswith(self.prompt_tail) else ''}{response}"
            for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)
        )
        return [float(re.fullmatch(self.pattern, text, re.DOTALL) is not None) for text in texts]
