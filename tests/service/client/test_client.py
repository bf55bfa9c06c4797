"""The clients: what a shop's program says and gets, over a real service."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastapi.sse
import pytest

from index.gallery.jobs import State
from service.auth.api_keys import KeyRing
from service.client import AsyncClient, Client, PhotoSearch, ServiceError, ServiceUnreachable, calls
from service.schemas.jobs import JobStatus
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, tiny_photo


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service over a gallery that tests may change."""
    root = tmp_path_factory.mktemp("shop")
    bundle = make_tiny_bundle(root / "bundle")
    gallery = make_tiny_gallery(root / "gallery", bundle)
    sources = {"catalogue": str(root / "gallery-source" / "catalogue.csv")}
    with serving(Settings(gallery=gallery, threads=1, sources=sources)) as http:
        yield str(http.base_url)


@pytest.fixture
def client(shop: str) -> Iterator[Client]:
    with Client(shop) as client:
        yield client


def test_a_photo_is_found_however_it_is_given(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_photo(2, 5))
    one, other = client.search(tiny_photo(2, 5), top=3), client.search(file, top=3)
    assert one.items == other.items and one.items[0].id == "ball-blue"
    with pytest.raises(ServiceError) as told:
        client.search("https://example.com/photo.jpg")
    assert (told.value.type, told.value.status) == ("url-off", 422)


def test_every_option_of_a_search_is_sent(client: Client) -> None:
    answer = client.search(
        tiny_photo(3, 2),
        top=2,
        filter={"price": {"gte": 5}},
        min_score=-1,
        box=(0, 0, 1, 1),
        exclude=["ball-yellow"],
        include=["vectors"],
    )
    assert len(answer.items) == 2 and "ball-yellow" not in {item.id for item in answer.items}
    assert all(item.vector and not item.attributes for item in answer.items)
    assert client.search(tiny_photo(3, 2), min_score=0.999999, top=8).items != answer.items


def test_pages_are_turned_until_the_last(client: Client) -> None:
    whole = client.search(tiny_photo(0, 0), top=8).items
    assert list(client.search_all(tiny_photo(0, 0), top=3)) == whole
    assert {item.id for item in whole} == {f"ball-{colour}" for colour in COLOURS}


def test_more_like_an_item(client: Client) -> None:
    assert "ball-red" not in {item.id for item in client.search_item("ball-red", top=5).items}
    with pytest.raises(ServiceError) as told:
        client.search_item("none")
    assert told.value.document.remedy and told.value.type == "item-missing"
    assert client.status().gallery.images >= 16


def test_a_batch_takes_photos_and_items_each_with_its_options(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_photo(2, 5))
    wanted: PhotoSearch = {"photo": tiny_photo(3, 2), "filter": {"price": {"gte": 5}}, "exclude": ["ball-yellow"]}
    answers = client.search_batch([{"photo": file, "top": 1}, wanted, {"item_id": "ball-red", "cursor": None}])
    alone = [
        client.search(file, top=1),
        client.search(tiny_photo(3, 2), filter={"price": {"gte": 5}}, exclude=["ball-yellow"]),
        client.search_item("ball-red"),
    ]
    assert [answer.items for answer in answers] == [answer.items for answer in alone]
    assert answers[0].items[0].id == "ball-blue"
    with pytest.raises(ServiceError) as told:
        client.search_batch([{"item_id": "ball-red"}, {"item_id": "none"}])
    assert told.value.type == "item-missing"


def test_an_item_is_written_found_changed_and_removed(client: Client) -> None:
    name = "mug/ü 1"
    stored = client.put_item(
        name, new=True, title="A mug", attributes={"kind": "mug", "old": 1}, images={"a b": tiny_photo(0, 7)}
    )
    assert (stored.id, stored.title, [image.id for image in stored.images]) == (name, "A mug", ["a b"])
    assert name in {item.id for item in client.search(tiny_photo(0, 7), top=2).items}
    changed = client.patch_item(name, version=stored.version, attributes={"price": 3.5, "old": None})
    assert changed.attributes == {"kind": "mug", "price": 3.5} and changed.title == "A mug"
    with pytest.raises(ServiceError) as told:
        client.patch_item(name, version=stored.version, title="Too late")
    assert told.value.type == "version-conflict"
    assert len(client.put_image(name, "side", tiny_photo(1, 7)).images) == 2
    client.delete_image(name, "side")
    assert client.get_item(name).images == stored.images
    assert [item.id for item in client.scan({"kind": "mug"})] == [name]
    client.delete_item(name)
    with pytest.raises(ServiceError):
        client.get_item(name)


