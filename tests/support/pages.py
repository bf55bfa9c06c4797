"""Helpers to use the web page in a browser: open it, upload photos, read its results."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect

from tests.support.tiny_gallery import tiny_photo

TIMEOUT_MS = 20_000
"""Long enough for a busy machine."""
MAX_BYTES = 1024 * 1024
"""The body size limit of the service under test."""


@contextmanager
def open_page(
    browser: Browser, address: str, refusable: tuple[str, ...] = ("/v1/search",), **options: Any
) -> Iterator[Page]:
    """Opens a page in a new context; it must log no error and send requests only to the service.

    A browser logs every refused request as an error; those whose URL ends with one of `refusable` are expected.
    """
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    errors: list[str] = []
    requests: list[str] = []

    def collect(message: ConsoleMessage) -> None:
        refused = message.text.startswith("Failed to load") and message.location["url"].endswith(refusable)
        if message.type in ("error", "warning") and not refused:
            errors.append(message.text)

    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", collect)
    page.on("request", lambda request: requests.append(request.url))
    yield page
    page.unroute_all(behavior="ignoreErrors")  # of handlers that still run: they would fail the next test
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith((f"{address}/", "blob:", "data:"))] == []


def upload(page: Page, photo: bytes, name: str = "snap.jpg", media_type: str = "image/jpeg") -> None:
    page.set_input_files("#upload", {"name": name, "mimeType": media_type, "buffer": photo})


def cards(page: Page) -> Locator:
    return page.locator("#results .card:not(.skeleton)")


def expect_first(page: Page, title: str) -> None:
    expect(cards(page).locator(".title").first).to_have_text(title)


def photo_of_two(left: int, right: int) -> bytes:
    """Returns a photo of two products side by side."""
    both = Image.new("RGB", (192, 96))
    for x, number in ((0, left), (96, right)):
        both.paste(Image.open(io.BytesIO(tiny_photo(number, 6))), (x, 0))
    out = io.BytesIO()
    both.save(out, "JPEG", quality=92)
    return out.getvalue()


def facet(name: str, *counts: tuple[str | float | bool, int]) -> dict[str, object]:
    """Returns an attribute as the service lists it, with its values and their counts."""
    values = [{"value": value, "count": count} for value, count in counts]
    return {"name": name, "values": values, "minimum": None, "maximum": None, "distinct": len(values)}
