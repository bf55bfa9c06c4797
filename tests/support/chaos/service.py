"""The service under test as a real process that can be killed and started again."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .client import Connection, ConnectionBroken, encode_request

START_SECONDS = 120.0
STOP_SECONDS = 40.0
_HEALTHY = encode_request("GET", "/readyz")


class StartFailed(Exception):
    """The service ended, or was not ready in time; the message has its output."""


class ServiceProcess:
    """Runs `lookalike serve` over a gallery; each start takes a free port and a temporary folder of its own."""

    def __init__(self, gallery: Path, folder: Path, *, workers: int, settings: Mapping[str, str]) -> None:
        self._gallery = gallery
        self._folder = folder
        self._workers = workers
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / "service.log"
        self.port = 0
        self.starts = 0
        self.kills = 0
        self.killed_at = 0.0
        self.up = asyncio.Event()
        """Set while the service is ready to answer."""

    @property
    def temporary_folder(self) -> Path:
        """Where the current process puts temporary files."""
        return self._folder / f"tmp-{self.starts}"

    async def start(self) -> float:
        """Starts the process and waits until it is ready; returns how long that took."""
        began = time.monotonic()
        self.starts += 1
        self.temporary_folder.mkdir()
        variables = {f"LOOKALIKE_{name}": value for name, value in self._settings.items()}
        environment = {**os.environ, **variables, "TMPDIR": str(self.temporary_folder)}
        command = [sys.executable, "-m", "lookalike", "serve", "--gallery", str(self._gallery), "--port", "0"]
        command += ["--workers", str(self._workers)]
        with self.log.open("ab") as log:
            offset = log.tell()
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self.port = await self._read_port(offset)
            while not await self._is_ready():
                self._check_running(offset)
                if time.monotonic() - began > START_SECONDS:
                    raise StartFailed(f"It was not ready after {START_SECONDS:.0f} s: {self._output(offset)}")
                await asyncio.sleep(0.05)
        except StartFailed:
            self.abort()
            os.truncate(self.log, offset)  # it keeps the output of those that served
            raise
        self.up.set()
        return time.monotonic() - began

    async def _read_port(self, offset: int) -> int:
        while not (found := re.search(r"serves on http://[^:]+:(\d+)", self._output(offset))):
            self._check_running(offset)
            await asyncio.sleep(0.02)
        return int(found[1])

    def _check_running(self, offset: int) -> None:
        if self._process is None or self._process.poll() is not None:
            raise StartFailed(f"It ended instead of serving: {self._output(offset)}")

    def _output(self, offset: int) -> str:
        with self.log.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    async def _is_ready(self) -> bool:
        connection = Connection(self.port)
        try:
            return (await connection.send(_HEALTHY)).status == 200
        except ConnectionBroken:
            return False
        finally:
            connection.close()

    async def kill(self) -> None:
        """Kills all processes of the service, as a power failure does."""
        assert self._process
        self.up.clear()
        self._count_kill()
        os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def kill_worker(self, number: int) -> None:
        """Kills one of several server processes, which the parent replaces."""
        workers = self.processes()[1:]
        if workers:
            self._count_kill()
            os.kill(workers[number % len(workers)], signal.SIGKILL)

    def _count_kill(self) -> None:
        self.kills += 1
        self.killed_at = time.monotonic()

    async def stop(self) -> int:
        """Stops the service as an operator does, and returns its exit code."""
        assert self._process
        self.up.clear()
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, STOP_SECONDS)

    def abort(self) -> None:
        """Ends whatever still runs."""
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def processes(self) -> list[int]:
        """Returns the ids of the service and of its server processes."""
        if self._process is None or self._process.poll() is not None:
            return []
        return [self._process.pid, *_server_children(self._process.pid)] if self._workers > 1 else [self._process.pid]

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that the processes hold now, and the sum of their peaks."""
        sizes = [_status(process) for process in self.processes()]
        return sum(one.get("VmRSS", 0) for one in sizes), sum(one.get("VmHWM", 0) for one in sizes)

    def open_files(self) -> int:
        return sum(len(list(Path(f"/proc/{process}/fd").iterdir())) for process in self.processes())


def _server_children(process: int) -> list[int]:
    """Returns the children that serve: not the resource tracker of multiprocessing."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    except OSError:  # a child ended just now
        return []
    return [child for child, command in commands.items() if b"spawn_main" in command or b"forkserver" in command]


def _status(process: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return {}
    return {name: 1024 * int(size) for name, size in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE)}
