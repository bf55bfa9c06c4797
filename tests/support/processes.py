"""Runs the command line in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lookalike(*arguments: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and captures its output; the caller checks the exit code."""
    command = [str(python), "-m", "lookalike", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def run_server(*arguments: str | Path, python: str | Path = sys.executable) -> Iterator[str]:
    """Runs a command that serves, with `--port 0`, and yields the address that it prints."""
    command = [str(python), "-m", "lookalike", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        output = ""
        while not (found := re.search(r"\bon (http://\S+)", output)):
            line = process.stdout.readline()
            assert line, f"{' '.join(command)} ended instead of serving: {output}"
            output += line
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15), "the server must stop on SIGTERM"
        process.stdout.close()
