"""Runs the application: takes the port and opens the gallery once before any request is accepted."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from index.errors import LookalikeError
from service.admission import Admission
from service.app import create_app
from service.memory import configure_allocator
from service.observability.logging import JsonFormatter, configure
from service.observability.metrics import FOLDER_VARIABLE, Telemetry
from service.observability.tracing import Tracing
from service.server.connections import BACKLOG
from service.server.protocol import Server, connection_class
from service.settings import Settings
from service.state import open_state

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 30
"""Time for accepted requests to finish at shutdown."""
_RESTART_SECONDS = 2.0
"""Pause before a process that could not start is started again."""
_START_FAILED = 1
"""The exit code of an error that the user can fix."""
_HEALTHCHECK_SECONDS = 30
"""Time for a process to report that it is alive; while it starts on a busy machine it cannot."""


def run(settings: Settings, *, announce: str = "") -> None:
    """Serves until interrupted. What prevents a start raises here instead of being logged by a half-started server."""
    configure(settings)
    configure_allocator()
    try:
        asyncio.run(_check_start(settings))
        _serve(settings, announce)
    except LookalikeError as error:
        if settings.log_format == "text":
            raise  # the command line prints it
        log.critical("%s", error)
        sys.exit(_START_FAILED)


def _serve(settings: Settings, announce: str) -> None:
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if not settings.keys:
            log.warning("NO API KEYS: everybody who reaches %s may search, change and re-index the gallery", address)
        _announce(settings, address, announce)
        config = uvicorn.Config(
            partial(_create_configured_app, settings),
            factory=True,
            log_config=None,
            access_log=False,
            http=connection_class(settings),
            backlog=BACKLOG,
            workers=settings.workers,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            timeout_worker_healthcheck=_HEALTHCHECK_SECONDS,
        )
        if settings.workers == 1:
            try:
                Server(config).run(sockets=[listener])
            except SystemExit as error:  # it could not start, which it has logged
                sys.exit(_START_FAILED if error.code == STARTUP_FAILURE else error.code)
            return
        with _metrics_folder() as folder:
            os.environ[FOLDER_VARIABLE] = str(folder)  # inherited by the server processes
            workers = _Workers(config, sockets=[listener])
            workers.run()
        if workers.have_failed:
            sys.exit(_START_FAILED)


@contextmanager
def _metrics_folder() -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="lookalike-metrics-"))
        except OSError as error:
            raise LookalikeError(
                f"No temporary folder can be created: {error.strerror or error}.",
                "Free space there, or set TMPDIR to another folder.",
            ) from None
        yield Path(folder)


def _announce(settings: Settings, address: str, announce: str) -> None:
    """Prints that requests are accepted, whatever the level of the log, and in its format if that is JSON."""
    if settings.log_format == "json":
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, "Lookalike serves on %s", (address,), None)
        print(JsonFormatter().format(record), flush=True)
        return
    print(f"Lookalike serves on {address} (stop with Ctrl-C)", flush=True)
    if announce:
        print(announce.format(address=address), flush=True)


class _Workers(Multiprocess):
    """Server processes whose parent closes the port at shutdown, so that it closes when the last of them does.

    uvicorn's parent ends all of them when one cannot start. Once the first ones have started, the fault may pass, such
    as a full disk: then the others continue, and it is started again.
    """

    have_failed = False
    """Whether one of the first processes could not start."""

    def init_processes(self) -> None:
        super().init_processes()
        self._first = set(self.processes)

    def keep_subprocess_alive(self) -> None:
        if self.should_exit.is_set():
            return
        super().keep_subprocess_alive()
        failed = {process for process in self.processes if process.process.exitcode == STARTUP_FAILURE}
        self.have_failed = not failed.isdisjoint(self._first)
        if failed and not self.have_failed:
            self.should_exit.clear()
            time.sleep(_RESTART_SECONDS)
            for place, process in enumerate(self.processes):
                if process in failed:
                    self.processes[place] = Process(self.config, self.sockets)
                    self.processes[place].start()

    def terminate_all(self) -> None:
        super().terminate_all()
        for listener in self.sockets:
            listener.close()


def _create_configured_app(settings: Settings) -> FastAPI:
    configure(settings)  # again in each process
    configure_allocator()
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    return create_app(settings)


def _end_with_parent() -> None:
    """Shuts this server process down when its parent was killed: it would keep the port from the next service."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    log.warning("the parent process %s was killed; shutting down", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)


async def _check_start(settings: Settings) -> None:
    """Opens everything once, so that a mistake is reported before the port is taken."""
    telemetry = Telemetry(Tracing())
    async with open_state(settings, telemetry, Admission(settings, telemetry)) as state:
        if state.keys is not None and not state.keys.list():
            log.warning(
                "NO KEY YET in %s: every request is refused; create one with "
                "`lookalike keys create NAME --scope admin`",
                settings.keys,
            )
        if state.active_model.loaded is None:
            log.warning(
                "EMPTY GALLERY %s: there is nothing to search yet; index a catalogue with `lookalike reindex`, and the "
                "service loads its bundle",
                state.gallery.address,
            )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        # Listening before the application is ready: an early request waits instead of being refused.
        listener.listen(2048)
    except OSError as error:
        raise LookalikeError(f"Cannot listen on {host}:{port}: {error.strerror}.", "Choose another --port.") from None
    return listener
