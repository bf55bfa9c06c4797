"""What happens around the page: slips of the hand, answers that fail, a reload, a re-index in between."""

import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.pages import MOST_BYTES, cards, expect_first, give, opened
from tests.support.tiny_gallery import COLOURS, tiny_photo

PAUSE_MS = 16_000  # longer than between two looks at the status
FORGOTTEN = "A reload forgets the photo"


def point(locator: Locator, across: float, down: float) -> tuple[float, float]:
    """A place in an element, in shares of it."""
    box = locator.bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=8)
    page.mouse.up()


def follow_status(page: Page) -> None:
    """Lets the page look at the status once more; its clock must be ours."""
    with page.expect_response("**/v1/status") as told:
        while not told.is_done():  # the pause begins when the last answer has been read
            page.clock.fast_forward(PAUSE_MS)


def once(answer: Callable[[Route], None]) -> Callable[[Route], None]:
    """A route that answers so the first time only."""
    answered: list[Route] = []

    def handle(route: Route) -> None:
        if answered:
            route.fallback()
            return
        answered.append(route)
        answer(route)

    return handle


def unavailable(route: Route) -> None:
    route.fulfill(status=503, body="busy")


# --- dragging


@pytest.mark.parametrize("dragged", [".brand", "#examples button", "#results .title"])
def test_what_is_dragged_from_the_page_leaves_the_answer(page: Page, address: str, dragged: str) -> None:
    page.goto(f"{address}/#example=red.jpg")
    expect_first(page, "A red ball")
    start = point(page.locator(dragged).first, 0.15, 0.5)
    if dragged == "#results .title":
        page.mouse.dblclick(*start)  # selects a word
    drag(page, start, point(cards(page).nth(1), 0.5, 0.5))
    expect(page.locator(".veil")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(cards(page)).to_have_count(len(COLOURS))
    expect_first(page, "A red ball")


def test_an_address_dropped_from_elsewhere_leaves_the_answer_and_is_told(page: Page, address: str) -> None:
    page.goto(f"{address}/#example=red.jpg")
    expect(cards(page)).to_have_count(len(COLOURS))
    page.evaluate(
        """() => {
            const held = new DataTransfer();
            held.setData("text/uri-list", "https://shop.example/mug");
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true }));
        }"""
    )
    expect(page.locator("#told")).to_contain_text("That was not a file")
    expect(cards(page)).to_have_count(len(COLOURS))
    page.get_by_role("button", name="blue.jpg").click()
    expect_first(page, "A blue ball")
    expect(page.locator("#told")).to_be_hidden()


def test_a_box_drawn_on_a_small_photo_is_where_the_mouse_was(browser: Browser, address: str) -> None:
    with opened(browser, address, viewport={"width": 600, "height": 900}) as page:
        page.goto(f"{address}/#example=red.jpg")
        expect_first(page, "A red ball")
        photo = page.locator("#frame")
        drag(page, point(photo, 0.25, 0.25), point(photo, 0.75, 0.75))
        expect(page.get_by_role("heading", name="Closest to this part")).to_be_visible()
        label = "Part to search for: 25 to 75 % across, 25 to 75 % down"
        expect(page.locator("#box")).to_have_attribute("aria-label", label)


# --- searches that cross


def test_a_filter_after_an_example_that_failed_searches_with_the_example(browser: Browser, address: str) -> None:
    with opened(browser, address, refusable=("/v1/search", "/green.jpg")) as page:
        page.goto(f"{address}/#example=red.jpg")
        expect_first(page, "A red ball")
        page.route("**/examples/green.jpg", once(unavailable))
        page.get_by_role("button", name="green.jpg").click()
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.locator("#photo")).to_be_hidden()  # it is the red one
        page.get_by_role("group", name="Colour").get_by_text("green").click()
        expect_first(page, "A green ball")
        expect(page.locator("#photo")).to_be_visible()


