"""How responses are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Every setting of a generation; a model's own generation config changes none of them.

    The filters look at the distribution after `temperature`, in the order top-k, top-p, min-p, and
    keep at least the most probable token.

    Args:
        max_new_tokens: longest response, in tokens, the end token included.
        min_new_tokens: before this many tokens no end token is drawn. Stop strings are not delayed.
        temperature: divides the logits; above 0.
        top_k: draw among the so many most probable tokens only; 0: among all.
        top_p: draw among the most probable tokens that together reach this probability; 1: all.
        min_p: draw among tokens at least so probable relative to the most probable one; 0: all.
        stop_strings: texts that end a response. The token that completes one is the response's
            last; the response's text is cut before it.
        greedy: take the most probable token instead of drawing. `temperature` then changes no
            response, only the log-probs that are reported.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: Sequence[str] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        self._refuse(self.max_new_tokens < 1, "max_new_tokens", "at least 1, such as 128")
        self._refuse(
            not 0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"from 0 to max_new_tokens = {self.max_new_tokens}",
        )
        self._refuse(
            not 0 < self.temperature < float("inf"),
            "temperature",
            "above 0, such as 1.0 (for the most probable token use greedy: true)",
        )
        self._refuse(self.top_k < 0, "top_k", "0 (off) or a number of tokens, such as 50")
        self._refuse(not 0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off), such as 0.95")
        self._refuse(not 0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1, such as 0.05")
        # A bare text would be taken for one stop string per character.
        self._refuse(
            isinstance(self.stop_strings, str) or not all(self.stop_strings),
            "stop_strings",
            r'a list of texts that are not empty, such as ["\n"]',
        )

    def _refuse(self, wrong: bool, name: str, allowed: str) -> None:
        if wrong:
            raise ValueError(f"{name} must be {allowed}; it is {getattr(self, name)!r}")

    def as_greedy(self) -> "SamplingSettings":
        """Return the same settings, taking the most probable token."""
        return replace(self, greedy=True)
