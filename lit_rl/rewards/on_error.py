"""What happens when judging a response fails: the run ends, or the response is left out."""

from collections.abc import Sequence
from typing import Literal, get_args

from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.steps import Value
from lit_rl.types import Rollout

OnError = Literal["raise", "exclude"]


def check_on_error(on_error: OnError) -> None:
    """Raise a ValueError unless there is such a policy."""
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error is {on_error!r}, must be 'raise' or 'exclude'")


def with_failures(values: Sequence[Value], rollout: Rollout, on_error: OnError) -> list[Value]:
    """Return the values, failures included, if the policy is to go on without them.

    Args:
        values: one per response, `Failed` where judging it failed.
        rollout: the responses.
        on_error: the policy.

    Raises:
        RuntimeError: naming the first response, if the policy is to raise.
    """
    failed = {row: value for row, value in enumerate(values) if isinstance(value, Failed)}
    if failed and on_error == "raise":
        row, first = next(iter(failed.items()))
        raise RuntimeError(
            f"judging failed on {len(failed)} of {len(values)} responses; the first is row {row}, "
            f"{shown(rollout.responses[row])}: {first.reason}. on_error exclude would go on "
            "without them"
        )
    return [*values]
