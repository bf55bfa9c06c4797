"""Replicas of the service as processes of their own, which may be killed and started again at the same address."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.postgres import free_port


class Replica:
    """One `lookalike serve` on a port that it keeps, with a cache folder and a log of its own."""

    def __init__(self, gallery: str, folder: Path, **settings: object) -> None:
        """`settings` are variables LOOKALIKE_..., in small letters and without the prefix."""
        folder.mkdir(parents=True)
        self._folder = folder
        self.cache = folder / "cache"
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        values = {"gallery": gallery, "cache": self.cache, **settings}
        self._environment = {f"LOOKALIKE_{name.upper()}": str(value) for name, value in values.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "lookalike", "serve", "--port", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            environment = {**os.environ, **self._environment}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait(self, seconds: float = 60) -> None:
        """Waits until searches can be answered."""
        deadline = time.monotonic() + seconds
        while self.probe("/readyz")[0] != 200:
            assert self._process and self._process.poll() is None, f"the replica ended: {self.log()}"
            assert time.monotonic() < deadline, f"the replica does not become ready: {self.log()}"
            time.sleep(0.1)

    def probe(self, path: str, timeout: float = 10) -> tuple[int, float]:
        """Returns the status of a GET, 0 if there is no answer, and the seconds that it took."""
        started = time.monotonic()
        try:
            status = httpx.get(self.address + path, timeout=timeout).status_code
        except httpx.TransportError:
            status = 0
        return status, time.monotonic() - started

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def compactions(self) -> list[int]:
        """Returns the ids of the processes that compact for this replica now."""
        if self._process is None:
            return []
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(number) for children in tasks for number in children.read_text().split()]

    def kill(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Ends the replica as an operator does; returns its exit code."""
        assert self._process
        self._process.terminate()
        code = self._process.wait(30)
        self._process = None
        return code


@contextmanager
def run_replicas(gallery: str, folder: Path, count: int = 2, **settings: object) -> Iterator[list[Replica]]:
    """Runs replicas of a gallery that exists, and kills at the end those that were not stopped."""
    replicas = [Replica(gallery, folder / f"replica-{number}", **settings) for number in range(count)]
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait()
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()
