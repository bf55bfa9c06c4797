"""A Qdrant cluster of real processes on loopback, each node with a storage folder of its own."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from index._util.system import exclusive_lock, exclusive_lock_if_free
from index.gallery import Gallery
from index.gallery.settings import GallerySettings
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.vectors.qdrant.index import QdrantIndex
from index.gallery.vectors.qdrant.settings import QdrantSettings

QUICK = QdrantSettings(shards=3, replicas=2, apply_delay=0, write_timeout=20)
"""For tests: collections that are created quickly, and changes that no search has to be waited for."""
QUICK_OPTIONS = f"?{urlencode(QUICK.model_dump(exclude_unset=True))}"
"""The same as options of an address."""
only_in_test_cluster = pytest.mark.skipif(not os.environ.get("CLUSTER"), reason="run by `make test-cluster`")
"""Marks a test that takes long; those without it are a representative part for `make test`."""
BINARY = Path(__file__).parents[2] / ".servers" / "qdrant"


class Node:
    """One server; it may be killed and started again."""

    def __init__(self, folder: Path, number: int, ports: tuple[int, int, int], first: int | None) -> None:
        self._folder = folder / f"node-{number}"
        self._folder.mkdir(parents=True)
        self.http, self.grpc, self.p2p_port = ports
        self.p2p = f"http://127.0.0.1:{self.p2p_port}"
        self._arguments = ["--uri", self.p2p]
        if first is not None:
            self._arguments += ["--bootstrap", f"http://127.0.0.1:{first}"]
        self._process: subprocess.Popen[bytes] | None = None

    def be_reached_at(self, port: int) -> None:
        """Lets the other nodes reach this one at a port that leads to its own; before its first start."""
        self.p2p = f"http://127.0.0.1:{port}"
        self._arguments[1] = self.p2p

    def start(self) -> None:
        settings = {
            "SERVICE__HOST": "127.0.0.1",
            "SERVICE__HTTP_PORT": self.http,
            "SERVICE__GRPC_PORT": self.grpc,
            "CLUSTER__ENABLED": "true",
            "CLUSTER__P2P__PORT": self.p2p_port,
            # Nodes that are killed and started again must be noticed within a test.
            "CLUSTER__CONSENSUS__TICK_PERIOD_MS": 50,
            "STORAGE__STORAGE_PATH": self._folder / "storage",
            "STORAGE__SNAPSHOTS_PATH": self._folder / "snapshots",
            "LOG_LEVEL": "WARN",
        }
        environment = {**os.environ, **{f"QDRANT__{name}": str(value) for name, value in settings.items()}}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [BINARY, "--disable-telemetry", *self._arguments],
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Waits until the node serves requests."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/readyz", timeout=5):
                    return
            except OSError:
                assert self._process and self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < deadline, f"{self._folder.name} does not start"
                time.sleep(0.05)

    def pause(self) -> None:
        """Stops the process without ending it, as a machine that hangs."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Cluster:
    """Three nodes by default; the first one founds the cluster."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        ports = _free_ports(3 * count)
        triples = [(ports[at], ports[at + 1], ports[at + 2]) for at in range(0, len(ports), 3)]
        self.nodes = [
            Node(folder, number, triple, triples[0][2] if number else None) for number, triple in enumerate(triples)
        ]

    def start(self) -> None:
        for node in self.nodes:
            node.start()
            node.wait()

    def address(self, prefix: str, options: str = "") -> str:
        """Returns the address of a gallery's collections."""
        hosts = ",".join(f"127.0.0.1:{node.grpc}" for node in self.nodes)
        return f"qdrant://{hosts}/{prefix}{options}"

    def collections(self, prefix: str) -> list[str]:
        """Returns the collections of a gallery."""
        listed = self.request("GET", "/collections")["collections"]
        return sorted(one["name"] for one in listed if one["name"].startswith(f"{prefix}."))

    def drop(self, prefix: str) -> None:
        """Removes the collections of a gallery behind its back."""
        for name in self.collections(prefix):
            self.request("DELETE", f"/collections/{name}")

    def request(self, method: str, path: str, body: object = None, *, node: int = 0) -> Any:
        """Sends a request to a node behind the gallery's back; returns its result."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.nodes[node].http}{path}"
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["result"]

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def run_cluster(folder: Path, count: int = 3) -> Iterator[Cluster]:
    """Runs a cluster; skips the test where the server is not installed."""
    if not BINARY.is_file():
        pytest.skip("Qdrant's server is not installed: make .servers/qdrant")
    cluster = Cluster(folder, count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def open_gallery_on(
    address: str,
    directory: Path,
    *,
    settings: QdrantSettings = QUICK,
    gallery_settings: GallerySettings | None = None,
    identity: str = "",
) -> Gallery:
    """Opens a gallery with its items in SQLite and its vectors in Qdrant."""
    directory.mkdir(exist_ok=True)
    store = SQLiteStore(directory, gallery_settings)

    @contextmanager
    def lock(*, wait: bool) -> Iterator[Callable[[], None] | None]:
        path = directory / "build.lock"
        if wait:
            with exclusive_lock(path, timeout=inf):
                yield lambda: None
        else:
            with exclusive_lock_if_free(path) as is_locked:
                yield (lambda: None) if is_locked else None

    index = QdrantIndex(address, store, lock, settings, identity=identity)
    return Gallery(store, index, address=address, settings=gallery_settings)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
