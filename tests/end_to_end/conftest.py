"""Fixtures of the tests of the web page: a browser, and a service over a small gallery."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.browsers import find_browser
from tests.support.pages import MAX_BYTES, open_page
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, tiny_photo


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("Chromium or Chrome is not on the PATH: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def gallery(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    return make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))


@pytest.fixture(scope="module")
def address(gallery: Path) -> Iterator[str]:
    """Returns the address of a service over the gallery."""
    examples = gallery.with_name("examples")
    examples.mkdir()
    for number, colour in enumerate(COLOURS):
        (examples / f"{colour}.jpg").write_bytes(tiny_photo(number, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKALIKE_MAX_BODY_BYTES", str(MAX_BYTES))
        patch.setenv("LOOKALIKE_LOG_LEVEL", "warning")
        with run_server("serve", "--gallery", gallery, "--examples", examples) as address:
            yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with open_page(browser, address) as page:
        page.goto(address)
        yield page
