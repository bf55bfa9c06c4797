"""Requests that are made to cost much, or to break something: refused in few words, and nobody else waits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from service.routes import items
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import tiny_photo

MANY = 120_000


@pytest.fixture(scope="module")
def shop(settings: Settings) -> Any:
    with serving(settings.model_copy(update={"max_body_bytes": 20_000_000})) as client:
        yield client


_KEYS = ",".join(f'"{number}": 1' for number in range(MANY))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/search", f'{{"item_id": "x", "exclude": [{MANY * "1,"}1]}}'),
        ("POST", "/v1/search/batch", f'{{"searches": [{MANY * "{},"}{{}}]}}'),
        ("PUT", "/v1/items/x", f'{{"attributes": {{{_KEYS}}}}}'),
        ("PATCH", "/v1/items/x", f"{{{_KEYS}}}"),
        ("POST", "/v1/jobs", f'{{"source": "x", "more": [{MANY * "1,"}1]}}'),
    ],
)
def test_a_body_of_very_many_values_is_refused_before_it_is_read(
    shop: httpx.Client, method: str, path: str, body: str
) -> None:
    refused = shop.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert "values; at most 100,000 are read" in problem(refused, 422, "request-invalid")["detail"]


def form(*parts: tuple[str, bytes]) -> dict[str, Any]:
    """A form whose sender says that its texts are written with Python's escapes."""
    lines = b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (n.encode(), b) for n, b in parts)
    return {
        "content": lines + b"--x--\r\n",
        "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=unicode_escape"},
    }


@pytest.mark.parametrize("name", ["exclude", "filter", "cursor", "box"])
def test_half_a_character_in_a_form_is_no_text(shop: httpx.Client, name: str) -> None:
    photo = ('name="image"; filename="a.jpg"', tiny_photo(0, 0))
    half = form(photo, (f'name="{name}"', rb'"\ud800"'))
    assert "is no text" in problem(shop.post("/v1/search", **half), 422, "request-invalid")["detail"]


@pytest.mark.parametrize(
    "parts",
    [
        [('name="item"', b"{}"), (r'name="image"; filename="\ud800"', tiny_photo(0, 0))],
        [('name="item"', rb'{"title": "\ud800"}')],
    ],
    ids=["name of a photo", "title"],
)
def test_half_a_character_in_an_item_is_no_text(shop: httpx.Client, parts: list[tuple[str, bytes]]) -> None:
    assert "is no text" in problem(shop.put("/v1/items/half", **form(*parts)), 422, "request-invalid")["detail"]
    assert shop.get("/v1/items/half").status_code == 404


def test_long_lists_wait_for_each_other_and_no_search_for_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, may_end = items._page, threading.Event()
    begun = threading.Semaphore(0)

    def slow_page(*given: Any) -> Any:
        begun.release()
        assert may_end.wait(60)
        return page(*given)

    monkeypatch.setattr(items, "_page", slow_page)
    few = settings.model_copy(update={"max_waiting": 2})
    with serving(few) as client, ThreadPoolExecutor(8) as pool:
        try:
            lists = [pool.submit(client.get, "/v1/items") for _ in range(8)]
            assert begun.acquire(timeout=60)
            assert client.post("/v1/search", files={"image": tiny_photo(2, 5)}).status_code == 200
            refused = 0
            while refused < 5:  # one is made and two wait
                refused = sum(one.done() and one.result().status_code == 503 for one in lists)
        finally:
            may_end.set()
        answers = [one.result() for one in lists]
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
    problem(next(answer for answer in answers if answer.status_code == 503), 503, "overloaded")
