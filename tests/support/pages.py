"""The page as a person has it: opened in a browser, given photos, looked at."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect

from tests.support.tiny_gallery import tiny_photo

PATIENCE_MS = 20_000  # a busy machine is slow, not wrong
MOST_BYTES = 1024 * 1024  # that the service under test takes


@contextmanager
def opened(
    browser: Browser, address: str, refusable: tuple[str, ...] = ("/v1/search",), **options: Any
) -> Iterator[Page]:
    """A page of a new person, which must neither fail inside nor ask anyone but the service.

    A browser reports every refused request as an error of the page; those of a search are shown by the page.
    """
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    faults: list[str] = []
    asked: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        refused = message.text.startswith("Failed to load") and message.location["url"].endswith(refusable)
        if message.type in ("error", "warning") and not refused:
            faults.append(message.text)

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", hear)
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert faults == []
    assert [url for url in asked if not url.startswith((f"{address}/", "blob:", "data:"))] == []


def give(page: Page, photo: bytes, name: str = "snap.jpg", kind: str = "image/jpeg") -> None:
    page.set_input_files("#choose", {"name": name, "mimeType": kind, "buffer": photo})


def cards(page: Page) -> Locator:
    return page.locator("#results .card:not(.skeleton)")


def expect_first(page: Page, title: str) -> None:
    expect(cards(page).locator(".title").first).to_have_text(title)


def pair(left: int, right: int) -> bytes:
    """A photo of two products side by side."""
    both = Image.new("RGB", (192, 96))
    for place, number in ((0, left), (96, right)):
        both.paste(Image.open(io.BytesIO(tiny_photo(number, 6))), (place, 0))
    out = io.BytesIO()
    both.save(out, "JPEG", quality=92)
    return out.getvalue()
