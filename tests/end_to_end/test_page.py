"""The page in a real browser against a real server process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, tiny_photo

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERVE = """
import uvicorn
from service.app import create_app
from service.settings import Settings
settings = Settings()
uvicorn.run(create_app(settings), host=settings.host, port=settings.port, log_level="warning")
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service in a process of its own."""
    root = tmp_path_factory.mktemp("page")
    bundle = make_tiny_bundle(root / "bundle")
    gallery = make_tiny_gallery(root / "gallery", bundle)
    examples = root / "examples"
    examples.mkdir()
    for number in range(len(COLOURS)):
        (examples / f"{COLOURS[number]}.jpg").write_bytes(tiny_photo(number, 6))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"GALLERY": gallery, "BUNDLE": bundle, "EXAMPLES": examples, "PORT": port, "THREADS": 1}
    environment = os.environ | {f"LOOKALIKE_{name}": str(value) for name, value in settings.items()}
    process = subprocess.Popen([sys.executable, "-c", SERVE], env=environment)
    try:
        yield wait_until_ready(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(10)


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> str:
    for _ in range(600):
        assert process.poll() is None, "the service ended instead of starting"
        try:
            if httpx.get(f"{address}/readyz").is_success:
                return address
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the service did not become ready")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium or Chrome on the PATH: install one, for example with `apt install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The opened page, which must neither fail inside nor ask anyone but the service."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    context.close()
    assert faults == []
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


def test_a_chosen_photo_shows_its_product_first(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_text("Choose a photo").click()
    chooser.value.set_files({"name": "snap.jpg", "mimeType": "image/jpeg", "buffer": tiny_photo(2, 7)})
    cards = page.locator("#results .card:not(.skeleton)")
    expect(cards).to_have_count(len(COLOURS))
    best = cards.first
    expect(best.locator(".title")).to_have_text("A blue ball")
    expect(best.locator(".facts")).to_have_text("Tiny · blue")
    expect(best.locator(".price")).to_have_text("6.50")
    expect(page.get_by_role("img", name="The photo you are searching with")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("The closest is A blue ball")
    expect(page.locator("#times")).to_contain_text("embed")
    assert best.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 96


def test_an_example_and_a_result_search_with_a_click(page: Page) -> None:
    page.get_by_role("button", name="red.jpg").click()
    first = page.locator("#results .card:not(.skeleton) .title").first
    expect(first).to_have_text("A red ball")
    page.get_by_role("button", name="Find what looks like A green ball").focus()
    page.keyboard.press("Enter")
    expect(first).to_have_text("A green ball")


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_a_photo_is_taken_by_drop_and_by_paste(page: Page, event: str) -> None:
    page.evaluate(
        """([event, bytes]) => {
            const held = new DataTransfer();
            held.items.add(new File([new Uint8Array(bytes)], "snap.jpg", { type: "image/jpeg" }));
            document.body.dispatchEvent(event === "drop"
                ? new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true })
                : new ClipboardEvent("paste", { clipboardData: held, bubbles: true }));
        }""",
        [event, list(tiny_photo(3, 7))],
    )
    expect(page.locator("#results .card:not(.skeleton) .title").first).to_have_text("A yellow ball")


def test_a_text_file_shows_what_is_wrong_and_what_to_do(page: Page) -> None:
    page.set_input_files("#choose", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not a photo"})
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("not an image of a known format")
    expect(alert).to_contain_text("JPEG, PNG")
    expect(page.locator("#results .card")).to_have_count(0)
    page.get_by_role("button", name="cyan.jpg").click()
    expect(page.locator("#results .title").first).to_have_text("A cyan ball")
    expect(alert).to_be_hidden()


def test_a_file_over_the_limit_is_refused_before_it_is_sent(page: Page) -> None:
    expect(page.locator("#counts")).not_to_be_empty()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    large = bytes(20 * 1024 * 1024 + 1)
    page.set_input_files("#choose", {"name": "large.jpg", "mimeType": "image/jpeg", "buffer": large})
    expect(page.get_by_role("alert")).to_contain_text("the limit is 20.0 MB")
    assert "POST" not in sent


def test_the_page_tells_what_it_searches_and_how_good_it_is(page: Page) -> None:
    expect(page.locator("#counts")).to_have_text("8 items · 16 images")
    expect(page.locator("#status")).to_contain_text("Recall@1 50.0 % → 90.0 %")


@pytest.mark.parametrize("width", [360, 390, 820, 1920])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    page.get_by_role("button", name="purple.jpg").click()
    expect(page.locator("#results .title").first).to_have_text("A purple ball")
    assert page.evaluate(overflow) == 0


def test_the_keyboard_reaches_the_file_chooser_first(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "choose"
    assert page.locator("label:has(#choose)").evaluate("label => getComputedStyle(label).outlineStyle") == "solid"


def test_a_service_that_went_away_is_told(page: Page) -> None:
    expect(page.locator("#counts")).not_to_be_empty()
    page.context.set_offline(True)
    page.set_input_files("#choose", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": tiny_photo(0, 0)})
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