@pytest.mark.parametrize("dots", [".", ".."])
def test_an_id_of_dots_names_what_it_says(client: Client, dots: str) -> None:
    client.put_item("dotted", title="A mug", images={dots: tiny_photo(0, 7), "front": tiny_photo(1, 7)})
    client.delete_image("dotted", dots)
    assert [image.id for image in client.get_item("dotted").images] == ["front"]
    client.put_item(dots, title="Dots")
    assert client.get_item(dots).title == "Dots"
    assert [image.id for image in client.put_image(dots, dots, tiny_photo(0, 7)).images] == [dots]
    for name in (dots, "dotted"):
        client.delete_item(name)


def test_a_scan_turns_pages_and_facets_are_typed(client: Client) -> None:
    assert [item.id for item in client.scan(count=3)] == sorted(f"ball-{colour}" for colour in COLOURS)
    assert "colour" in {facet.name for facet in client.facets().facets}


def test_a_job_is_followed_to_its_end(client: Client) -> None:
    begun = client.start_job("catalogue")
    records = list(client.follow_job(begun.id))
    assert records[-1].state == "done" and records[-1].unchanged == 16, records[-1]
    assert client.job(begun.id) == records[-1] and begun.id in {job.id for job in client.jobs()}
    with pytest.raises(ServiceError) as told:
        client.cancel_job(begun.id)
    assert told.value.type == "job-ended"
    with pytest.raises(ServiceError) as told:
        client.start_job("elsewhere")
    assert "catalogue" in str(told.value)


@pytest.mark.anyio
async def test_the_asynchronous_one_says_the_same(shop: str) -> None:
    async with AsyncClient(shop) as client:
        with Client(shop) as other:
            assert (await client.search(tiny_photo(0, 0))).items == other.search(tiny_photo(0, 0)).items
            assert (await client.search_item("ball-red")).items == other.search_item("ball-red").items
            assert await client.facets() == other.facets()
            batch = await client.search_batch([{"photo": tiny_photo(0, 0)}, {"item_id": "ball-red", "top": 2}])
            assert batch[0].items == other.search(tiny_photo(0, 0)).items and len(batch[1].items) == 2
        assert len([item async for item in client.search_all(tiny_photo(0, 0), top=3)]) == 8
        assert len([item async for item in client.scan(count=5)]) == 8
        stored = await client.put_item("mug-2", title="A mug", images={"front": tiny_photo(1, 7)})
        await client.put_image("mug-2", "side", tiny_photo(2, 7), version=stored.version)
        await client.delete_image("mug-2", "side")
        await client.patch_item("mug-2", title=None)
        assert (await client.get_item("mug-2")).title == ""
        await client.delete_item("mug-2")
        assert (await client.status()).gallery.items == 8
        begun = await client.start_job("catalogue")
        records = [record async for record in client.follow_job(begun.id)]
        assert records[-1] == await client.job(begun.id) == (await client.jobs())[0]
        with pytest.raises(ServiceError):
            await client.cancel_job(begun.id)


def test_a_key_that_is_told_to_come_again_comes_again(settings: Settings, tmp_path: Path) -> None:
    key = KeyRing(tmp_path / "keys.json").create("shop", ["search"])
    guarded = settings.model_copy(update={"keys": tmp_path / "keys.json", "rate": 4.0, "burst": 1})
    with serving(guarded) as http:
        address = str(http.base_url)
        with Client(address, key=key) as patient, Client(address, key=key, retries=0) as hasty:
            assert [patient.status().keys for _ in range(3)] == [True, True, True]
            with pytest.raises(ServiceError) as told:
                for _ in range(20):
                    hasty.status()
            assert (told.value.status, told.value.type) == (429, "too-many-requests")
        with Client(address) as stranger, pytest.raises(ServiceError) as told:
            stranger.status()
        assert told.value.type == "key-missing"


