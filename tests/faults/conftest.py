"""Processes that are killed on purpose, and end whatever happens."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 800
"""Time limit of a file: it ends one that hangs."""


@pytest.fixture
def run_python(tmp_path):
    """Run a Python file to its end and return the JSON that it prints."""

    def run(*command):
        output = tmp_path / "output.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = output.read_text()
        start = text.rfind("\n{\n") + 1
        assert text[start:].startswith("{"), text[-6000:]
        return json.loads(text[start:])

    return run
