"""The command line as its users run it: in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lookalike(*arguments: str | Path, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    """Runs a verb to its end; output is captured, the exit code is the caller's to check."""
    command = [str(python), "-m", "lookalike", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def run_server(*arguments: str | Path, python: str | Path = sys.executable) -> Iterator[str]:
    """Runs a verb that serves, with `--port 0`, and yields the address that it announces."""
    command = [str(python), "-m", "lookalike", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        told = ""
        while not (found := re.search(r"serves on (http://\S+)", told)):
            line = process.stdout.readline()
            assert line, f"{' '.join(command)} ended instead of serving: {told}"
            told += line
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15), "the server must end when it is told to"
        process.stdout.close()
