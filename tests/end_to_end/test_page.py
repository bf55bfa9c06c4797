"""Tests of the web page in a real browser against a real server process."""

import json
import re
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from index.gallery.store.sqlite_jobs import SQLiteJobs
from service.auth.api_keys import KeyRing
from tests.support.pages import cards, expect_first, facet, open_page, photo_of_two, upload
from tests.support.processes import run_server
from tests.support.tiny_gallery import COLOURS, tiny_photo

pytestmark = pytest.mark.slow

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


# --- photos


def test_chosen_photo_finds_its_product_first(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_text("Choose a photo").click()
    chooser.value.set_files({"name": "snap.jpg", "mimeType": "image/jpeg", "buffer": tiny_photo(2, 7)})
    expect(cards(page)).to_have_count(len(COLOURS))
    best = cards(page).first
    expect(best.locator(".title")).to_have_text("A blue ball")
    expect(best.locator(".facts")).to_have_text("Tiny · ball · blue")
    expect(best.locator(".price")).to_have_text("6.50")
    expect(best.locator(".score-value")).to_have_text(re.compile(r"0\.\d\d"))
    expect(page.get_by_role("img", name="The photo you are searching with")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("The closest is A blue ball")
    expect(page.locator("#timings")).to_be_hidden()
    expect(page.get_by_role("button", name="Copy link")).to_be_hidden()
    assert best.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 96


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_photo_can_be_dropped_or_pasted(page: Page, event: str) -> None:
    page.evaluate(
        """([event, bytes]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "snap.jpg", { type: "image/jpeg" }));
            document.body.dispatchEvent(event === "drop"
                ? new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true })
                : new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true }));
        }""",
        [event, list(tiny_photo(3, 7))],
    )
    expect_first(page, "A yellow ball")


def test_search_works_with_the_keyboard_alone(page: Page) -> None:
    expect(page.locator("#panel")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#upload")).to_be_focused()
    assert page.locator("label:has(#upload)").evaluate("label => getComputedStyle(label).outlineStyle") == "solid"
    page.keyboard.press("Tab")  # skips the camera, which only phones show
    expect(page.get_by_role("button", name="blue.jpg")).to_be_focused()
    page.keyboard.press("Enter")
    expect_first(page, "A blue ball")
    page.get_by_role("button", name="More like A blue ball").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="More like A blue ball")).to_be_focused()


# --- a part of the photo


def test_box_drawn_on_the_photo_searches_with_that_part(page: Page) -> None:
    upload(page, photo_of_two(0, 2))
    expect(cards(page)).to_have_count(len(COLOURS))
    frame = page.locator("#frame").bounding_box()
    assert frame is not None and frame["width"] == pytest.approx(2 * frame["height"], abs=2)
    page.mouse.move(frame["x"] + frame["width"] / 2, frame["y"] + 1)
    page.mouse.down()
    page.mouse.move(frame["x"] + frame["width"] + 50, frame["y"] + frame["height"] + 50, steps=3)
    page.mouse.up()
    expect_first(page, "A blue ball")
    expect(page.get_by_role("heading", name="Closest to the selected part")).to_be_visible()
    page.get_by_role("button", name="Whole photo").click()
    expect(page.get_by_role("heading", name="Closest matches")).to_be_visible()
    expect(page.locator("#box")).to_be_hidden()


def test_arrow_keys_move_and_resize_the_box(page: Page) -> None:
    upload(page, photo_of_two(0, 2))
    page.get_by_role("button", name="Select a part").click()
    box = page.locator("#box")
    expect(box).to_be_focused()
    for _ in range(5):
        page.keyboard.press("Shift+ArrowLeft")
        page.keyboard.press("ArrowLeft")
    expect(box).to_have_attribute("aria-label", "Selected part: 10 to 60 % across, 20 to 80 % down")
    for _ in range(6):
        page.keyboard.press("Shift+ArrowLeft")
    expect_first(page, "A red ball")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    expect(box).to_have_attribute("aria-label", "Selected part: 62 to 100 % across, 20 to 80 % down")
    expect_first(page, "A blue ball")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Select a part")).to_be_focused()


# --- filters, pages, links


def test_filters_come_from_the_attributes_and_narrow_the_search(page: Page) -> None:
    page.get_by_role("button", name="red.jpg").click()
    colours = page.get_by_role("group", name="Colour")
    colours.get_by_role("button", name="2 more").click()
    expect(colours.get_by_role("checkbox")).to_have_count(len(COLOURS))
    expect(page.get_by_role("group", name="Brand")).to_have_count(0)  # all items have the same brand
    for colour in ("green", "blue"):
        colours.get_by_text(colour).click()
    expect(cards(page)).to_have_count(2)
    price = page.get_by_role("group", name="Price")
    price.get_by_label("at most").fill("6")
    price.get_by_label("at most").press("Enter")
    expect(cards(page).locator(".title")).to_have_text(["A green ball"])
    price.get_by_label("at most").fill("1")
    price.get_by_label("at most").press("Enter")
    expect(page.locator("#no-results")).to_contain_text("No item matches all filters")
    page.locator("#no-results").get_by_role("button", name="Clear all filters").click()
    expect(cards(page)).to_have_count(len(COLOURS))
    expect(colours.get_by_role("checkbox", checked=True)).to_have_count(0)


def test_counts_follow_the_conditions_of_the_other_attributes(page: Page) -> None:
    page.get_by_role("button", name="red.jpg").click()
    colours = page.get_by_role("group", name="Colour")
    price = page.get_by_role("group", name="Price")
    price.get_by_label("at most").fill("6")
    price.get_by_label("at most").press("Enter")
    expect(colours.locator(".chip")).to_have_text(["green1", "red1"])  # the colours within the price
    colours.get_by_text("green").click()
    expect(cards(page).locator(".title")).to_have_text(["A green ball"])
    expect(colours.locator(".chip")).to_have_text(["green1", "red1"])  # despite the chosen one
    expect(colours.get_by_role("checkbox", name="green")).to_be_focused()
    expect(price.get_by_label("at most")).to_have_attribute("placeholder", "6")  # of the green ones
    price.get_by_label("at least").fill("6")
    price.get_by_label("at least").press("Enter")
    expect(colours.locator(".chip")).to_have_text(["green0"])  # checked, so that it can be cleared
    page.locator("#filters").get_by_role("button", name="Clear all filters").click()
    expect(colours.locator(".chip")).to_have_count(len(COLOURS))


def test_values_are_found_with_the_search_box_of_an_attribute(page: Page) -> None:
    page.get_by_role("button", name="red.jpg").click()
    colours = page.get_by_role("group", name="Colour")
    box = colours.get_by_role("searchbox", name="Search the values of Colour")
    box.press_sequentially("RE")
    expect(colours.locator(".chip")).to_have_text(["green1", "red1"])
    expect(page.get_by_role("status")).to_have_text("2 values found.")
    colours.get_by_text("red").click()
    expect(cards(page)).to_have_count(1)
    box.fill("no such")
    expect(colours).to_contain_text("No value contains “no such”.")
    expect(colours.get_by_role("checkbox", checked=True)).to_have_count(1)  # what is chosen stays visible
    box.fill("")
    expect(colours.locator(".chip")).to_have_count(len(COLOURS))
    expect(colours.get_by_role("checkbox", name="red")).to_be_checked()


def test_attributes_may_be_named_like_javascript_properties(browser: Browser, address: str) -> None:
    choices = facet("constructor", ("A", 3), ("B", 2))
    numbers = {**facet("toString", (1, 3), (2, 2)), "minimum": 1, "maximum": 2}
    with open_page(browser, address) as page:
        page.route("**/v1/facets*", lambda route: route.fulfill(json={"facets": [choices, numbers]}))
        page.goto(address)
        page.get_by_role("button", name="red.jpg").click()
        group = page.get_by_role("group", name="Constructor")
        expect(group.get_by_role("checkbox")).to_have_count(2)
        expect(group.get_by_role("checkbox", checked=True)).to_have_count(0)
        expect(page.get_by_role("group", name="ToString").get_by_label("at most")).to_have_value("")
        group.get_by_text("A", exact=True).click()
        expect(page.locator("#filter-count")).to_have_text("1")


def test_more_like_this_searches_with_the_item_and_back_returns(page: Page) -> None:
    upload(page, tiny_photo(0, 7))
    expect_first(page, "A red ball")
    with page.expect_request("**/v1/search") as sent:
        page.get_by_role("button", name="More like A green ball").click(force=True)
    assert json.loads(sent.value.post_data or "{}")["item_id"] == "ball-green"
    expect(page.get_by_role("heading", name="More like A green ball")).to_be_visible()
    expect(cards(page)).to_have_count(len(COLOURS) - 1)
    expect(cards(page).get_by_text("A green ball")).to_have_count(0)
    expect(page.get_by_role("img", name="The item you are searching with: A green ball")).to_be_visible()
    page.go_back()
    expect_first(page, "A red ball")
    page.go_back()
    expect(page.get_by_role("heading", name="Seen something you like?")).to_be_visible()
    expect(page.locator("#results-section")).to_be_hidden()


def test_show_more_appends_the_next_page(page: Page, address: str) -> None:
    page.goto(f"{address}/#example=red.jpg&limit=3")
    expect(cards(page)).to_have_count(3)
    first = cards(page).locator(".title").all_inner_texts()
    page.get_by_role("button", name="Show more").click()
    expect(cards(page)).to_have_count(len(COLOURS))
    titles = cards(page).locator(".title").all_inner_texts()
    assert titles[:3] == first and len(set(titles)) == len(COLOURS)
    expect(cards(page).nth(3).get_by_role("button", name="More like")).to_be_focused()
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()
    expect(page.locator("#end-of-results")).to_have_text("End of results: 8 items")
    assert page.url.endswith("limit=15")


def test_link_reproduces_the_search(page: Page, browser: Browser, address: str) -> None:
    wanted = {"colour": ["cyan", "orange"], "price": {"gte": 5}, "not": {"brand": "Other"}}
    page.goto(f"{address}/#item=ball-purple&filter={quote(json.dumps(wanted))}")
    expect(page.get_by_role("heading", name="More like A purple ball")).to_be_visible()
    expect(cards(page)).to_have_count(2)
    expect(page.get_by_role("checkbox", name="cyan")).to_be_checked()
    expect(page.get_by_label("at least")).to_have_value("5")
    expect(page.locator("#other-conditions-text")).to_have_text('{"not":{"brand":"Other"}}')

    page.get_by_role("button", name="red.jpg").click()
    page.get_by_role("button", name="Clear all filters").click()
    page.get_by_role("button", name="Select a part").click()
    expect(page.get_by_role("heading", name="Closest to the selected part")).to_be_visible()
    scores = cards(page).locator(".score-value").all_inner_texts()
    with open_page(browser, address) as other:
        other.goto(page.url)
        expect(other.get_by_role("heading", name="Closest to the selected part")).to_be_visible()
        expect(other.locator("#box")).to_be_visible()
        assert cards(other).locator(".score-value").all_inner_texts() == scores


def test_invalid_link_shows_an_error(page: Page, address: str) -> None:
    page.goto(f"{address}/#example=red.jpg&filter=colour")
    expect(page.get_by_role("alert")).to_contain_text("Invalid link")
    expect(page.get_by_role("alert")).to_contain_text("filter")


# --- details and equal photos


def test_details_that_open_while_others_close_stay_usable(browser: Browser, address: str) -> None:
    with open_page(browser, address) as page:
        page.goto(f"{address}/#example=red.jpg")
        opener = page.get_by_role("button", name="Details of A blue ball")
        opener.click()
        # In one task: the dialog's event `close` arrives after it was opened again.
        opener.evaluate("node => { document.getElementById('item-dialog').close(); node.click(); }")
        dialog = page.get_by_role("dialog", name="A blue ball")
        expect(dialog.get_by_role("img", name="Photo 2 of 2")).to_be_visible()
        expect(dialog).to_have_attribute("aria-busy", "false")
        dialog.get_by_role("button", name="More like this").click()
        expect(page.get_by_role("heading", name="More like A blue ball")).to_be_focused()


@pytest.mark.parametrize("width", [390, 1280])
def test_details_show_the_id_all_attributes_and_all_photos(browser: Browser, address: str, width: int) -> None:
    with open_page(browser, address, viewport={"width": width, "height": 844}) as page:
        page.goto(f"{address}/#example=red.jpg")
        opener = page.get_by_role("button", name="Details of A blue ball")
        opener.press("Enter")
        dialog = page.get_by_role("dialog", name="A blue ball")
        expect(dialog.get_by_role("heading")).to_be_focused()
        facts = ["Item IDball-blue", "BrandTiny", "Categoryball", "Colourblue", "Price6.5"]
        expect(dialog.locator("dl div")).to_have_text(facts)
        expect(dialog.get_by_role("img", name="Photo 2 of 2")).to_be_visible()
        assert page.evaluate(OVERFLOW) == 0
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()
        opener.press("Enter")
        dialog.get_by_role("button", name="More like this").click()
        expect(page.get_by_role("heading", name="More like A blue ball")).to_be_focused()
        expect(dialog).to_be_hidden()


def test_items_with_the_same_photo_are_collapsed(browser: Browser, address: str) -> None:
    def share_photo(route: Route) -> None:
        results = route.fetch().json()
        for item in results["items"][1:3]:
            item["image"] = results["items"][0]["image"]
        route.fulfill(json=results)

    with open_page(browser, address) as page:
        page.route("**/v1/search", share_photo)
        page.goto(f"{address}/#example=red.jpg")
        button = cards(page).first.get_by_role("button", name="3 items with this photo")
        expect(button).to_have_attribute("aria-expanded", "false")
        expect(cards(page).filter(visible=True)).to_have_count(len(COLOURS) - 2)
        expect(page.locator("#end-of-results")).to_have_text("End of results: 8 items")
        button.click()
        expect(cards(page).filter(visible=True)).to_have_count(len(COLOURS))
        button.click()
        expect(cards(page).filter(visible=True)).to_have_count(len(COLOURS) - 2)
        expect(page.get_by_role("button", name="items with this photo")).to_have_count(1)


# --- errors


def test_text_file_shows_an_error_and_its_remedy(page: Page) -> None:
    upload(page, b"not a photo", "notes.txt", "text/plain")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("This file cannot be read as a photo")
    expect(alert).to_contain_text("This file is not a photo of a known format.")
    expect(alert).to_contain_text("Choose a photo that is saved as JPEG, PNG, WebP, AVIF or TIFF.")
    expect(page.locator("#problem-id")).to_contain_text("Request ")
    expect(alert.get_by_role("button", name="Try again")).to_be_hidden()  # it would fail again
    expect(page.locator("#results .card")).to_have_count(0)
    page.get_by_role("button", name="cyan.jpg").click()
    expect_first(page, "A cyan ball")
    expect(alert).to_be_hidden()


def test_unreachable_service_shows_an_error_and_can_be_retried(browser: Browser, address: str) -> None:
    # Images that are still loading fail together with the search: any request may fail here.
    with open_page(browser, address, refusable=("",)) as page:
        page.goto(address)
        expect(page.locator("#counts")).not_to_be_empty()
        page.context.set_offline(True)
        upload(page, tiny_photo(0, 0))
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        page.context.set_offline(False)
        page.get_by_role("button", name="Try again").click()
        expect_first(page, "A red ball")


def test_key_is_requested_and_stored_and_an_empty_gallery_is_explained(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    token = KeyRing(keys).create("Page", ["admin"])
    service = run_server("serve", "--gallery", tmp_path / "gallery", "--create", "--keys", keys)
    with service as address, open_page(browser, address, refusable=("/v1/search", "/v1/status")) as page:
        page.goto(address)
        dialog = page.get_by_role("dialog", name="API key required")
        expect(dialog.get_by_label("Key")).to_be_focused()
        page.keyboard.type("lk_wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("unknown, expired or revoked")
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="The gallery is empty")).to_be_visible()
        expect(page.get_by_text("lookalike reindex")).to_be_visible()
        expect(dialog).to_be_hidden()
        page.reload()
        expect(page.locator("#counts")).to_have_text("0 items · 0 images")
        page.locator("#panel summary").click()
        page.get_by_role("button", name="Forget API key").click()
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()
        upload(page, tiny_photo(0, 0))
        expect(dialog).to_be_visible()


# --- status panel and layout


def test_panel_shows_gallery_model_and_jobs(page: Page) -> None:
    expect(page.locator("#counts")).to_have_text("8 items · 16 images")
    page.locator("#panel summary").click()
    expect(page.locator("#gallery-facts")).to_contain_text("Images16")
    job = page.locator("#jobs li", has_text="catalogue.csv")
    expect(job).to_contain_text("done")
    expect(job).to_contain_text("16 of 16 images")
    page.keyboard.press("Escape")
    expect(page.locator("#jobs")).to_be_hidden()
    expect(page.locator("#panel summary")).to_be_focused()


def test_details_for_developers_are_shown_on_request_and_stay(page: Page, address: str) -> None:
    page.goto(f"{address}/#example=red.jpg")
    expect_first(page, "A red ball")
    page.locator("#panel summary").click()
    expect(page.locator("#model-facts")).to_be_hidden()
    page.get_by_role("switch", name="Details for developers").check()
    expect(page.locator("#model-facts")).to_contain_text("50.0 % → 90.0 %")
    expect(page.locator("#index-facts")).to_contain_text("Pending changes0")
    expect(page.locator("#index-facts")).to_contain_text("Recall@10 of the index100.0 %")
    expect(page.locator("#timings")).to_contain_text("embed")
    page.reload()
    expect(page.locator("#timings")).to_be_visible()
    page.locator("#panel summary").click()
    page.get_by_role("switch", name="Details for developers").uncheck()
    expect(page.locator("#timings")).to_be_hidden()


def test_progress_of_a_running_job_is_shown_until_it_ends(page: Page, gallery: Path) -> None:
    with closing(SQLiteJobs(gallery)) as jobs:
        job = jobs.begin("/data/nightly.csv", "0123456789abcdef")
        job.update(stage="embedding", total=400, done=100)
        page.reload()
        bar = page.get_by_role("progressbar", name="Re-indexing")
        expect(bar).to_have_js_property("position", 0.25)
        job.update(done=400, state="done")
        expect(bar).to_be_hidden()
    page.locator("#panel summary").click()
    job_line = page.locator("#jobs li", has_text="nightly.csv")
    expect(job_line.locator(".state")).to_have_text("done")
    expect(job_line).to_contain_text("400 of 400 images")


@pytest.mark.parametrize("width", [360, 390, 720, 820, 1920])
def test_page_does_not_overflow_horizontally(browser: Browser, address: str, width: int) -> None:
    phone = width < 500
    size = {"width": width, "height": 844}
    with open_page(browser, address, viewport=size, has_touch=phone, is_mobile=phone) as page:
        page.goto(address)
        expect(page.locator("#camera")).to_be_attached()
        expect(page.get_by_text("Take a photo")).to_be_visible(visible=phone)
        assert page.evaluate(OVERFLOW) == 0
        page.get_by_role("button", name="purple.jpg").click()
        expect_first(page, "A purple ball")
        label = cards(page).first.get_by_text("More like this")
        if phone:
            assert label.evaluate("label => label.offsetWidth") > 50  # it says what the button does
        page.get_by_role("button", name="Select a part").click()
        if phone:
            page.get_by_text("Filters", exact=True).click()
        expect(page.get_by_role("group", name="Colour")).to_be_visible()
        page.locator("#panel summary").click()
        expect(page.locator("#gallery-facts")).to_be_visible()
        assert page.evaluate(OVERFLOW) == 0
