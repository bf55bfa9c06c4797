"""Runs the application: takes the port and opens the gallery once before any request is accepted."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
from functools import partial
from tempfile import TemporaryDirectory

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

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
_HEALTHCHECK_SECONDS = 30
"""Time for a process to report that it is alive; while it starts on a busy machine it cannot."""


def run(settings: Settings, *, announce: str = "") -> None:
    """Serves until interrupted. Invalid settings raise here instead of being logged by a half-started server."""
    configure(settings)
    configure_allocator()
    asyncio.run(_check_start(settings))
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
            Server(config).run(sockets=[listener])
            return
        with TemporaryDirectory(prefix="lookalike-metrics-") as folder:
            os.environ[FOLDER_VARIABLE] = folder  # inherited by the server processes
            _Workers(config, sockets=[listener]).run()


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
    """Server processes whose parent closes the port at shutdown, so that it closes when the last of them does."""

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
