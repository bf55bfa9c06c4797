"""The plain training loop in its own process: importing our trainer changes how PyTorch's threads wait."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Plan(NamedTuple):
    """What both sides have in common."""

    files: list[str]
    labels: list[str]
    model: str
    side: int
    crop_scale: list[float]
    batch_size: int
    workers: int
    threads: int
    embedding_size: int
    learning_rate: float
    proxy_rate: float
    weight_decay: float


class PlainLoopProcess:
    """The loop in its own process, which trains only on request."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, what: str) -> float:
        """Trains an `epoch`, or the `network` alone, and returns its photos per second."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError("the plain loop ended; its error is above")
        return float(reply)


@contextlib.contextmanager
def plain_loop(plan: Plan, folder: Path) -> Iterator[PlainLoopProcess]:
    """Starts the loop with the environment of a process that never imported our trainer."""
    file = folder / "plan.json"
    file.write_text(json.dumps(plan._asdict()), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, str(Path(__file__).with_name("_plain_loop.py")), str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield PlainLoopProcess(process)
