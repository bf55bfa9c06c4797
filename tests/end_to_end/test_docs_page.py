"""Tests of the interactive documentation in a real browser: it needs no other host and no inline script."""

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.support.pages import TIMEOUT_MS, open_page

pytestmark = pytest.mark.slow


def test_the_documentation_shows_and_runs_every_operation(browser: Browser, address: str) -> None:
    paths = httpx.get(f"{address}/openapi.json").json()["paths"]
    with open_page(browser, address) as page:  # which fails on any error of the console, and any other host
        page.goto(f"{address}/docs")
        expect(page.locator(".opblock")).to_have_count(sum(map(len, paths.values())))
        operation = page.locator("#operations-search-search")
        operation.locator(".opblock-summary-control").click()
        operation.get_by_role("button", name="Try it out").click()
        operation.locator("textarea.body-param__text").fill('{"item_id": "ball-red", "limit": 1}')
        operation.get_by_role("button", name="Execute").click()
        answer = operation.locator(".live-responses-table")
        expect(answer.locator("tbody .response-col_status")).to_contain_text("200")
        expect(answer).to_contain_text('"id": "ball-')


def test_the_documentation_has_the_policy_of_every_other_page(address: str) -> None:
    docs, page = httpx.get(f"{address}/docs"), httpx.get(address)
    assert docs.status_code == 200
    assert docs.headers["Content-Security-Policy"] == page.headers["Content-Security-Policy"]
    assert "unsafe" not in docs.headers["Content-Security-Policy"]


def test_the_reference_shows_every_operation(browser: Browser, address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()["paths"]
    operations = [operation["summary"] for path in document.values() for operation in path.values()]
    with browser.new_context() as context, context.new_page() as page:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"{address}/redoc")
        for operation in operations:
            expect(page.locator("h2", has_text=operation).first).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.locator(".redoc-wrap")).to_have_css("display", "flex")  # the policy did not block ReDoc's styles
        # ReDoc's own logo is the one thing that the policy must keep from another host.
        assert [text for text in errors if "redoc.ly/redoc/logo" not in text] == []
    policy = httpx.get(f"{address}/redoc").headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "https:" not in policy
