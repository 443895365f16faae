"""What a worker process says, as JSON: nothing in it can act where it is read."""

import json
from collections.abc import Mapping

from lit_rl.rewards.failed import Failed
from lit_rl.rewards.steps import Steps, Value


class NotReadyError(Exception):
    """The reward could not get ready in a worker; the message says why."""


def ready(models: Mapping[str, str]) -> bytes:
    """Return what a worker says when its reward is ready.

    Args:
        models: of the reward, see `Reward.models`.
    """
    return json.dumps({"models": dict(models)}).encode()


def not_ready(reason: str) -> bytes:
    """Return what a worker says that has no reward."""
    return json.dumps({"reason": reason}).encode()


def models_of(text: bytes) -> dict[str, str]:
    """Return the models of the reward of a worker that got ready.

    Raises:
        NotReadyError: if it did not.
    """
    entry = json.loads(text)
    if "reason" in entry:
        raise NotReadyError(entry["reason"])
    return dict(entry["models"])


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
