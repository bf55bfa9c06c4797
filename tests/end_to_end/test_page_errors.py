"""Tests of the web page when something interferes: stray drags, failed requests, reloads, a re-index."""

import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.pages import MAX_BYTES, cards, expect_first, facet, open_page, upload
from tests.support.tiny_gallery import COLOURS, tiny_photo

pytestmark = pytest.mark.slow

POLL_MS = 16_000  # longer than the polling interval of the status
PHOTO_LOST = "Photos are not kept after a reload"


def point(locator: Locator, across: float, down: float) -> tuple[float, float]:
    """Returns a point in an element, given as fractions of its size."""
    box = locator.bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=8)
    page.mouse.up()


def poll_status(page: Page) -> None:
    """Makes the page poll the status once more; its clock must be installed."""
    with page.expect_response("**/v1/status") as response:
        while not response.is_done():  # the interval begins when the last response has been read
            page.clock.fast_forward(POLL_MS)


def once(handler: Callable[[Route], None]) -> Callable[[Route], None]:
    """Returns a route handler that applies to the first request only."""
    handled: list[Route] = []

    def handle(route: Route) -> None:
        if handled:
            route.fallback()
            return
        handled.append(route)
        handler(route)

    return handle


def unavailable(route: Route) -> None:
    route.fulfill(status=503, body="busy")


# --- dragging


@pytest.mark.parametrize("dragged", [".brand", "#examples button", "#results .title"])
def test_dragging_an_element_of_the_page_keeps_the_results(page: Page, address: str, dragged: str) -> None:
    page.goto(f"{address}/#example=red.jpg")
    expect_first(page, "A red ball")
    start = point(page.locator(dragged).first, 0.15, 0.5)
    if dragged == "#results .title":
        page.mouse.dblclick(*start)  # selects a word
    drag(page, start, point(cards(page).nth(1), 0.5, 0.5))
    expect(page.locator(".drop-overlay")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(cards(page)).to_have_count(len(COLOURS))
    expect_first(page, "A red ball")


def test_dropped_link_keeps_the_results_and_shows_a_notice(page: Page, address: str) -> None:
    page.goto(f"{address}/#example=red.jpg")
    expect(cards(page)).to_have_count(len(COLOURS))
    page.evaluate(
        """() => {
            const transfer = new DataTransfer();
            transfer.setData("text/uri-list", "https://shop.example/mug");
            const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
            document.body.dispatchEvent(new DragEvent("drop", options));
        }"""
    )
    expect(page.locator("#notice")).to_contain_text("That is not a file")
    expect(cards(page)).to_have_count(len(COLOURS))
    page.get_by_role("button", name="blue.jpg").click()
    expect_first(page, "A blue ball")
    expect(page.locator("#notice")).to_be_hidden()


def test_box_drawn_on_a_small_photo_follows_the_mouse(browser: Browser, address: str) -> None:
    with open_page(browser, address, viewport={"width": 600, "height": 900}) as page:
        page.goto(f"{address}/#example=red.jpg")
        expect_first(page, "A red ball")
        photo = page.locator("#frame")
        drag(page, point(photo, 0.25, 0.25), point(photo, 0.75, 0.75))
        expect(page.get_by_role("heading", name="Closest to the selected part")).to_be_visible()
        label = "Selected part: 25 to 75 % across, 25 to 75 % down"
        expect(page.locator("#box")).to_have_attribute("aria-label", label)


# --- concurrent searches


def test_filter_after_a_failed_example_searches_with_the_example(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("/v1/search", "/green.jpg")) as page:
        page.goto(f"{address}/#example=red.jpg")
        expect_first(page, "A red ball")
        page.route("**/examples/green.jpg", once(unavailable))
        page.get_by_role("button", name="green.jpg").click()
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.locator("#photo")).to_be_hidden()  # it still shows the red one
        page.get_by_role("group", name="Colour").get_by_text("green").click()
        expect_first(page, "A green ball")
        expect(page.locator("#photo")).to_be_visible()