def test_an_arrow_key_before_an_example_does_not_search_in_it(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        page.get_by_role("button", name="Select a part").click()
        expect(page.get_by_role("heading", name="Closest to this part")).to_be_visible()
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/examples/blue.jpg", hold)
        page.keyboard.press("ArrowLeft")
        with page.expect_request("**/examples/blue.jpg"):
            page.get_by_role("button", name="blue.jpg").click()
        page.clock.fast_forward(2_000)
        held[0].continue_()
        expect_first(page, "A blue ball")
        expect(page.get_by_role("heading", name="Closest matches")).to_be_visible()
        assert "box=" not in page.url


def test_a_photo_over_the_limit_is_not_sent_with_a_filter_either(page: Page) -> None:
    expect(page.locator("#counts")).not_to_be_empty()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    give(page, bytes(MOST_BYTES + 1))
    expect(page.get_by_role("alert")).to_contain_text("the limit is 1.0 MB")
    page.get_by_role("group", name="Colour").get_by_text("green").click()
    expect(page.locator("#filter-count")).to_have_text("1")
    expect(page.get_by_role("alert")).to_contain_text("the limit is 1.0 MB")
    assert "POST" not in sent


def test_a_damaged_link_ends_the_search_under_way(page: Page, address: str) -> None:
    page.route("**/v1/search", lambda route: None)  # it never answers
    with page.expect_request("**/v1/search"):
        page.goto(f"{address}/#example=red.jpg")
    with page.expect_event("requestfailed"):
        page.evaluate("location.hash = '#filter=colour'")
    expect(page.get_by_role("alert")).to_contain_text("The link is damaged")
    expect(page.locator("#photo")).to_be_hidden()


# --- what fails in the background


def test_a_status_that_is_a_page_of_a_proxy_changes_nothing(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        expect(cards(page)).to_have_count(len(COLOURS))
        page.route("**/v1/status", once(lambda route: route.fulfill(content_type="text/html", body="<h1>Log in</h1>")))
        follow_status(page)
        follow_status(page)  # the page goes on asking
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(cards(page)).to_have_count(len(COLOURS))


def test_filters_that_could_not_be_had_come_with_the_next_status(browser: Browser, address: str) -> None:
    with opened(browser, address, refusable=("/v1/facets?count=100",)) as page:
        page.clock.install()
        page.route("**/v1/facets*", once(unavailable))
        with page.expect_response("**/v1/facets*"):
            page.goto(f"{address}/#example=red.jpg")
        expect(cards(page)).to_have_count(len(COLOURS))
        follow_status(page)
        expect(page.get_by_role("group", name="Colour")).to_be_visible()


def test_examples_that_could_not_be_had_leave_the_start_and_come_later(browser: Browser, address: str) -> None:
    with opened(browser, address, refusable=("/v1/examples",)) as page:
        page.clock.install()
        failing = "**/v1/examples"
        page.route(failing, unavailable)
        page.goto(address)
        expect(page.locator("#counts")).not_to_be_empty()
        follow_status(page)
        expect(page.get_by_role("heading", name="Seen something you like?")).to_be_visible()
        expect(page.get_by_role("alert")).to_be_hidden()
        page.unroute(failing)
        follow_status(page)
        page.get_by_role("button", name="red.jpg").click()
        expect_first(page, "A red ball")


# --- the way back


def test_the_way_back_behind_a_reload_does_not_show_another_photo(page: Page) -> None:
    give(page, tiny_photo(0, 7))
    expect_first(page, "A red ball")
    page.reload()
    expect(page.locator("#told")).to_contain_text(FORGOTTEN)
    give(page, tiny_photo(2, 7))
    expect_first(page, "A blue ball")
    expect(page.locator("#told")).to_be_hidden()
    page.go_back()
    expect(page.locator("#told")).to_contain_text(FORGOTTEN)
    expect(page.locator("#answer")).to_be_hidden()
    page.go_forward()
    expect_first(page, "A blue ball")


def test_the_way_back_leads_to_the_same_place_among_many_results(browser: Browser, address: str) -> None:
    def answer_many(route: Route) -> None:
        answer = route.fetch().json()
        route.fulfill(json=answer | {"items": answer["items"] * 6})

    with opened(browser, address, viewport={"width": 600, "height": 800}) as page:
        page.route("**/v1/search", answer_many)
        page.goto(f"{address}/#example=red.jpg&top=48")
        expect(cards(page)).to_have_count(48)
        place = page.evaluate("scrollTo(0, document.body.scrollHeight - 1200), scrollY")
        page.wait_for_function("place => scrollY === place", arg=place)
        cards(page).nth(40).get_by_role("button").dispatch_event("click")
        expect(page.get_by_role("heading", name="More like")).to_be_visible()
        page.wait_for_function("scrollY === 0")
        page.go_back()
        expect(page.get_by_role("heading", name="Closest matches")).to_be_visible()
        expect(cards(page)).to_have_count(48)
        page.wait_for_function("place => Math.abs(scrollY - place) < 100", arg=place)


# --- the keyboard


def test_the_keyboard_goes_on_at_the_answer_when_an_example_leaves_a_phone(browser: Browser, address: str) -> None:
    with opened(browser, address, viewport={"width": 390, "height": 844}) as page:
        page.goto(address)
        page.get_by_role("button", name="red.jpg").press("Enter")
        expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_the_keyboard_goes_on_at_the_answer_when_filters_are_cleared(page: Page, address: str) -> None:
    nothing = quote(json.dumps({"price": {"lte": 1}}))
    page.goto(f"{address}/#example=red.jpg&filter={nothing}")
    page.locator("#nothing").get_by_role("button", name="Clear all filters").press("Enter")
    expect_first(page, "A red ball")
    expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_the_keyboard_goes_on_at_the_answer_when_it_is_tried_again(page: Page, address: str) -> None:
    page.route("**/v1/search", once(unavailable))
    page.goto(f"{address}/#example=red.jpg")
    page.get_by_role("button", name="Try again").press("Enter")
    expect_first(page, "A red ball")
    expect(page.get_by_role("heading", name="Closest matches")).to_be_focused()


def test_a_reindex_does_not_take_a_field_from_under_the_hands(browser: Browser, address: str) -> None:
    def go_live(route: Route) -> None:
        status = route.fetch().json()
        status["gallery"]["index"]["name"] = "another"
        route.fulfill(json=status)

    size = {"name": "size", "values": [["S", 3], ["M", 2]], "minimum": None, "maximum": None, "distinct": 2}
    with opened(browser, address) as page:
        page.clock.install()
        page.goto(f"{address}/#example=red.jpg")
        field = page.get_by_role("group", name="Price").get_by_label("at least")
        field.press("5")
        page.route("**/v1/status", go_live)
        page.route("**/v1/facets*", lambda route: route.fulfill(json={"facets": [size]}))
        with page.expect_response("**/v1/facets*"):
            follow_status(page)
        follow_status(page)
        expect(field).to_be_focused()
        expect(field).to_have_value("5")
        page.locator("#filters summary").focus()
        follow_status(page)
        expect(page.get_by_role("group", name="Size")).to_be_visible()


# --- small things


def test_what_only_some_items_have_is_a_filter_and_hidden_values_are_counted(browser: Browser, address: str) -> None:
    def facet(name: str, *values: tuple[str | bool, int]) -> dict[str, object]:
        return {"name": name, "values": values, "minimum": None, "maximum": None, "distinct": len(values)}

    facets = [
        facet("on_sale", (True, 3)),
        facet("brand", ("Tiny", len(COLOURS))),
        facet("designer", ("Anna", 1)),
        facet("colour", *((colour, 1) for colour in COLOURS)),
    ]
    with opened(browser, address) as page:
        page.route("**/v1/facets*", lambda route: route.fulfill(json={"facets": facets}))
        page.goto(f"{address}/#example=red.jpg&filter={quote(json.dumps({'colour': COLOURS[7]}))}")
        expect(page.locator("#facets legend")).to_have_text(["Colour", "On sale"])
        page.get_by_role("button", name="1 more").click()
        expect(page.get_by_role("checkbox", name=COLOURS[6])).to_be_focused()


def test_the_tab_and_the_skip_link_know_the_answer(page: Page, address: str) -> None:
    expect(page).to_have_title("Lookalike")
    page.goto(f"{address}/#item=ball-green")
    expect(page).to_have_title("More like A green ball · Lookalike")
    page.get_by_text("Skip to the content").press("Enter")
    expect(page.get_by_role("heading", name="More like A green ball")).to_be_focused()
    page.go_back()
    expect(page).to_have_title("Lookalike")


def test_a_link_that_may_not_be_copied_is_told(page: Page, address: str) -> None:
    page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new DOMException('no'))")
    page.goto(f"{address}/?fresh#item=ball-green")
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#told")).to_contain_text("did not let the page copy")
