"""Functions that do to their process whatever the response says; workers import them."""

import os
import signal
import subprocess
import time
from pathlib import Path

from lit_rl.rewards import Reward

KEPT = []


def _forks(folder):
    """Children that stay, one of which leaves the family and the session, and a program."""
    for _ in range(3):
        if not os.fork():
            if not os.fork():
                os.setsid()
                _note(folder)
                time.sleep(100)
            _note(folder)
            time.sleep(100)
    program = subprocess.Popen(["sleep", "100"], start_new_session=True)
    _note(folder, program.pid)


def _note(folder, pid=None):
    with open(f"{folder}/pids", "a") as file:
        file.write(f"{pid or os.getpid()}\n")


def _hangs(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _note(folder)
    while True:
        time.sleep(1)


def _grows(folder):
    chunks = []
    while True:
        chunks.append(bytearray(2**20))


def _raises(folder):
    raise ValueError("not\x1b[2J good")


def _leaves(folder):
    raise SystemExit


def _returns_twice(folder):
    os.fork()


ACTIONS = {
    "forks": _forks,
    "hangs": _hangs,
    "hangs in C": lambda folder: 10 ** (10**10),
    "grows": _grows,
    "raises": _raises,
    "exits": lambda folder: os._exit(3),
    "leaves": _leaves,
    "aborts": lambda folder: os.abort(),
    "terminates itself": lambda folder: os.kill(os.getpid(), signal.SIGTERM),
    "keeps 40 MiB": lambda folder: KEPT.append(bytearray(40 * 2**20)),
    "forks and returns twice": _returns_twice,
    "sleeps": lambda folder: time.sleep(0.2),
    "notes": _note,
}
VALUES = {
    "text": ["1.0"],
    "NaN": [float("nan")],
    "two": [1.0, 2.0],
    "none": [],
    "number": 1.0,
    "not applicable": [None],
    "steps": [[0.5, None]],
    "pid": [os.getpid],
}


def obeys(responses: list[str], folder: list[str]) -> list[float]:
    """The length of the response, after doing what it says."""
    (response,) = responses
    if response in ACTIONS:
        ACTIONS[response](folder[0])
    return VALUES.get(response, [float(len(response))])


def hangs_with_a_child(responses: list[str], answers: list[str]) -> list[float]:
    """Nothing, ever; the answers name a folder for the numbers of the processes."""
    subprocess.Popen(["sleep", "100"])
    _hangs(answers[0])
    return []


def fails_on_four(responses: list[str]) -> list[float]:
    """The digit that the response is, divided by 9; it ends its process for a 4."""
    if responses == ["4"]:
        os._exit(1)
    return [float(text) / 9 if text.isdigit() and len(text) == 1 else 0.0 for text in responses]


class NeverReady:
    """What cannot be made anew from its pickle."""

    def __reduce__(self):
        return (int, ("x",))

    def __call__(self, responses):
        return [0.0] * len(responses)


class Judge(Reward):
    """A reward with a frozen model: its weights stand in a file."""

    def __init__(self, file):
        self.file = file

    @property
    def models(self):
        return {"judge": Path(self.file).read_text()}

    def values(self, rollout):
        return obeys(rollout.responses, rollout.columns["folder"])
