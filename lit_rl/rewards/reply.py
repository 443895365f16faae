"""What a worker process says of one response, as JSON: nothing in it can act where it is read."""

import json

from lit_rl.rewards.failed import Failed
from lit_rl.rewards.steps import Steps, Value


def reply(value: float | dict[int, float] | Failed | None, *, retires: bool) -> bytes:
    """Return the reply for one response.

    Args:
        value: an outcome, the values of steps by position, None where the reward does not apply, or
            why it failed.
        retires: whether the worker is to be replaced by a new one.
    """
    if isinstance(value, dict):
        entry: object = {"positions": list(value), "values": list(value.values())}
    else:
        entry = {"failed": value.reason} if isinstance(value, Failed) else value
    return json.dumps({"value": entry, "retires": retires}, allow_nan=False).encode()


def retires(text: bytes) -> bool:
    """Return whether the worker that sent a reply is to be replaced."""
    return bool(json.loads(text)["retires"])


def value_of(text: bytes) -> Value | Failed:
    """Return the value that a reply holds."""
    entry = json.loads(text)["value"]
    if not isinstance(entry, dict):
        return None if entry is None else float(entry)
    return Failed(entry["failed"]) if "failed" in entry else Steps(**entry)
