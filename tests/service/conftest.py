"""Fixtures: a real service over a real bundle and gallery, behind a real socket."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.server.protocol import connection_class
from service.settings import Settings
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Returns settings whose limits are small enough to reach in a test."""
    root = tmp_path_factory.mktemp("shop")
    bundle = make_tiny_bundle(root / "bundle")
    examples = root / "examples"
    examples.mkdir()
    (examples / "blue ball.jpg").write_bytes(tiny_photo(2, 5))
    (examples / "notes.txt").write_text("not a photo")
    return Settings(
        gallery=make_tiny_gallery(root / "gallery", bundle),
        bundle=bundle,
        examples=examples,
        max_body_bytes=300_000,
        max_pixels=1_000_000,
        threads=1,
    )


@pytest.fixture(scope="session")
def client(settings: Settings) -> Iterator[httpx.Client]:
    with serving(settings) as client:
        yield client


@contextmanager
def serving(settings: Settings, *, root_path: str = "") -> Iterator[httpx.Client]:
    """Runs the service in a thread and yields a client of it."""
    with serving_app(create_app(settings), settings, root_path=root_path) as client:
        yield client


@contextmanager
def serving_app(app: FastAPI, settings: Settings, *, root_path: str = "") -> Iterator[httpx.Client]:
    """Runs an application in a thread and yields a client of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=connection_class(settings), log_level="warning", root_path=root_path)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        assert server.started, "the service did not start"
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Checks the shape that all errors share and returns the body."""
    body: dict[str, Any] = response.json()
    assert response.status_code == status, body
    assert response.headers["content-type"] == "application/problem+json"
    assert set(body) == {"type", "title", "status", "detail", "remedy", "request_id"}
    assert (body["type"], body["status"]) == (f"/problems/{kind}", status)
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["title"] and body["detail"] and body["remedy"]
    return body


INTERRUPTED = 130


class ServiceProcess(NamedTuple):
    """A service in its own process."""

    address: str
    process: subprocess.Popen[str]
    log: Path
    ready: str
    """The line that reports that requests are accepted."""


@contextmanager
def running(settings: Settings, folder: Path, **variables: str) -> Iterator[ServiceProcess]:
    """Runs `lookalike serve` in its own process."""
    log = folder / "log"
    command = [sys.executable, "-m", "lookalike", "serve", "--gallery", str(settings.gallery), "--port", "0"]
    environment = {**os.environ, "LOOKALIKE_THREADS": "1", **variables}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert process.stdout
    try:
        line = process.stdout.readline()
        match = re.search(r"http://[^\s\"]+", line)
        assert match, log.read_text()
        yield ServiceProcess(match[0], process, log, line)
    finally:
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM, -signal.SIGKILL, INTERRUPTED), log.read_text()
        process.stdout.close()
