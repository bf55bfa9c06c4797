"""The nodes of a Qdrant cluster: requests go to one that answers."""

import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from index._util.imports import require
from index.gallery.errors import IndexDamaged, IndexUnavailable
from index.gallery.vectors.qdrant.settings import QdrantSettings

API_KEY_VARIABLE = "LOOKALIKE_QDRANT_API_KEY"
_REST_SECONDS = 2.0
"""How long a node that failed is asked last."""
_BEHIND_SECONDS = 0.05
"""After how long nodes that are not current are asked again."""
_REFUSALS = ("INVALID_ARGUMENT", "ALREADY_EXISTS", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED")
"""Codes of requests that every node refuses."""
_LAST_NODE = re.compile(r"^[A-Z_]+: ipv[46]:\S+: ")
_OPTIONS = {
    # A node that comes back is used within a second; by default gRPC waits for up to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Identity only: to compress vectors takes the server longer than to search them, and hardly shortens them.
    "grpc.compression_enabled_algorithms_bitset": 1,
}
Service = Literal["Points", "Collections"]


@cache
def messages() -> Any:
    """Returns the messages of Qdrant's gRPC interface."""
    return require("qdrant_client.grpc", "cluster")


class Nodes:
    """Sends requests to the nodes of one cluster; any number of threads may use it."""

    def __init__(self, nodes: tuple[tuple[str, int], ...], settings: QdrantSettings) -> None:
        self._nodes = nodes
        self._settings = settings
        self._next = itertools.count()
        self._failed = [-_REST_SECONDS] * len(nodes)
        self._lock = threading.Lock()
        self._channels: dict[int, Any] = {}
        self._stubs: dict[tuple[int, Service], Any] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def call(
        self,
        service: Service,
        method: str,
        request: Any,
        timeout: float | None = None,
        *,
        is_current: Callable[[int, float], bool] = lambda node, timeout: True,
    ) -> Any:
        """Sends a request to the nodes in turn until one of them answers, of those that are current.

        Raises IndexUnavailable if none does in time, and IndexDamaged if most do not have the collection.
        """
        seconds = timeout or self._settings.timeout
        deadline = time.monotonic() + 2 * seconds
        while True:
            missing, is_behind, reason = 0, False, "no time is left"
            for node in self._order():
                left = min(seconds, deadline - time.monotonic())
                if left <= 0:
                    break
                try:
                    if is_current(node, left):
                        return self.ask(node, service, method, request, left)
                    code, reason = "BEHIND", "it has not yet learned of the last changes"
                    is_behind = True
                except require("grpc", "cluster").RpcError as error:
                    code, reason = error.code().name, str(error.details())
                if code in _REFUSALS:
                    raise IndexUnavailable(
                        f"Qdrant refuses a request: {_shorten(reason)}.", "Check its address and key."
                    )
                # A node that has just started may not know a collection yet.
                missing += code == "NOT_FOUND"
                if code != "NOT_FOUND":
                    self._failed[node] = time.monotonic()
            if not is_behind or time.monotonic() + _BEHIND_SECONDS > deadline:
                break
            time.sleep(_BEHIND_SECONDS)
        if 2 * missing > len(self._nodes):
            raise IndexDamaged(f"{_shorten(reason)}.", "Rebuild it: lookalike gallery compact.")
        hosts = ", ".join(f"{host}:{port}" for host, port in self._nodes)
        raise IndexUnavailable(
            f"Qdrant does not answer at {hosts}: {_shorten(reason)}.",
            "Start its nodes, or correct the address: its ports are those of gRPC.",
        )

    def ask(self, node: int, service: Service, method: str, request: Any, timeout: float) -> Any:
        """Sends a request to one node; raises what gRPC reports."""
        return getattr(self._stub(node, service), method)(request, timeout=timeout)

    def _order(self) -> list[int]:
        """Returns the nodes in the order in which to try them: by turns, those that failed lately last."""
        first, now = next(self._next), time.monotonic()
        turns = [(first + number) % len(self._nodes) for number in range(len(self._nodes))]
        return sorted(turns, key=lambda node: now - self._failed[node] < _REST_SECONDS)

    def _stub(self, node: int, service: Service) -> Any:
        stub = self._stubs.get((node, service))
        if stub is None:
            with self._lock:
                channel = self._channels.get(node) or self._connect(*self._nodes[node])
                self._channels[node] = channel
                for name in ("Points", "Collections"):
                    self._stubs[node, name] = getattr(messages(), f"{name}Stub")(channel)
                stub = self._stubs[node, service]
        return stub

    def close(self) -> None:
        """Closes the connections; a later request opens them again."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            self._stubs.clear()

    def _connect(self, host: str, port: int) -> Any:
        key = os.environ.get(API_KEY_VARIABLE)
        connection = require("qdrant_client.connection", "cluster")
        name = f"[{host}]" if ":" in host else host
        return connection.get_channel(
            name, port, self._settings.tls, metadata=[("api-key", key)] if key else [], options=_OPTIONS
        )


def _shorten(reason: str) -> str:
    """Returns the cause without the address of the node that was asked last: else each repetition would be logged."""
    line = (reason.strip().splitlines() or ["no reason given"])[0].rstrip(".!:")
    line = _LAST_NODE.sub("", line.rpartition("last error: ")[2])
    return line if len(line) <= 200 else f"{line[:197]}..."
