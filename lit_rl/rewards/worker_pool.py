"""Worker processes as the process sees them that asks them."""

import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lit_rl.rewards.keeper import Rows, Settings, Wanted
from lit_rl.rewards.reply import value_of
from lit_rl.rewards.steps import Value
from lit_rl.types import Rollout

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lit_rl.rewards.keeper import main
main(int(sys.argv[2]))
"""
_SECONDS_TO_END = 10


@dataclass(frozen=True)
class _Keeper:
    process: "subprocess.Popen[bytes]"
    connection: Connection

    def say(self, message: Settings | Rows | Wanted) -> None:
        """Send a message."""
        with suppress(OSError):  # it has ended: what it said last, or nothing, is the answer
            self.connection.send(message)

    def answer(self) -> Any:
        """Wait for an answer, or return what went wrong."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return "the process that keeps the workers has ended; see what it printed"

    def end(self) -> None:
        """Close the connection, with which the keeper and its workers end."""
        self.connection.close()
        try:
            self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()


class WorkerPool:
    """Processes that judge responses; they end with this object, and with this process.

    Args:
        settings: what they judge with, and their limits.

    Attributes:
        models: those of the reward, see `Reward.models`, since it was ready in the processes.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.models: dict[str, str] = {}
        self._keeper: _Keeper | None = None
        self._num_begun = 0
        self._finalizer: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Start the processes and wait until their reward is ready, if they are not there.

        Raises:
            ValueError: if the reward does not get ready.
        """
        if self._keeper is not None:
            return
        ours, theirs = socket.socketpair()
        path, number = json.dumps(sys.path), str(theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, path, number],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # The workers share the machine with whoever asks them.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # What is typed into the terminal concerns this process alone.
            start_new_session=True,
        )
        theirs.close()
        self._keeper = _Keeper(process, Connection(ours.detach()))
        self._finalizer = weakref.finalize(self, self._keeper.end)
        self._keeper.say(self.settings)
        answer = self._keeper.answer()
        if isinstance(answer, str):
            self._give_up(answer)
        self.models = answer

    def begin(self, rollout: Rollout) -> Callable[[], list[Value]]:
        """Let a rollout be judged behind those that were begun before it.

        Returns:
            What waits for one value per response, in their order. It raises ValueError if the
            reward does not get ready.

        Raises:
            ValueError: if the reward does not get ready.
        """
        self.start()
        assert self._keeper is not None
        self._num_begun += 1
        self._keeper.say(Rows(self._num_begun, pickle.dumps(rollout.to("cpu")), len(rollout)))
        return partial(self._values, self._keeper, self._num_begun)

    def _values(self, keeper: _Keeper, number: int) -> list[Value]:
        keeper.say(Wanted(number))
        answer = keeper.answer()
        if isinstance(answer, str):
            self._give_up(answer)
        return [value_of(reply) for reply in answer]

    def _give_up(self, reason: str) -> NoReturn:
        self.end()
        raise ValueError(
            f"the reward {self.settings.name} is not ready in its worker process: {reason}"
        )

    def end(self) -> None:
        """End the processes; `start` and `values` start new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._keeper = self._finalizer = None
