"""A process that judges one response at a time, within a limit of memory."""

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil
import torch

from lit_rl.rewards.base import Reward
from lit_rl.rewards.checked_scores import checked_value, plain, shown
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.reply import not_ready, ready, reply
from lit_rl.types import Rollout

# Of linux/prctl.h.
_SIGNAL_WHEN_PARENT_ENDS, _ADOPT_ORPHANS = 1, 36
_MIB = 2**20


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def serve(connection: Connection, reward: bytes, memory_limit_mib: int | None) -> NoReturn:
    """Judge responses until the process is ended.

    Args:
        connection: brings a pickled rollout or the number of one of its rows, and takes the models
            of the reward or why there is none, then a reply per row.
        reward: the reward, pickled.
        memory_limit_mib: what the process may allocate beyond what it has when it is ready.
    """
    _belong_to_parent()
    try:
        judge = _Judge(pickle.loads(reward), memory_limit_mib)
    except BaseException as error:
        hint = "what it names must be importable there: of a module, not of the script that runs"
        connection.send_bytes(not_ready(f"{shown(error)}; {hint}"))
        os._exit(1)
    connection.send_bytes(judge.introduction)
    own = os.getpid()
    while True:
        task = connection.recv()
        if isinstance(task, bytes):
            judge.rollout = pickle.loads(task)
        else:
            text = judge(task)
            if os.getpid() != own:
                os._exit(1)  # the reward forked, and its child has come back here as well
            connection.send_bytes(text)


def _belong_to_parent() -> None:
    """End with the parent, adopt what descendants leave behind, and write no core dumps."""
    adopt_orphans()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_WHEN_PARENT_ENDS, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What asks the run to stop may reach all its processes; the keeper ends this one. Processes
    # that the reward forks are ended as usual.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_over)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _pass_over(*_: Any) -> None:
    return


class _Judge:
    """A reward that is ready, and the rollout that it is asked about."""

    def __init__(self, reward: Reward, memory_limit_mib: int | None) -> None:
        self.rollout: Rollout
        self.reward = reward
        reward.setup()
        self.introduction = ready(reward.models)
        self.helpers = _children()
        self.limit = None if memory_limit_mib is None else memory_limit_mib * _MIB
        if self.limit is not None:
            self.own_memory = _memory()
            most = self.own_memory + self.limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    def __call__(self, row: int) -> bytes:
        """Return the reply for one row."""
        try:
            return reply(self._value(row), retires=self._is_worn)
        except MemoryError:
            limit = f"more than memory_limit_mib {(self.limit or 0) // _MIB}"
            reason, retires = f"it needs {limit}" if self.limit else "MemoryError", True
        except BaseException as error:
            reason = f"it raised {shown(error)}"
            retires = self._is_worn or not isinstance(error, Exception)
        return reply(Failed(reason), retires=retires)

    def _value(self, row: int) -> float | dict[int, float] | Failed | None:
        rollout = replace(self.rollout.select(torch.tensor([row])), group_size=1)
        given = plain(self.reward.values(rollout))
        if not isinstance(given, Sequence) or len(given) != 1:
            return Failed(f"it gave {shown(given)} for one response, not a list of one value")
        if isinstance(given[0], Failed):
            return given[0]
        try:
            return checked_value(given[0], int(rollout.mask.sum()))
        except ValueError as error:
            return Failed(f"it gave {shown(given[0])}; {error}")

    @property
    def _is_worn(self) -> bool:
        """Whether the process keeps much memory, or has children that it did not begin with."""
        if self.limit is not None and _memory() - self.own_memory > self.limit / 2:
            return True
        return bool(_children() - self.helpers)


def _memory() -> int:
    """Bytes of data that this process has allocated, as RLIMIT_DATA counts them."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


def _children() -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # quickly: there are none
        return set()
    return {child.pid for child in psutil.Process().children()}