def test_an_address_where_nothing_answers_is_told() -> None:
    with Client("http://127.0.0.1:1", retries=1) as client, pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:1"):
        client.status()


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that is not ours, and answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))  # what is left unread resets the connection
            answer(self)

        do_POST = do_PUT = do_DELETE = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, media_type: str, body: bytes) -> None:
    """Answers 200; the body goes on until the connection is closed."""
    handler.send_response(200)
    handler.send_header("Content-Type", media_type)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize(
    ("media_type", "body", "told"),
    [
        ("text/html; charset=utf-8", b"<h1>Please log in</h1>", "text/html, which"),
        ("application/json", b'{"ok": true}', "application/json, which"),
        ("application/json", b"[1, 2]", "application/json, which"),
        ("application/json", b'{"half', "Invalid JSON"),
        ("application/octet-stream", b"\xff\xfe", "Invalid JSON"),
        ("text/plain", b"", "text/plain, which"),
    ],
)
def test_what_something_else_answers_in_its_place_is_told(media_type: str, body: bytes, told: str) -> None:
    with answering(lambda handler: send(handler, media_type, body)) as address, Client(address) as client:
        asked: list[Callable[[], object]] = [
            client.status,
            client.jobs,
            lambda: client.job(7),
            lambda: client.search(b""),
            lambda: client.search_batch([{"item_id": "mug-1"}]),
            lambda: client.put_item("mug-1"),
            lambda: list(client.scan()),
            lambda: list(client.follow_job(7)),
        ]
        for ask in asked:
            with pytest.raises(ServiceError, match=told) as error:
                ask()
            assert (error.value.status, error.value.type) == (200, "about:blank")
            assert "200 OK" in str(error.value) and "Check that it is that of the service" in str(error.value)
        with pytest.raises(ServiceError, match="would have answered 204"):  # nothing was removed
            client.delete_item("mug-1")


@pytest.mark.anyio
async def test_the_asynchronous_one_tells_it_too() -> None:
    with answering(lambda handler: send(handler, "text/html", b"<h1>Please log in</h1>")) as address:
        async with AsyncClient(address) as client:
            with pytest.raises(ServiceError, match="text/html"):
                await client.status()


def job(state: State) -> bytes:
    record = JobStatus(id=7, source="catalogue", bundle_id="0" * 16, state=state, started=1.0, updated=2.0)
    return record.model_dump_json().encode()


class Watched:
    """A job that is done once its events were asked for; `goes_on` writes those after the first."""

    def __init__(self, goes_on: Callable[[BaseHTTPRequestHandler], object]) -> None:
        self._goes_on = goes_on
        self._state: State = "running"
        self.asked: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path.removeprefix("/v1/jobs/7"))
        if self.asked[-1] != "/events":
            send(handler, "application/json", job(self._state))
            return
        self._state = "done"
        send(handler, "text/event-stream", b"event: progress\ndata: " + job("running") + b"\n\n")
        self._goes_on(handler)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A job whose events cease while the connection stays, for a client that waits less long than ours do."""
    assert calls.LONGEST_SILENCE >= 3 * fastapi.sse._PING_INTERVAL
    monkeypatch.setattr(calls, "LONGEST_SILENCE", 0.5)
    over = threading.Event()
    yield Watched(lambda handler: over.wait(20))
    over.set()


def test_events_that_cease_are_asked_for_again(silent: Watched) -> None:
    begun = time.monotonic()
    with answering(silent) as address, Client(address) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert silent.asked == ["", "/events", ""] and time.monotonic() - begun < 10


@pytest.mark.anyio
async def test_events_that_cease_are_asked_for_again_by_the_asynchronous_one(silent: Watched) -> None:
    begun = time.monotonic()
    with answering(silent) as address:
        async with AsyncClient(address) as client:
            assert [record.state async for record in client.follow_job(7)] == ["running", "running", "done"]
    assert silent.asked == ["", "/events", ""] and time.monotonic() - begun < 10


def test_a_sign_of_life_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LONGEST_SILENCE", 1.0)

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(7):
            time.sleep(0.2)
            handler.wfile.write(b": nothing new\n\n")
        handler.wfile.write(b"event: ended\ndata: " + job("done") + b"\n\n")

    watched = Watched(slowly)
    with answering(watched) as address, Client(address) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert watched.asked == ["", "/events"]


def test_an_event_that_is_cut_off_is_none() -> None:
    watched = Watched(lambda handler: handler.wfile.write(b'event: progress\ndata: {"id": 7, "sou'))
    with answering(watched) as address, Client(address) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert watched.asked == ["", "/events", ""]


def test_importing_it_loads_no_engine() -> None:
    probe = "import sys, service.client; print(sorted({'faiss', 'onnxruntime', 'torch', 'uvicorn'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
