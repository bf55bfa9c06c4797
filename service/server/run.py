"""Running the application: the port is taken and the gallery tried before anything is promised."""

import asyncio
import logging
import os
import socket
from functools import partial
from tempfile import TemporaryDirectory

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from index.errors import LookalikeError
from service.app import create_app
from service.observability.logging import configure
from service.observability.metrics import FOLDER_VARIABLE, Telemetry
from service.observability.tracing import Tracing
from service.server.protocol import BACKLOG, Connection, Server
from service.settings import Settings
from service.state import open_state

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 30
"""Given to accepted requests when the service is told to end."""
_HEALTHY_SECONDS = 30
"""Given to a process to say that it lives; while it starts on a busy machine it cannot."""


def run(settings: Settings, *, announce: str = "") -> None:
    """Serves until interrupted. Mistakes in the settings are raised here, not logged from a half-started server."""
    configure(settings)
    asyncio.run(_try(settings))
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if not settings.keys:
            log.warning("NO API KEYS: everybody who reaches %s may search, change and re-index the gallery", address)
        print(f"Lookalike serves on {address} (stop with Ctrl-C)", flush=True)
        if announce:
            print(announce.format(address=address), flush=True)
        config = uvicorn.Config(
            partial(_application, settings),
            factory=True,
            log_config=None,
            access_log=False,
            http=Connection,
            backlog=BACKLOG,
            workers=settings.workers,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            timeout_worker_healthcheck=_HEALTHY_SECONDS,
        )
        if settings.workers == 1:
            Server(config).run(sockets=[listener])
            return
        with TemporaryDirectory(prefix="lookalike-metrics-") as folder:
            os.environ[FOLDER_VARIABLE] = folder  # for the processes to come: each starts anew
            _Workers(config, sockets=[listener]).run()


class _Workers(Multiprocess):
    """Processes that answer. Told to end, the port is theirs alone: it closes when the last of them has closed it."""

    def terminate_all(self) -> None:
        super().terminate_all()
        for listener in self.sockets:
            listener.close()


def _application(settings: Settings) -> FastAPI:
    configure(settings)  # once more in each process
    return create_app(settings)


async def _try(settings: Settings) -> None:
    async with open_state(settings, Telemetry(Tracing())) as state:
        if state.keys is not None and not state.keys.list():
            log.warning(
                "NO KEY YET in %s: every request is refused; make one with `lookalike keys create NAME --scope admin`",
                settings.keys,
            )
        if state.active_model.loaded is None:
            log.warning(
                "EMPTY GALLERY %s: there is nothing to search yet; index a catalogue with `lookalike reindex`, and the "
                "service follows by itself",
                settings.gallery,
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
