"""A process that starts workers, ends those that break a limit, and replaces them.

It runs no code of a reward, so it always answers. It ends with the process that started it, however
that one ends, and takes the workers and everything that they started along.
"""

import os
import signal
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil

from lit_rl.rewards import worker
from lit_rl.rewards.checked_scores import shown
from lit_rl.rewards.failed import Failed
from lit_rl.rewards.reply import NotReadyError, models_of, reply, retires

START_SECONDS = 300.0
"""Longest time for the reward to get ready, models that it loads included."""
_SECONDS_TO_PASS_ON = 10
"""Longest time for a worker to take in what is sent to it; it is idle then."""
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Settings:
    """What the keeper has to know.

    Attributes:
        name: what errors call the reward.
        reward: the reward, pickled.
        num_workers: how many processes judge.
        timeout_seconds: longest time for one response.
        memory_limit_mib: most memory for one response; None: no limit.
    """

    name: str
    reward: bytes
    num_workers: int
    timeout_seconds: float
    memory_limit_mib: int | None


@dataclass(frozen=True)
class Rows:
    """Asks for a rollout to be judged, behind those before it.

    Attributes:
        number: names the rollout.
        rollout: the rollout, pickled.
        num_rows: its responses.
    """

    number: int
    rollout: bytes
    num_rows: int


@dataclass(frozen=True)
class Wanted:
    """Asks for the replies to the responses of a rollout, and waits for them.

    Attributes:
        number: names the rollout.
    """

    number: int


@dataclass(eq=False)
class _Worker:
    """A worker process and what it does: it gets ready, judges a row, or idles."""

    pid: int
    connection: Connection
    deadline: float
    is_ready: bool = False
    row: int | None = None
    has_rollout: bool = False

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.row is None


