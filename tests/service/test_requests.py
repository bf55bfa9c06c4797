"""Parsing of requests: hostile bodies are refused in few words, and work for a client that left is dropped."""

import asyncio
import threading
from time import process_time
from typing import Any

import anyio.to_thread
import httpx
import pytest
from anyio import CapacityLimiter
from fastapi import Request

from service.requests import ClientLeft, while_connected
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import tiny_photo

MANY = 120_000
_KEYS = ",".join(f'"{number}": 1' for number in range(MANY))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shop(settings: Settings) -> Any:
    with serving(settings.model_copy(update={"max_body_bytes": 20_000_000})) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/search", f'{{"item_id": "x", "exclude": [{MANY * "1,"}1]}}'),
        ("POST", "/v1/search/batch", f'{{"searches": [{MANY * "{},"}{{}}]}}'),
        ("PUT", "/v1/items/x", f'{{"attributes": {{{_KEYS}}}}}'),
        ("PATCH", "/v1/items/x", f"{{{_KEYS}}}"),
        ("POST", "/v1/jobs", f'{{"source": "x", "more": [{MANY * "1,"}1]}}'),
        ("POST", "/v1/search", f'{{"item_id": "x", "filter": {{"a": [{5000 * ("[" * 20 + "]" * 20 + ",")}1]}}}}'),
        ("POST", "/v1/search", f'{{"item_id": "x", "filter": {MANY * "["}'),
    ],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(
    shop: httpx.Client, method: str, path: str, body: str
) -> None:
    refused = shop.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert "values; the limit is 100,000" in problem(refused, 422, "request-invalid")["detail"]


def test_excluded_ids_are_no_longer_than_ids_are(shop: httpx.Client) -> None:
    refused = shop.post("/v1/search", json={"item_id": "ball-blue", "exclude": ["x" * 513]})
    assert problem(refused, 422, "request-invalid")["detail"].startswith("exclude[0] must have at most 512 characters")


def test_a_query_string_with_thousands_of_names_is_refused_quickly(shop: httpx.Client) -> None:
    query = "&".join(f"n{number}=1" for number in range(6000))
    used = process_time()
    refused = shop.post(f"/v1/search?{query}", content=tiny_photo(0, 0), headers={"Content-Type": "image/jpeg"})
    assert "6,000 keys were sent" in problem(refused, 422, "request-invalid")["detail"]
    assert process_time() - used < 1  # of the CPU: other work on the machine does not count


def form(charset: str, *parts: tuple[str, bytes]) -> dict[str, Any]:
    """Returns a form whose sender names this charset."""
    lines = b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (n.encode(), b) for n, b in parts)
    return {
        "content": lines + b"--x--\r\n",
        "headers": {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"},
    }


@pytest.mark.parametrize("charset", ["unicode_escape", "undefined", "punycode", "rot13", "latin-1", "nonsense"])
def test_a_form_in_another_charset_than_utf_8_is_refused(shop: httpx.Client, charset: str) -> None:
    photo = ('name="image"; filename="a.jpg"', tiny_photo(0, 0))
    search = form(charset, photo, ('name="filter"', rb'"\ud800"'))
    assert charset in problem(shop.post("/v1/search", **search), 422, "request-invalid")["detail"]
    item = form(charset, ('name="item"', rb'{"title": "\ud800"}'), (r'name="image"; filename="\ud800"', photo[1]))
    assert charset in problem(shop.put("/v1/items/half", **item), 422, "request-invalid")["detail"]
    assert shop.get("/v1/items/half").status_code == 404


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf8"'])
def test_a_form_that_names_utf_8_is_read(shop: httpx.Client, charset: str) -> None:
    photo = ('name="image"; filename="a.jpg"', tiny_photo(2, 5))
    found = shop.post("/v1/search", **form(charset, photo, ('name="limit"', b"1")))
    assert [item["id"] for item in found.json()["items"]] == ["ball-blue"]


@pytest.mark.parametrize("name", ["exclude", "filter", "cursor", "box"])
def test_bytes_that_are_not_utf_8_are_not_an_internal_error(shop: httpx.Client, name: str) -> None:
    photo = ('name="image"; filename="a.jpg"', tiny_photo(0, 0))
    answer = shop.post("/v1/search", **form("utf-8", photo, (f'name="{name}"', b'"\xed\xa0\x80"')))
    assert answer.status_code == (200 if name == "exclude" else 422), answer.text


class LeavingClient:
    """A request whose client closes the connection when `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class BlockingWork:
    """Work in a thread that ends when `may_end` is set."""

    def __init__(self) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.may_end.wait(60)


async def run_pending_tasks() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("fails", [False, True])
async def test_a_thread_whose_client_left_keeps_its_place_until_it_is_done(fails: bool) -> None:
    client, thread, limiter = LeavingClient(), BlockingWork(), CapacityLimiter(1)

    async def work() -> None:
        await anyio.to_thread.run_sync(thread, limiter=limiter)
        if fails:
            raise ValueError("dropped, because the client left")

    task = asyncio.create_task(while_connected(client.request, work()))
    assert await asyncio.to_thread(thread.started.wait, 60)
    client.left.set()
    await run_pending_tasks()
    try:
        assert limiter.borrowed_tokens == 1 and not task.done()
    finally:
        thread.may_end.set()
    with pytest.raises(ClientLeft):
        await task
    assert limiter.borrowed_tokens == 0


@pytest.mark.anyio
async def test_work_that_waits_for_a_place_is_dropped_at_once_when_its_client_leaves() -> None:
    client, thread, limiter = LeavingClient(), BlockingWork(), CapacityLimiter(1)
    async with limiter:
        task = asyncio.create_task(while_connected(client.request, anyio.to_thread.run_sync(thread, limiter=limiter)))
        await run_pending_tasks()
        client.left.set()
        with pytest.raises(ClientLeft):
            await task
    assert not thread.started.is_set()
