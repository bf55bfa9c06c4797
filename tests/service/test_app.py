"""The application: starting, the web page, and a prefix in front of its addresses."""

import asyncio
import logging
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from index.errors import LookalikeError
from service.admission import Admission
from service.app import create_app
from service.observability.metrics import Telemetry
from service.observability.tracing import Tracing
from service.settings import Settings
from service.state import open_state
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo


def start(app: FastAPI) -> None:
    async def run() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(run())


def test_a_gallery_of_another_bundle_is_refused_at_start(settings: Settings, tmp_path: Path) -> None:
    other = make_tiny_bundle(tmp_path / "other", resize=40)
    with pytest.raises(LookalikeError, match=r"was indexed with bundle .* reindex"):
        start(create_app(settings.model_copy(update={"bundle": other})))


def test_a_missing_bundle_or_gallery_is_named_at_start(settings: Settings, tmp_path: Path) -> None:
    for name in ("bundle", "gallery"):
        with pytest.raises(LookalikeError, match="nowhere"):
            start(create_app(settings.model_copy(update={name: tmp_path / "nowhere"})))


def test_the_bundle_in_use_is_logged_by_the_application_and_not_by_the_check_before_it(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        telemetry = Telemetry(Tracing())
        async with open_state(settings, telemetry, Admission(settings, telemetry)):
            pass

    caplog.set_level(logging.INFO, "service")
    asyncio.run(check())
    assert "queries are embedded with bundle" not in caplog.text
    start(create_app(settings))
    assert caplog.text.count("queries are embedded with bundle") == 1


def test_the_page_takes_everything_from_the_service(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"web/app.js", "web/style.css", "web/favicon.svg"} <= set(addresses)
    for address in addresses:
        assert client.get(f"/{address}").status_code == 200
    assert "<script>" not in page.text and "style=" not in page.text
    assert client.get("/web/app.js").headers["content-type"].startswith("text/javascript")


def test_behind_a_prefix_that_the_proxy_strips_the_addresses_in_answers_carry_it(settings: Settings) -> None:
    with serving(settings, root_path="/shop") as client:
        answer = client.post("/v1/search", files={"image": tiny_photo(0, 0)}).json()
        assert answer["items"][0]["image"]["url"].startswith("/shop/media/")
        (example,) = client.get("/v1/examples").json()["examples"]
        assert example["url"] == "/shop/examples/blue%20ball.jpg"