def test_pending_arrow_key_does_not_affect_the_next_example(browser: Browser, address: str) -> None:
    with open_page(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        page.get_by_role("button", name="Select a part").click()
        expect(page.get_by_role("heading", name="Closest to the selected part")).to_be_visible()
        delayed: list[Route] = []

        def delay(route: Route) -> None:
            delayed.append(route)

        page.route("**/examples/blue.jpg", delay)
        page.keyboard.press("ArrowLeft")
        with page.expect_request("**/examples/blue.jpg"):
            page.get_by_role("button", name="blue.jpg").click()
        page.clock.fast_forward(2_000)
        delayed[0].continue_()
        expect_first(page, "A blue ball")
        expect(page.get_by_role("heading", name="Closest matches")).to_be_visible()
        assert "box=" not in page.url


def test_photo_over_the_limit_is_never_sent(page: Page) -> None:
    expect(page.locator("#counts")).not_to_be_empty()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    upload(page, bytes(MAX_BYTES + 1))
    expect(page.get_by_role("alert")).to_contain_text("the limit is 1.0 MB")
    page.get_by_role("group", name="Colour").get_by_text("green").click()
    expect(page.locator("#filter-count")).to_have_text("1")
    expect(page.get_by_role("alert")).to_contain_text("the limit is 1.0 MB")
    assert "POST" not in sent


def test_invalid_link_aborts_the_current_search(page: Page, address: str) -> None:
    page.route("**/v1/search", lambda route: None)  # never responds
    with page.expect_request("**/v1/search"):
        page.goto(f"{address}/#example=red.jpg")
    with page.expect_event("requestfailed"):
        page.evaluate("location.hash = '#filter=colour'")
    expect(page.get_by_role("alert")).to_contain_text("Invalid link")
    expect(page.locator("#photo")).to_be_hidden()


# --- failures in the background


def test_html_response_to_a_status_request_changes_nothing(browser: Browser, address: str) -> None:
    with open_page(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        expect(cards(page)).to_have_count(len(COLOURS))
        page.route("**/v1/status", once(lambda route: route.fulfill(content_type="text/html", body="<h1>Log in</h1>")))
        poll_status(page)
        poll_status(page)  # polling continues
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(cards(page)).to_have_count(len(COLOURS))


def test_filters_that_failed_to_load_appear_with_the_next_status(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("/v1/facets?limit=100",)) as page:
        page.clock.install()
        page.route("**/v1/facets*", once(unavailable))
        with page.expect_response("**/v1/facets*"):
            page.goto(f"{address}/#example=red.jpg")
        expect(cards(page)).to_have_count(len(COLOURS))
        poll_status(page)
        expect(page.get_by_role("group", name="Colour")).to_be_visible()


def test_examples_that_failed_to_load_appear_with_the_next_status(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("/v1/examples",)) as page:
        page.clock.install()
        page.route("**/v1/examples", unavailable)
        page.goto(address)
        expect(page.locator("#counts")).not_to_be_empty()
        poll_status(page)
        expect(page.get_by_role("heading", name="Seen something you like?")).to_be_visible()
        expect(page.get_by_role("alert")).to_be_hidden()
        page.unroute("**/v1/examples")
        poll_status(page)
        page.get_by_role("button", name="red.jpg").click()
        expect_first(page, "A red ball")


# --- history


def test_going_back_after_a_reload_does_not_show_another_photo(page: Page) -> None:
    upload(page, tiny_photo(0, 7))
    expect_first(page, "A red ball")
    page.reload()
    expect(page.locator("#notice")).to_contain_text(PHOTO_LOST)
    upload(page, tiny_photo(2, 7))
    expect_first(page, "A blue ball")
    expect(page.locator("#notice")).to_be_hidden()
    page.go_back()
    expect(page.locator("#notice")).to_contain_text(PHOTO_LOST)
    expect(page.locator("#results-section")).to_be_hidden()
    page.go_forward()
    expect_first(page, "A blue ball")


def test_going_back_restores_the_scroll_position(browser: Browser, address: str) -> None:
    def repeat_items(route: Route) -> None:
        results = route.fetch().json()
        copies = [
            {**item, "image": {"url": f"{item['image']['url']}?{n}"}} for n in range(6) for item in results["items"]
        ]
        route.fulfill(json=results | {"items": copies})

    with open_page(browser, address, viewport={"width": 600, "height": 800}) as page:
        page.route("**/v1/search", repeat_items)
        page.goto(f"{address}/#example=red.jpg&limit=48")
        expect(cards(page)).to_have_count(48)
        position = page.evaluate("scrollTo(0, document.body.scrollHeight - 1200), scrollY")
        page.wait_for_function("position => scrollY === position", arg=position)
        cards(page).nth(40).get_by_role("button", name="More like").dispatch_event("click")
        expect(page.get_by_role("heading", name="More like")).to_be_visible()
        page.wait_for_function("scrollY === 0")
        page.go_back()
        expect(page.get_by_role("heading", name="Closest matches")).to_be_visible()
        expect(cards(page)).to_have_count(48)
        page.wait_for_function("position => Math.abs(scrollY - position) < 100", arg=position)


# --- focus


def test_focus_moves_to_the_results_when_a_phone_hides_the_example(browser: Browser, address: str) -> None:
    with open_page(browser, address, viewport={"width": 390, "height": 844}) as page:
        page.goto(address)
        page.get_by_role("button", name="red.jpg").press("Enter")
        expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_focus_moves_to_the_results_when_filters_are_cleared(page: Page, address: str) -> None:
    no_match = quote(json.dumps({"price": {"lte": 1}}))
    page.goto(f"{address}/#example=red.jpg&filter={no_match}")
    page.locator("#no-results").get_by_role("button", name="Clear all filters").press("Enter")
    expect_first(page, "A red ball")
    expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_focus_moves_to_the_results_after_a_retry(page: Page, address: str) -> None:
    page.route("**/v1/search", once(unavailable))
    page.goto(f"{address}/#example=red.jpg")
    page.get_by_role("button", name="Try again").press("Enter")
    expect_first(page, "A red ball")
    expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_reindex_does_not_replace_a_field_that_is_edited(browser: Browser, address: str) -> None:
    def change_generation(route: Route) -> None:
        status = route.fetch().json()
        status["gallery"]["index"]["name"] = "another"
        route.fulfill(json=status)

    size = facet("size", ("S", 3), ("M", 2))
    with open_page(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        field = page.get_by_role("group", name="Price").get_by_label("at least")
        field.press("5")
        page.route("**/v1/status", change_generation)
        page.route("**/v1/facets*", lambda route: route.fulfill(json={"facets": [size]}))
        with page.expect_response("**/v1/facets*"):
            poll_status(page)
        poll_status(page)
        expect(field).to_be_focused()
        expect(field).to_have_value("5")
        page.locator("#filters summary").focus()
        poll_status(page)
        expect(page.get_by_role("group", name="Size")).to_be_visible()


# --- details


def test_attributes_of_some_items_are_filters_and_hidden_values_are_counted(browser: Browser, address: str) -> None:
    facets = [
        facet("on_sale", (True, 3)),
        facet("brand", ("Tiny", len(COLOURS))),
        facet("designer", ("Anna", 1)),
        facet("colour", *((colour, 1) for colour in COLOURS)),
    ]
    with open_page(browser, address) as page:
        page.route("**/v1/facets*", lambda route: route.fulfill(json={"facets": facets}))
        page.goto(f"{address}/#example=red.jpg&filter={quote(json.dumps({'colour': COLOURS[7]}))}")
        expect(page.locator("#facets legend")).to_have_text(["Colour", "On sale"])
        page.get_by_role("button", name="1 more").click()
        expect(page.get_by_role("checkbox", name=COLOURS[6])).to_be_focused()


def test_list_of_values_names_what_it_leaves_out(browser: Browser, address: str) -> None:
    types = facet("type", *((f"Type {n}", 200 - n) for n in range(100))) | {"distinct": 142}

    def respond(route: Route) -> None:
        found = facet("type", ("Rare type", 1)) if "contains=rare" in route.request.url else types
        route.fulfill(json={"facets": [found]})

    with open_page(browser, address) as page:
        page.route("**/v1/facets*", respond)
        page.goto(f"{address}/#example=red.jpg")
        group = page.get_by_role("group", name="Type")
        group.get_by_role("button", name="136 more").click()
        expect(group).to_contain_text("The 100 most frequent of 142 values. Search to find the others.")
        group.get_by_role("searchbox").fill("rare")
        expect(group.locator(".chip")).to_have_text(["Rare type1"])
        group.get_by_text("Rare type").click()
        expect(page.locator("#filter-count")).to_have_text("1")


def test_values_have_no_counts_when_those_of_the_filter_fail(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("%7D",)) as page:
        page.goto(f"{address}/#example=red.jpg")
        page.route("**/v1/facets?*filter=*", unavailable)
        colours = page.get_by_role("group", name="Colour")
        expect(colours.locator(".count").first).to_have_text("1")
        page.get_by_role("group", name="Price").get_by_label("at most").fill("6")
        page.keyboard.press("Enter")
        expect(cards(page)).to_have_count(2)
        expect(colours.locator(".count").first).to_have_text("")
        expect(colours.locator(".chip")).to_have_count(len(COLOURS))


def test_failed_search_among_values_is_shown(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("contains=re",)) as page:
        page.goto(f"{address}/#example=red.jpg")
        page.route("**/v1/facets?*contains=*", once(unavailable))
        colours = page.get_by_role("group", name="Colour")
        colours.get_by_role("searchbox").fill("re")
        expect(colours).to_contain_text("The values cannot be searched now.")
        expect(colours.locator(".chip")).to_have_count(len(COLOURS))
        colours.get_by_role("searchbox").fill("red")
        expect(colours.locator(".chip")).to_have_text(["red1"])
        expect(colours).not_to_contain_text("cannot be searched")


def test_details_show_the_result_when_the_item_cannot_be_loaded(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("/ball-red",)) as page:
        page.route("**/v1/items/ball-red", unavailable)
        page.goto(f"{address}/#example=red.jpg")
        page.get_by_role("button", name="Details of A red ball").click()
        dialog = page.get_by_role("dialog", name="A red ball")
        expect(dialog.get_by_role("alert")).to_contain_text("Only one photo could be loaded.")
        expect(dialog).to_contain_text("ball-red")
        page.go_back()
        expect(dialog).to_be_hidden()


def test_tab_title_and_skip_link_follow_the_results(page: Page, address: str) -> None:
    expect(page).to_have_title("Lookalike")
    page.goto(f"{address}/#item=ball-green")
    expect(page).to_have_title("More like A green ball · Lookalike")
    page.get_by_text("Skip to content").press("Enter")
    expect(page.get_by_role("heading", name="More like A green ball")).to_be_focused()
    page.go_back()
    expect(page).to_have_title("Lookalike")


def test_blocked_copying_shows_a_notice(page: Page, address: str) -> None:
    page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new DOMException('no'))")
    page.goto(f"{address}/?fresh#item=ball-green")
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#notice")).to_contain_text("blocked copying")
