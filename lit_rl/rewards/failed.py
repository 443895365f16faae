"""A response that a reward could not judge."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    """What a reward gives in the place of a value where judging the response failed.

    The response is then missing, whatever other parts of the reward say of it: it counts in no
    loss, baseline or metric of rewards, and `reward/errors` counts it. None is another matter:
    there the reward does not apply, and other parts may.

    Args:
        reason: what went wrong, on one line.
    """

    reason: str
