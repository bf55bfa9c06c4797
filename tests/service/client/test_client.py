"""The clients against a real service, and against servers that are not the service."""

import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, assert_type

import fastapi.sse
import pytest

from index.jobs import JobRecord, JobState
from index.rankings import Ranking, StoredRanking
from service.auth.api_keys import KeyRing
from service.client import AsyncClient, Client, PhotoSearch, ServiceError, ServiceUnreachable
from service.client.calls import JobOptions, SearchOptions
from service.schemas import search as wire
from service.schemas.items import FacetValue, ItemAnswer
from service.schemas.jobs import JobBody, JobStatus
from service.schemas.search import Match, SearchAnswer
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, tiny_photo


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service whose gallery the tests may change."""
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


def test_a_photo_may_be_bytes_a_file_or_a_url(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_photo(2, 5))
    one, other = client.search(tiny_photo(2, 5), limit=3), client.search(file, limit=3)
    assert_type(one, SearchAnswer)
    assert one.items == other.items and one.items[0].id == "ball-blue"
    with pytest.raises(ServiceError) as caught:
        client.search("https://example.com/photo.jpg")
    assert (caught.value.type, caught.value.status) == ("url-disabled", 422)


def test_every_option_of_a_search_is_sent(client: Client) -> None:
    answer = client.search(
        tiny_photo(3, 2),
        limit=2,
        filter={"price": {"gte": 5}},
        min_score=-1,
        box=(0, 0, 1, 1),
        exclude=["ball-yellow"],
        include=["vectors"],
    )
    assert len(answer.items) == 2 and "ball-yellow" not in {item.id for item in answer.items}
    assert all(item.vector and not item.attributes for item in answer.items)
    assert client.search(tiny_photo(3, 2), min_score=0.999999, limit=8).items != answer.items


def test_search_all_returns_every_page(client: Client) -> None:
    expected = client.search(tiny_photo(0, 0), limit=8).items
    assert list(assert_type(client.search_all(tiny_photo(0, 0), limit=3), Iterator[Match])) == expected
    with pytest.raises(ServiceError):
        client.search(tiny_photo(0, 0), tops=3)  # type: ignore[call-arg]
    assert {item.id for item in expected} == {f"ball-{colour}" for colour in COLOURS}


def test_search_by_item_leaves_the_item_out(client: Client) -> None:
    assert "ball-red" not in {item.id for item in client.search_item("ball-red", limit=5).items}
    with pytest.raises(ServiceError) as caught:
        client.search_item("none")
    assert caught.value.document.remedy and caught.value.type == "item-missing"
    assert client.status().gallery.images >= 16


def test_a_batch_mixes_photos_and_items_with_their_own_options(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_photo(2, 5))
    filtered: PhotoSearch = {"photo": tiny_photo(3, 2), "filter": {"price": {"gte": 5}}, "exclude": ["ball-yellow"]}
    results = client.search_batch([{"photo": file, "limit": 1}, filtered, {"item_id": "ball-red", "cursor": None}])
    expected = [
        client.search(file, limit=1),
        client.search(tiny_photo(3, 2), filter={"price": {"gte": 5}}, exclude=["ball-yellow"]),
        client.search_item("ball-red"),
    ]
    assert [result.items for result in results] == [result.items for result in expected]
    assert results[0].items[0].id == "ball-blue"
    with pytest.raises(ServiceError) as caught:
        client.search_batch([{"item_id": "ball-red"}, {"item_id": "none"}])
    assert caught.value.type == "item-missing"


def test_examples_are_combined(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_photo(2, 5))
    found = client.search_examples(
        [
            {"photo": file},
            {"photo": tiny_photo(0, 3), "weight": 0.5, "box": (0, 0, 0.9, 0.9)},
            {"item_id": "ball-green", "weight": 0.1},
            {"item_id": "ball-cyan", "weight": -0.2},
        ],
        combine="best",
        limit=2,
        explain=True,
    )
    assert_type(found, SearchAnswer)
    assert found.items[0].id == "ball-blue" and len(found.items) == 2
    assert found.window and found.items[0].explanation
    [alone, combined] = client.search_batch(
        [{"item_id": "ball-red"}, {"examples": [{"item_id": "ball-red"}, {"photo": file}]}]
    )
    assert alone.items != combined.items and "ball-red" not in {item.id for item in combined.items}


def test_a_ranking_is_sent_stored_and_named(client: Client) -> None:
    rules = Ranking(pin=["ball-cyan"], diversity=0.1)
    ranked = [
        client.search_item("ball-red", ranking=one, explain=True).items
        for one in (rules, {"pin": ["ball-cyan"], "diversity": 0.1})
    ]
    stored = client.put_ranking("home", rules, new=True)
    assert_type(stored, StoredRanking)
    with pytest.raises(ServiceError, match="does not match the condition"):
        client.put_ranking("home", {}, new=True)
    assert stored.ranking == rules and client.get_ranking("home") == stored
    by_name = client.search_item("ball-red", ranking="home", explain=True).items
    assert ranked[0] == ranked[1] == by_name and by_name[0].id == "ball-cyan"
    changed = client.put_ranking("home", {"group_by": "brand"}, version=stored.version)
    assert client.rankings() == [changed]
    assert client.ranking_versions("home") == [changed, stored]
    assert client.get_ranking("home", version=stored.version) == stored
    client.delete_ranking("home", version=changed.version)
    assert client.rankings() == []


def test_search_all_follows_a_ranking(client: Client) -> None:
    rules = Ranking(diversity=0.3, window=10)
    complete = [item.id for item in client.search(tiny_photo(1, 1), ranking=rules, limit=100).items]
    assert [item.id for item in client.search_all(tiny_photo(1, 1), ranking=rules, limit=3)] == complete


def test_an_item_is_stored_found_changed_and_deleted(client: Client) -> None:
    name = "mug/ü 1"
    stored = client.put_item(
        name, new=True, title="A mug", attributes={"kind": "mug", "old": 1}, images={"a b": tiny_photo(0, 7)}
    )
    assert (stored.id, stored.title, [image.id for image in stored.images]) == (name, "A mug", ["a b"])
    assert name in {item.id for item in client.search(tiny_photo(0, 7), limit=2).items}
    changed = client.patch_item(name, version=stored.version, attributes={"price": 3.5, "old": None})
    assert changed.attributes == {"kind": "mug", "price": 3.5} and changed.title == "A mug"
    with pytest.raises(ServiceError) as caught:
        client.patch_item(name, version=stored.version, title="Too late")
    assert caught.value.type == "version-conflict"
    assert len(client.put_image(name, "side", tiny_photo(1, 7)).images) == 2
    client.delete_image(name, "side")
    assert client.get_item(name).images == stored.images
    assert [item.id for item in client.scan({"kind": "mug"})] == [name]
    several = client.patch_item(name, attributes={"tags": ["new", 5], "kind": []}, expires_at="2100-01-01")
    assert several.attributes == {"price": 3.5, "tags": ("new", 5)}
    assert several.expires_at == "2100-01-01T00:00:00Z"
    assert [item.id for item in client.scan({"any": [{"tags": {"all": ["new", 5]}}, {"kind": "mug"}]})] == [name]
    assert client.patch_item(name, expires_at=None).expires_at is None
    client.delete_item(name)
    with pytest.raises(ServiceError):
        client.get_item(name)


@pytest.mark.parametrize("dots", [".", ".."])
def test_ids_of_dots_are_not_resolved_as_paths(client: Client, dots: str) -> None:
    client.put_item("dotted", title="A mug", images={dots: tiny_photo(0, 7), "front": tiny_photo(1, 7)})
    client.delete_image("dotted", dots)
    assert [image.id for image in client.get_item("dotted").images] == ["front"]
    client.put_item(dots, title="Dots")
    assert client.get_item(dots).title == "Dots"
    assert [image.id for image in client.put_image(dots, dots, tiny_photo(0, 7)).images] == [dots]
    for name in (dots, "dotted"):
        client.delete_item(name)


def test_scan_returns_every_page_and_facets_are_typed(client: Client) -> None:
    assert [item.id for item in client.scan(limit=3)] == sorted(f"ball-{colour}" for colour in COLOURS)
    assert "colour" in {facet.name for facet in client.facets().facets}
    (found,) = client.facets(["colour"], filter={"price": {"lt": 5}}, contains="RE").facets
    assert [(value.value, value.count) for value in found.values] == [("red", 1)]
    (only,) = client.facets(["brand", "unknown"], limit=1).facets
    assert only.name == "brand" and only.values == [FacetValue(value="Tiny", count=8)]


def test_a_job_is_followed_to_its_end(client: Client) -> None:
    started = client.start_job("catalogue")
    records = list(client.follow_job(started.id))
    assert records[-1].state == "done" and records[-1].unchanged == 16, records[-1]
    assert client.job(started.id) == records[-1] and started.id in {job.id for job in client.jobs()}
    with pytest.raises(ServiceError) as caught:
        client.cancel_job(started.id)
    assert caught.value.type == "job-ended"
    with pytest.raises(ServiceError) as caught:
        client.start_job("elsewhere")
    assert "catalogue" in str(caught.value)


@pytest.mark.anyio
async def test_the_async_client_returns_the_same(shop: str) -> None:
    async with AsyncClient(shop) as client:
        with Client(shop) as other:
            found = assert_type(client.search(tiny_photo(0, 0)), Coroutine[Any, Any, SearchAnswer])
            assert (await found).items == other.search(tiny_photo(0, 0)).items
            assert (await client.search_item("ball-red")).items == other.search_item("ball-red").items
            assert await client.facets() == other.facets()
            batch = await client.search_batch([{"photo": tiny_photo(0, 0)}, {"item_id": "ball-red", "limit": 2}])
            assert batch[0].items == other.search(tiny_photo(0, 0)).items and len(batch[1].items) == 2
        pages = assert_type(client.search_all(tiny_photo(0, 0), limit=3), AsyncIterator[Match])
        assert len([item async for item in pages]) == 8
        assert len([item async for item in assert_type(client.scan(limit=5), AsyncIterator[ItemAnswer])]) == 8
        stored = await client.put_item("mug-2", title="A mug", images={"front": tiny_photo(1, 7)})
        await client.put_image("mug-2", "side", tiny_photo(2, 7), version=stored.version)
        await client.delete_image("mug-2", "side")
        await client.patch_item("mug-2", title=None)
        assert (await client.get_item("mug-2")).title is None
        await client.delete_item("mug-2")
        assert (await client.status()).gallery.items == 8
        started = await client.start_job("catalogue")
        records = [record async for record in client.follow_job(started.id)]
        assert records[-1] == await client.job(started.id) == (await client.jobs())[0]
        with pytest.raises(ServiceError):
            await client.cancel_job(started.id)


@pytest.mark.slow
def test_a_rate_limited_request_is_retried_after_the_requested_delay(settings: Settings, tmp_path: Path) -> None:
    key = KeyRing(tmp_path / "keys.json").create("shop", ["search"])
    guarded = settings.model_copy(update={"keys": tmp_path / "keys.json", "rate": 4.0, "burst": 1})
    with serving(guarded) as http:
        address = str(http.base_url)
        with Client(address, key=key) as retrying, Client(address, key=key, retries=0) as not_retrying:
            assert [retrying.status().keys for _ in range(3)] == [True, True, True]
            with pytest.raises(ServiceError) as caught:
                for _ in range(20):
                    not_retrying.status()
            assert (caught.value.status, caught.value.type) == (429, "too-many-requests")
        with Client(address) as keyless, pytest.raises(ServiceError) as caught:
            keyless.status()
        assert caught.value.type == "key-missing"


def test_an_address_without_a_server_raises_service_unreachable() -> None:
    with Client("http://127.0.0.1:1", retries=1) as client, pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:1"):
        client.status()


@contextmanager
def fake_server(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that handles every request with `respond`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))  # an unread body would reset the connection
            respond(self)

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
    """Sends a 200 response whose body ends when the connection is closed."""
    handler.send_response(200)
    handler.send_header("Content-Type", media_type)
    handler.end_headers()
    handler.wfile.write(body)


class FlakyServer:
    """Fails the first requests, by closing the connection or with a status, and then returns a job."""

    def __init__(self, failures: int, status: int | None = None, retry_after: str = "0") -> None:
        self._failures = failures
        self._status = status
        self._retry_after = retry_after
        self.requests = 0

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        if self.requests > self._failures:
            send(handler, "application/json", job("done"))
        elif self._status:
            handler.send_response(self._status)
            handler.send_header("Retry-After", self._retry_after)
            handler.end_headers()


def test_a_broken_connection_is_retried_only_if_the_request_is_idempotent() -> None:
    flaky = FlakyServer(failures=2)
    with fake_server(flaky) as address, Client(address) as client:
        assert client.job(7).state == "done" and flaky.requests == 3
        flaky.requests = 0
        with pytest.raises(ServiceUnreachable, match="Server disconnected"):
            client.start_job("catalogue")
        assert flaky.requests == 1
        flaky.requests = 0
        with pytest.raises(ServiceUnreachable):
            client.put_item("mug-1", version=3)
        assert flaky.requests == 1


@pytest.mark.anyio
async def test_a_broken_connection_is_retried_by_the_async_client() -> None:
    flaky = FlakyServer(failures=2)
    with fake_server(flaky) as address:
        async with AsyncClient(address) as client:
            assert (await client.job(7)).state == "done" and flaky.requests == 3
            flaky.requests = 0
            with pytest.raises(ServiceUnreachable, match="Server disconnected"):
                await client.start_job("catalogue")
            assert flaky.requests == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_rejected_request_is_retried_whatever_it_does(status: int) -> None:
    flaky = FlakyServer(failures=1, status=status)
    with fake_server(flaky) as address, Client(address) as client:
        assert client.start_job("catalogue").state == "done" and flaky.requests == 2


@pytest.mark.parametrize(("status", "retry_after"), [(500, "0"), (503, "61")])
def test_other_errors_and_long_delays_are_not_retried(status: int, retry_after: str) -> None:
    flaky = FlakyServer(failures=1, status=status, retry_after=retry_after)
    with fake_server(flaky) as address, Client(address) as client, pytest.raises(ServiceError) as caught:
        client.job(7)
    assert (caught.value.status, caught.value.type, flaky.requests) == (status, "about:blank", 1)
    assert "without an error document of Lookalike" in str(caught.value)


@pytest.mark.parametrize(
    ("media_type", "body", "message"),
    [
        ("text/html; charset=utf-8", b"<h1>Please log in</h1>", "text/html that is not"),
        ("application/json", b'{"ok": true}', "application/json that is not"),
        ("application/json", b"[1, 2]", "application/json that is not"),
        ("application/json", b'{"half', "is not JSON"),
        ("application/octet-stream", b"\xff\xfe", "is not JSON"),
        ("text/plain", b"", "text/plain that is not"),
    ],
)
def test_a_success_of_another_server_raises_service_error(media_type: str, body: bytes, message: str) -> None:
    with fake_server(lambda handler: send(handler, media_type, body)) as address, Client(address) as client:
        operations: list[Callable[[], object]] = [
            client.status,
            client.jobs,
            lambda: client.job(7),
            lambda: client.search(b""),
            lambda: client.search_batch([{"item_id": "mug-1"}]),
            lambda: client.put_item("mug-1"),
            lambda: list(client.scan()),
            lambda: list(client.follow_job(7)),
        ]
        for run in operations:
            with pytest.raises(ServiceError, match=message) as error:
                run()
            assert (error.value.status, error.value.type) == (200, "about:blank")
            assert "200 OK" in str(error.value) and "Check the address, and any proxy" in str(error.value)
        with pytest.raises(ServiceError, match="expected status 204"):  # nothing was deleted
            client.delete_item("mug-1")


@pytest.mark.anyio
async def test_a_success_of_another_server_raises_service_error_in_the_async_client() -> None:
    with fake_server(lambda handler: send(handler, "text/html", b"<h1>Please log in</h1>")) as address:
        async with AsyncClient(address) as client:
            with pytest.raises(ServiceError, match="text/html"):
                await client.status()


def job(state: JobState) -> bytes:
    record = JobRecord(id=7, source="catalogue", bundle_id="0" * 16, state=state, started=1.0, updated=2.0)
    return JobStatus.of(record).model_dump_json().encode()


class FakeJob:
    """Serves a job that is done once its events were requested; `continue_events` writes those after the first."""

    def __init__(self, continue_events: Callable[[BaseHTTPRequestHandler], object]) -> None:
        self._continue_events = continue_events
        self._state: JobState = "running"
        self.requests: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path.removeprefix("/v1/jobs/7"))
        if self.requests[-1] != "/events":
            send(handler, "application/json", job(self._state))
            return
        self._state = "done"
        send(handler, "text/event-stream", b"event: progress\ndata: " + job("running") + b"\n\n")
        self._continue_events(handler)


@pytest.fixture
def silent_job() -> Iterator[FakeJob]:
    """A job whose events stop while the connection stays open."""
    over = threading.Event()
    yield FakeJob(lambda handler: over.wait(20))
    over.set()


def test_the_event_timeout_allows_for_lost_heartbeats() -> None:
    for client in (Client, AsyncClient):
        assert inspect.signature(client).parameters["event_timeout"].default >= 3 * fastapi.sse._PING_INTERVAL


def test_following_a_job_reconnects_when_events_stop(silent_job: FakeJob) -> None:
    started = time.monotonic()
    with fake_server(silent_job) as address, Client(address, event_timeout=0.5) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert silent_job.requests == ["", "/events", ""] and time.monotonic() - started < 10


@pytest.mark.anyio
async def test_following_a_job_reconnects_when_events_stop_in_the_async_client(silent_job: FakeJob) -> None:
    started = time.monotonic()
    with fake_server(silent_job) as address:
        async with AsyncClient(address, event_timeout=0.5) as client:
            assert [record.state async for record in client.follow_job(7)] == ["running", "running", "done"]
    assert silent_job.requests == ["", "/events", ""] and time.monotonic() - started < 10


def test_heartbeats_keep_the_event_stream_open() -> None:
    def write_slowly(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(7):
            time.sleep(0.2)
            handler.wfile.write(b": nothing new\n\n")
        handler.wfile.write(b"event: ended\ndata: " + job("done") + b"\n\n")

    fake_job = FakeJob(write_slowly)
    with fake_server(fake_job) as address, Client(address, event_timeout=1.0) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert fake_job.requests == ["", "/events"]


@pytest.mark.parametrize("event", [b'event: progress\ndata: {"id": 7, "sou', b'data: {"id": 7}\n\n', b"data: <h1>\n\n"])
def test_an_event_that_is_incomplete_or_not_a_job_is_ignored(event: bytes) -> None:
    fake_job = FakeJob(lambda handler: handler.wfile.write(event))
    with fake_server(fake_job) as address, Client(address) as client:
        assert [record.state for record in client.follow_job(7)] == ["running", "running", "done"]
    assert fake_job.requests == ["", "/events", ""]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_operations_have_signatures_and_docstrings(kind: type[Client] | type[AsyncClient]) -> None:
    operations = dict(inspect.getmembers(kind("http://localhost"), callable))
    public = {name: value for name, value in operations.items() if not name.startswith("_")}
    assert public.keys() == {
        *(
            "search",
            "search_item",
            "search_examples",
            "search_batch",
            "search_all",
            "status",
            "facets",
            "scan",
            "close",
        ),
        *("get_item", "put_item", "patch_item", "delete_item", "put_image", "delete_image"),
        *("rankings", "get_ranking", "ranking_versions", "put_ranking", "delete_ranking"),
        *("start_job", "jobs", "job", "cancel_job", "follow_job"),
    }
    assert all(inspect.getdoc(value) for value in public.values())
    assert list(inspect.signature(public["put_image"]).parameters) == ["item_id", "image_id", "photo", "version"]
    assert list(inspect.signature(kind.get_item).parameters) == ["self", "item_id"]


def test_options_are_those_of_the_service() -> None:
    assert set(SearchOptions.__annotations__) == set(wire.SearchOptions.model_fields)
    assert set(JobOptions.__annotations__) == set(JobBody.model_fields) - {"source"}
