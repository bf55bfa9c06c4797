"""Readiness: red whenever searches cannot be answered, within a bounded time, and green again afterwards."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest

from service import readiness
from service.auth.api_keys import KeyRing
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import block_gallery
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PHOTO = {"image": tiny_photo(2, 5)}


@pytest.fixture
def own(settings: Settings, tmp_path: Path) -> Settings:
    """Settings of a service with a gallery of its own, which a test may damage."""
    assert settings.bundle
    return settings.model_copy(update={"gallery": make_tiny_gallery(tmp_path / "gallery", settings.bundle)})


@pytest.fixture(autouse=True)
def fresh_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks again at each probe."""
    monkeypatch.setattr(readiness, "KEPT_SECONDS", -1.0)
    yield


def not_ready(client: httpx.Client) -> str:
    """Returns the reason after checking that probe and metric agree, and that neither takes long."""
    started = time.monotonic()
    reason = str(problem(client.get("/readyz"), 503, "not-ready")["detail"])
    assert time.monotonic() - started < 10, "the limit is 1.5 seconds; a busy machine takes longer"
    assert client.get("/healthz").status_code == 200
    return reason


def remove(store: Path) -> None:
    store.unlink()


def empty(store: Path) -> None:
    os.truncate(store, 0)


def cut(store: Path) -> None:
    os.truncate(store, store.stat().st_size // 2)


def overwrite(store: Path) -> None:
    content = store.read_bytes()
    with store.open("r+b") as file:
        file.write(bytes(len(content)))


def replace(store: Path) -> None:
    store.with_name("copy").write_bytes(store.read_bytes())
    store.with_name("copy").replace(store)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove, "catalogue.sqlite was deleted, replaced or cut"),
        (empty, "catalogue.sqlite was deleted, replaced or cut"),
        (cut, "catalogue.sqlite was deleted, replaced or cut"),
        (overwrite, "catalogue.sqlite cannot be read: "),
        (replace, "catalogue.sqlite was deleted, replaced or cut"),
    ],
)
def test_a_store_that_cannot_be_read_is_named(own: Settings, damage: object, reason: str) -> None:
    assert callable(damage)
    with serving(own) as client:
        assert client.get("/readyz").status_code == 200
        damage(Path(own.gallery) / "catalogue.sqlite")
        found = not_ready(client)
        assert found.startswith(reason) and "/" not in found
        metrics = client.get("/metrics")
        assert metrics.status_code == 200 and "lookalike_ready 0.0" in metrics.text


def test_a_store_without_permission_is_named(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the system's answer, because root may read everything."""
    with serving(own) as client:
        stat = Path.stat

        def deny(self: Path, **options: bool) -> os.stat_result:
            if self.name == "catalogue.sqlite":
                raise PermissionError(13, "Permission denied", str(self))
            return stat(self, **options)

        monkeypatch.setattr(Path, "stat", deny)
        assert not_ready(client) == "catalogue.sqlite cannot be read: Permission denied."
        monkeypatch.undo()
        monkeypatch.setattr(readiness, "KEPT_SECONDS", -1.0)
        assert client.get("/readyz").status_code == 200


def test_a_gallery_that_does_not_respond_makes_the_probe_neither_hang_nor_pile_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "MAX_SECONDS", 0.3)
    with serving(settings) as client:
        blocker = block_gallery(settings, monkeypatch, "check")
        try:
            for _ in range(5):
                assert not_ready(client) == "The gallery has not responded for 0.3 seconds."
            assert blocker.started.acquire(timeout=10) and not blocker.started.acquire(blocking=False), "one thread"
        finally:
            blocker.released.set()
        deadline = time.monotonic() + 20
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("max_requests", [2, 64])
def test_searches_that_are_stuck_are_reported(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, max_requests: int
) -> None:
    monkeypatch.setattr(readiness, "STUCK_SECONDS", 0.5)
    with serving(settings.model_copy(update={"max_requests": max_requests})) as client:
        blocker = block_gallery(settings, monkeypatch, "search")
        body = {"image": PHOTO["image"]}
        searches = [Thread(target=client.post, args=("/v1/search",), kwargs={"files": body}) for _ in range(40)]
        for search in searches:
            search.start()
        try:
            deadline = time.monotonic() + 20
            while client.get("/readyz").status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert not_ready(client) == "All places for searches have been taken for 0.5 seconds."
        finally:
            blocker.released.set()
            for search in searches:
                search.join()
        assert client.get("/readyz").status_code == 200


def test_searches_that_are_only_busy_are_not_reported(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "STUCK_SECONDS", 0.5)
    with serving(settings.model_copy(update={"max_requests": 1})) as client:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert client.post("/v1/search", files=PHOTO).status_code == 200
            assert client.get("/readyz").status_code == 200


def test_an_unreadable_key_file_is_reported_once_and_recovers(
    own: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    token = KeyRing(path).create("shop", ["search"])
    bearer, content = {"Authorization": f"Bearer {token}"}, path.read_bytes()
    caplog.set_level(logging.INFO, "service")
    with serving(own.model_copy(update={"keys": path})) as client:
        assert client.get("/v1/status", headers=bearer).status_code == 200
        path.write_bytes(content[:-20])
        for _ in range(3):
            body = problem(client.get("/v1/status", headers=bearer), 503, "keys-unreadable")
            assert str(path) not in body["detail"]
        problem(client.get("/v1/status"), 401, "key-missing")
        assert not_ready(client) == "The service cannot read its API keys, so it refuses every request."
        damaged = [record for record in caplog.records if "is damaged" in record.getMessage()]
        assert len(damaged) == 1 and str(path) in damaged[0].getMessage()
        path.write_bytes(content)
        assert client.get("/v1/status", headers=bearer).status_code == 200
        assert client.get("/readyz").status_code == 200
        assert [record.getMessage() for record in caplog.records].count("the key file can be read again") == 1


def test_many_probes_cost_as_much_as_a_few(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "KEPT_SECONDS", 1000.0)
    with serving(settings) as client:
        assert client.get("/readyz").status_code == 200
        blocker = block_gallery(settings, monkeypatch, "check")
        blocker.released.set()
        assert all(client.get("/readyz").status_code == 200 for _ in range(20))
        assert not blocker.started.acquire(blocking=False)
