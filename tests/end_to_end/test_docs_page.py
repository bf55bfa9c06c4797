"""Tests of the interactive documentation in a real browser: it needs no other host and no inline script."""

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.support.pages import open_page

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
