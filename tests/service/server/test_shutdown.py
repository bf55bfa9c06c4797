"""Graceful shutdown: no request is cut off, and it does not take long."""

import asyncio
import io
import json
import logging
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from index._util.system import is_running
from index.gallery.store.sqlite_jobs import SQLiteJobs
from service.observability.logging import TextFormatter, current_request_id
from service.server.shutdown import draining
from service.settings import Settings
from service.state import ServiceState
from tests.service.conftest import INTERRUPTED, problem, running
from tests.support.tiny_gallery import tiny_photo

PHOTO = {"image": tiny_photo(2, 5)}


@pytest.mark.slow
def test_during_the_delay_clients_are_sent_elsewhere_and_no_request_is_cut_off(
    settings: Settings, tmp_path: Path
) -> None:
    with running(settings, tmp_path, LOOKALIKE_DRAIN_SECONDS="2") as service:
        begun = threading.Semaphore(0)

        def ask_until_sent_away() -> tuple[int, bool]:
            answered = 0
            with httpx.Client(base_url=service.address, timeout=60) as client:
                while True:
                    response = client.post("/v1/search?limit=1", files=PHOTO)
                    assert response.json()["items"][0]["id"] == "ball-blue"
                    answered += 1
                    begun.release()
                    if response.headers.get("connection") == "close":
                        return answered, True

        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(ask_until_sent_away) for _ in range(6)]
            for _ in range(30):
                begun.acquire()
            assert httpx.get(f"{service.address}/readyz").status_code == 200
            service.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 2
            while (ready := httpx.get(f"{service.address}/readyz")).status_code == 200:
                assert time.monotonic() < deadline
            assert problem(ready, 503, "not-ready")["detail"] == "The service is shutting down."
            assert all(answered and sent_away for answered, sent_away in (client.result() for client in clients))
        assert service.process.wait(30) in (0, -signal.SIGTERM)
    assert "500" not in re.findall(r"/v1/search (\d+) in", service.log.read_text())


def until_refused(place: httpx.URL) -> None:
    with pytest.raises(ConnectionRefusedError):
        while True:
            socket.create_connection((place.host, place.port or 80)).close()
            time.sleep(0.05)


@pytest.mark.slow
def test_with_several_processes_the_port_closes_before_the_last_answer(settings: Settings, tmp_path: Path) -> None:
    photo = PHOTO["image"]
    head = "POST /v1/search HTTP/1.1", "Host: localhost", "Content-Type: image/jpeg", f"Content-Length: {len(photo)}"
    with running(settings, tmp_path, LOOKALIKE_WORKERS="2", LOOKALIKE_DRAIN_SECONDS="0") as service:
        place = httpx.URL(service.address)
        with socket.create_connection((place.host, place.port or 80), timeout=60) as slow:
            slow.sendall("\r\n".join((*head, "Expect: 100-continue", "\r\n")).encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 100")  # its body is being read
            service.process.send_signal(signal.SIGTERM)
            until_refused(place)
            slow.sendall(photo)
            assert slow.recv(12) == b"HTTP/1.1 200"


@pytest.mark.slow
@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_request_that_is_on_its_way_when_the_port_closes_is_answered(
    settings: Settings, tmp_path: Path, workers: str, asked_before: bool
) -> None:
    asked = "POST", "/v1/search", PHOTO["image"], {"Content-Type": "image/jpeg"}
    with running(settings, tmp_path, LOOKALIKE_WORKERS=workers, LOOKALIKE_DRAIN_SECONDS="0") as service:
        place = httpx.URL(service.address)
        with closing(HTTPConnection(place.host, place.port, timeout=60)) as late:
            late.connect()
            if asked_before:
                late.request(*asked)
                assert late.getresponse().read().startswith(b"{")
            else:  # so that some process has accepted it
                assert httpx.get(f"{service.address}/healthz", timeout=60).status_code == 200
            service.process.send_signal(signal.SIGTERM)
            until_refused(place)
            late.request(*asked)
            answer = late.getresponse()
            assert (answer.status, answer.headers["connection"]) == (200, "close")


@pytest.mark.slow
def test_server_processes_end_when_their_parent_is_killed(settings: Settings, tmp_path: Path) -> None:
    with running(settings, tmp_path, LOOKALIKE_WORKERS="2", LOOKALIKE_DRAIN_SECONDS="0") as service:
        place = httpx.URL(service.address)
        assert httpx.get(f"{service.address}/healthz", timeout=60).status_code == 200
        children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
        assert len(children) >= 2
        service.process.kill()
        service.process.wait(20)
        until_refused(place)
        with socket.create_server((place.host, place.port or 80)):
            pass  # the port is free for the next service
        deadline = time.monotonic() + 30
        while any(is_running(int(child)) for child in children):
            assert time.monotonic() < deadline, "the server processes must end"
            time.sleep(0.1)
        assert "was killed; shutting down" in service.log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, INTERRUPTED)])
def test_a_client_that_watches_a_job_does_not_delay_shutdown(
    settings: Settings, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    here = running(settings, tmp_path, LOOKALIKE_DRAIN_SECONDS="0")
    with closing(SQLiteJobs(Path(settings.gallery))) as history, here as service:
        job = history.begin("catalogue.csv", "0" * 16)
        with httpx.stream("GET", f"{service.address}/v1/jobs/{job.record.id}/events", timeout=60) as events:
            lines = events.iter_lines()
            assert next(lines) == "event: progress"
            service.process.send_signal(number)
            lines_left = [line for line in lines if line]
        assert json.loads(lines_left[0].removeprefix("data: "))["state"] == "running"
        assert service.process.wait(20) == code, "the stream ends, and nothing waits for it"
        job.update(state="cancelled")


@pytest.mark.parametrize(("repeat_seconds", "is_ended"), [(1000.0, False), (-1.0, True)])
def test_a_signal_that_all_processes_receive_twice_counts_once(repeat_seconds: float, is_ended: bool) -> None:
    """The parent forwards it to the others, which have received it already; a later one ends the delay."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    state = SimpleNamespace(settings=SimpleNamespace(drain_seconds=1000), shutting_down=False)

    async def receive_twice() -> None:
        with draining(cast(ServiceState, state), repeat_seconds=repeat_seconds):
            signal.raise_signal(signal.SIGTERM)
            assert state.shutting_down and not ended
            signal.raise_signal(signal.SIGTERM)
            assert ended == [signal.SIGTERM] * is_ended

    try:
        asyncio.run(receive_twice())
        signal.raise_signal(signal.SIGTERM)
        assert len(ended) == is_ended + 1, "afterwards the former handler is restored"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_log_of_a_shutdown_has_the_id_of_no_request() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger = logging.getLogger("service.server.shutdown")
    before = signal.signal(signal.SIGTERM, lambda number, frame: logger.warning("ended"))
    state = SimpleNamespace(settings=SimpleNamespace(drain_seconds=0.01), shutting_down=False)

    async def receive_within_a_request() -> None:
        with draining(cast(ServiceState, state)):
            current_request_id.set("some-request")
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)

    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        asyncio.run(receive_within_a_request())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        signal.signal(signal.SIGTERM, before)
    assert "shutting down in" in stream.getvalue() and "ended" in stream.getvalue()
    assert "some-request" not in stream.getvalue()
