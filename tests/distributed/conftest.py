"""Processes that are stopped whatever happens, and one launch whose results many tests read."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SECONDS = 800
"""Time limit of a launch. A process that waits in vain for another fails after 60 seconds."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Tensors of 64 KiB and more give their memory back at once: what is measured is what they hold.
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


@dataclass(frozen=True)
class Results:
    """What one process saw, and what each of two saw, by scenario."""

    one: dict[str, Any]
    two: tuple[dict[str, Any], dict[str, Any]]
    folder: Path


def wait_for_groups(groups: set[int], seconds: float) -> None:
    """Wait until no process of the groups runs any more, and fail if one goes on."""
    end = time.monotonic() + seconds
    while left := [stat for stat in running() if int(stat[2]) in groups]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def running() -> Iterator[list[str]]:
    """Yield state, parent and group of each process that is no zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()[:3]
            if fields[0] != "Z":
                yield fields


def run_together(
    commands: list[list[str]], environments: list[dict[str, str]], cwd: Path, *, fails: bool = False
) -> str:
    """Run commands at the same time and return what they print; all end before this returns."""
    outputs = [cwd / f"output-{number}.txt" for number in range(len(commands))]
    processes = []
    try:
        for command, environment, output in zip(commands, environments, outputs, strict=True):
            with output.open("w") as file:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**os.environ, **ENVIRONMENT, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        codes = [process.wait(SECONDS) for process in processes]
        if fails:
            wait_for_groups({process.pid for process in processes}, seconds=30)
    finally:
        for process in processes:
            # With what it has started itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = "\n".join(output.read_text() for output in outputs)
    assert [code != 0 for code in codes] == [fails] * len(commands), text[-6000:]
    return text


def launch(world_size: int, folder: Path, names: list[str]) -> None:
    """Run scenarios of the worker in so many processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = Path(__file__).with_name("worker.py")
    environments = [
        {
            "WORLD_SIZE": str(world_size),
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(world_size)
    ]
    command = [sys.executable, str(worker), str(folder), *names]
    run_together([command] * world_size, environments, folder)


@pytest.fixture(scope="session")
def run_scenarios(tmp_path_factory):
    """Run scenarios with two processes, then others with one, which may read what the two wrote."""

    def run(two: list[str], one: list[str]) -> Results:
        folder = tmp_path_factory.mktemp("processes")
        launch(2, folder, two)
        launch(1, folder, one)
        seen, first, second = (torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
        return Results(one=seen, two=(first, second), folder=folder)

    return run


@pytest.fixture
def run_alone(tmp_path):
    """Run one command, which may start others, in the test's folder; return what it prints."""

    def run(*command: object, fails: bool = False, **environment: str) -> str:
        return run_together([[*map(str, command)]], [environment], tmp_path, fails=fails)

    return run
