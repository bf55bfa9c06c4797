"""The search pipeline: a photo is answered although the bundle is replaced or its client leaves."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest

from service import photos
from service.app import create_app
from service.memory import Share
from service.settings import Settings
from service.url_fetcher import Fetcher
from tests.service.conftest import problem, serving, serving_app
from tests.service.support import Blocker, connect, search_head
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import index_source, tiny_photo, write_tiny_source

PHOTO = tiny_photo(2, 5)


@pytest.mark.slow
def test_a_photo_that_is_decoded_while_the_bundle_is_replaced_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, other = make_tiny_bundle(tmp_path / "one"), make_tiny_bundle(tmp_path / "two", grid=2)
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    with serving(Settings(gallery=gallery, threads=1)) as client:
        decode = photos.decode_query

        def replace_and_decode(*arguments: Any) -> Any:
            monkeypatch.setattr(photos, "decode_query", decode)
            second = index_source(source, gallery=gallery, bundle=other)
            deadline = time.monotonic() + 20
            while client.get("/v1/status").json()["bundle"]["id"] != second.bundle_id:
                client.get("/readyz")
                assert time.monotonic() < deadline, "the service must follow within seconds"
            return decode(*arguments)

        monkeypatch.setattr(photos, "decode_query", replace_and_decode)
        answer = client.post("/v1/search?limit=1", files={"image": tiny_photo(2, 5)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["items"][0]["id"] == "ball-blue"


def test_a_client_that_leaves_frees_its_place_only_when_its_photo_is_decoded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker, decode = Blocker(), photos.decode_query

    def wait_and_decode(*args: Any) -> Any:
        monkeypatch.setattr(photos, "decode_query", decode)
        blocker()
        return decode(*args)

    monkeypatch.setattr(photos, "decode_query", wait_and_decode)
    with serving(settings.model_copy(update={"max_requests": 1})) as client:
        try:
            with connect(client) as leaver:
                leaver.sendall(search_head(len(PHOTO)) + PHOTO)
                assert blocker.started.acquire(timeout=60)
                leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
            client.get("/healthz")
            refused = problem(client.post("/v1/search", files={"image": PHOTO}), 503, "overloaded")
            assert refused["detail"] == "1 searches are running already."
        finally:
            blocker.released.set()
        while client.post("/v1/search", files={"image": PHOTO}).status_code != 200:
            pass
        metrics = client.get("/metrics").text
    assert 'lookalike_requests_total{method="POST",route="/v1/search",status="499"} 1.0' in metrics


def test_photos_of_slow_hosts_keep_no_other_search_from_working(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching, released = threading.Semaphore(0), threading.Event()

    async def fetch_slowly(self: Fetcher, url: str, on_bytes: object) -> bytes:
        fetching.release()
        assert await anyio.to_thread.run_sync(released.wait, 60)
        return PHOTO

    monkeypatch.setattr(Fetcher, "fetch", fetch_slowly)
    few = {"url_hosts": ["cdn.example.com"], "max_requests": 2, "max_fetches": 3, "max_waiting": 2}
    with serving(settings.model_copy(update=few)) as client, ThreadPoolExecutor(8) as threads:
        try:
            body = {"image_url": "https://cdn.example.com/1.jpg", "limit": 1}
            slow = [threads.submit(client.post, "/v1/search", json=body) for _ in range(8)]
            for _ in range(3):
                assert fetching.acquire(timeout=60)
            for _ in range(5):
                assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200
            refused: list[httpx.Response] = []
            while len(refused) < 3:  # three are fetched and two wait
                refused = [one.result() for one in slow if one.done()]
        finally:
            released.set()
        assert {problem(one, 503, "overloaded")["detail"] for one in refused} == {
            "2 photos to fetch are waiting already."
        }
        statuses = [one.result().status_code for one in slow]
        assert statuses.count(200) >= 2 and set(statuses) == {200, 503}


def test_an_answer_that_would_be_too_large_is_refused(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_answer_bytes": 2000})) as client:
        few = client.post("/v1/search?limit=2&include=attributes", files={"image": PHOTO})
        assert few.status_code == 200 and len(few.json()["items"]) == 2
        found = problem(client.post("/v1/search?limit=8", files={"image": PHOTO}), 422, "answer-too-large")
        assert "2,000 bytes" in found["detail"] and "fewer items" in found["remedy"]
        problem(client.post("/v1/search?limit=3&include=vectors", files={"image": PHOTO}), 422, "answer-too-large")
        searches = [{"item_id": "ball-blue", "limit": 2} for _ in range(4)]
        problem(client.post("/v1/search/batch", json={"searches": searches}), 422, "answer-too-large")


def test_a_page_of_large_items_is_shorter_and_continues(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_answer_bytes": 2000})) as client:
        ids, pages, cursor = [], 0, ""
        while cursor is not None:
            page = client.get("/v1/items", params={"limit": 1000, "cursor": cursor}).json()
            ids += [item["id"] for item in page["items"]]
            cursor, pages = page["cursor"], pages + 1
        assert pages > 1 and len(ids) == 8 and ids == sorted(set(ids))


def test_an_answer_that_there_is_no_memory_for_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(settings.model_copy(update={"max_unsent_bytes": 40_000, "max_answer_bytes": 10_000}))
    shares: list[Share] = []
    change = Share.change

    def watch(self: Share, before: int, after: int, *, forced: bool) -> None:
        if self.total == 40_000 and self not in shares:
            shares.append(self)
        change(self, before, after, forced=forced)

    monkeypatch.setattr(Share, "change", watch)
    body = {"item_id": "ball-blue", "limit": 2}
    with serving_app(app, settings) as client:
        assert client.post("/v1/search", json=body).status_code == 200
        with shares[0].hold() as others:
            others.resize(39_900, forced=True)
            for answer in (client.post("/v1/search", json=body), client.get("/v1/items"), client.get("/v1/facets")):
                assert problem(answer, 503, "overloaded")["detail"] == "Other requests hold 39,900 bytes already."
            assert client.get("/healthz").status_code == 200
        assert client.post("/v1/search", json=body).status_code == 200
        assert shares[0].held == 0
        assert 'lookalike_refused_total{reason="answers"} 3.0' in client.get("/metrics").text