class Keeper:
    """Lets workers judge the rows of a rollout.

    Args:
        main: the connection to the process that asks.
        settings: of the workers.
    """

    def __init__(self, main: Connection, settings: Settings) -> None:
        self.main = main
        self.settings = settings
        self.parent = os.getppid()
        self.workers: list[_Worker] = []
        self.models: dict[str, str] | None = None
        self.waiting: deque[Rows] = deque()
        self.judged: dict[int, list[bytes]] = {}
        self.wanted: int | None = None

    def run(self) -> None:
        """Say which models judge, then answer each rollout, until the process that asks is gone.

        The answer is a reply per row, and is sent when it is wanted: who sends rollouts meanwhile
        does not read.
        """
        for _ in range(self.settings.num_workers):
            self._start()
        while not all(worker.is_ready for worker in self.workers):
            self._look()
        self.main.send(self.models)
        while True:
            if self.waiting:
                rows = self.waiting.popleft()
                self.judged[rows.number] = self._judge(rows.rollout, rows.num_rows)
                self._answer()
            elif self._readable([self.main], _SECONDS_BETWEEN_LOOKS):
                self._hear()

    def _hear(self) -> None:
        """Take in what the process says that asks."""
        message = self.main.recv()
        if isinstance(message, Wanted):
            self.wanted = message.number
            self._answer()
        else:
            self.waiting.append(message)

    def _answer(self) -> None:
        """Send the replies that are wanted, if they are there."""
        if self.wanted in self.judged:
            self.main.send(self.judged.pop(self.wanted))
            self.wanted = None

    def _judge(self, rollout: bytes, num_rows: int) -> list[bytes]:
        self.rows, self.replies = deque(range(num_rows)), dict[int, bytes]()
        for worker_ in self.workers:
            worker_.has_rollout = False
        while len(self.replies) < num_rows:
            for idle in [worker_ for worker_ in self.workers if worker_.is_idle]:
                if self.rows:
                    self._give(idle, rollout)
            self._look()
        return [self.replies[row] for row in range(num_rows)]

    def _give(self, idle: _Worker, rollout: bytes) -> None:
        try:
            if not idle.has_rollout:
                idle.connection.send(rollout)
                idle.has_rollout = True
            idle.connection.send(self.rows[0])
        except OSError:  # it has ended since, or does not listen
            self._replace(idle)
            return
        idle.row = self.rows.popleft()
        idle.deadline = time.monotonic() + self.settings.timeout_seconds

    def _look(self) -> None:
        """Wait until something happens, and see to it."""
        by_connection = {worker_.connection: worker_ for worker_ in self.workers}
        seconds = min(worker_.deadline for worker_ in self.workers) - time.monotonic()
        seconds = min(max(0.0, seconds), _SECONDS_BETWEEN_LOOKS)
        ready = self._readable([self.main, *by_connection], seconds)
        for connection in ready:
            if connection is self.main:
                self._hear()
            else:
                self._take(by_connection[connection])
        now = time.monotonic()
        for late in [worker_ for worker_ in self.workers if worker_.deadline < now]:
            self._fail(late, f"it took longer than timeout_seconds {self.settings.timeout_seconds}")

    def _readable(self, connections: Sequence[Connection], seconds: float) -> list[Any]:
        if os.getppid() != self.parent:
            raise EOFError
        return wait(connections, seconds)

    def _take(self, speaker: _Worker) -> None:
        """Read what a worker says."""
        try:
            text = speaker.connection.recv_bytes()
            if not speaker.is_ready:
                self._compare(models_of(text))
                speaker.is_ready, speaker.deadline = True, inf
                return
            assert speaker.row is not None
            is_worn = retires(text)
        except (EOFError, OSError, AssertionError, ValueError, KeyError, TypeError):
            self._fail(speaker, None)
            return
        self.replies[speaker.row] = text
        speaker.row, speaker.deadline = None, inf
        if is_worn:
            self._replace(speaker)

    def _compare(self, models: dict[str, str]) -> None:
        """Let no worker judge with other weights than those before it."""
        if self.models not in (None, models):
            raise NotReadyError(
                f"the weights of {shown(sorted(models))} changed while the run went on, and a new "
                "worker has read them"
            )
        self.models = models

    def _fail(self, worker_: _Worker, reason: str | None) -> None:
        """End and replace a worker; the row that it had has no value.

        Args:
            worker_: one that is late or has ended.
            reason: what to say of it; None: how it ended.
        """
        status = self._replace(worker_, starts=worker_.is_ready)
        reason = reason or f"its process ended with {_ending(status)}"
        if not worker_.is_ready:
            raise NotReadyError(reason)
        if worker_.row is not None:
            self.replies[worker_.row] = reply(Failed(reason), retires=True)

    def _replace(self, worker_: _Worker, starts: bool = True) -> int:
        """End a worker, start a new one, and return the status with which the old one ended."""
        self.workers.remove(worker_)
        status = self._end(worker_)
        if starts:
            self._start()
        return status

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("@ll", _SECONDS_TO_PASS_ON, 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        pid = os.fork()
        if not pid:
            for connection in (self.main, *(worker_.connection for worker_ in self.workers)):
                connection.close()
            ours.close()
            settings = self.settings
            try:
                worker.serve(
                    Connection(theirs.detach()), settings.reward, settings.memory_limit_mib
                )
            finally:
                os._exit(1)
        theirs.close()
        deadline = time.monotonic() + START_SECONDS
        self.workers.append(_Worker(pid, Connection(ours.detach()), deadline))

    def _end(self, worker_: _Worker) -> int:
        """End a worker and its descendants, and return its status, see `os.waitpid`."""
        descendants: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(worker_.pid).children(recursive=True)
        os.kill(worker_.pid, signal.SIGKILL)
        _, status = os.waitpid(worker_.pid, 0)
        worker_.connection.close()
        for process in descendants:
            _kill(process)
        # What it had adopted, or had not yet started then, is now a child of this process.
        known = {other.pid for other in self.workers}
        while orphans := [p for p in psutil.Process().children() if p.pid not in known]:
            for process in orphans:
                _kill(process)
                process.wait()
        return status

    def end(self) -> None:
        """End all workers."""
        while self.workers:
            self._end(self.workers.pop())


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def main(file_descriptor: int) -> NoReturn:
    """Keep workers for the process at the other end of a socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # what stops the run closes the socket
    worker.adopt_orphans()
    connection = Connection(file_descriptor)
    keeper = Keeper(connection, connection.recv())
    try:
        keeper.run()
    except (EOFError, ConnectionError):
        pass
    except NotReadyError as error:
        connection.send(str(error))
    except BaseException:
        traceback.print_exc()
    finally:
        keeper.end()
        os._exit(0)
