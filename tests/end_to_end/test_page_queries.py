"""Tests of the web page with several examples, variants, variety, lists and ranking rules, over a fashion catalogue."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from service.auth.api_keys import KeyRing
from tests.support.fashion import EXPIRED, write_fashion
from tests.support.pages import cards, open_page
from tests.support.processes import lookalike, run_server
from tests.support.tiny_bundle import make_tiny_bundle

pytestmark = pytest.mark.slow

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
START = "example=shirt-01-red.jpg"
RULES: dict[str, Any] = {
    "boosts": [{"filter": {"in_stock": True}, "weight": 0.1}],
    "hide": {"filter": {"category": "shoe"}},
    "pin": ["shirt-02-blue"],
}


@pytest.fixture(scope="module")
def fashion(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a catalogue, indexed by the command line."""
    root = tmp_path_factory.mktemp("fashion")
    catalogue = write_fashion(root / "catalogue")
    bundle = make_tiny_bundle(root / "bundle", grid=8)
    done = lookalike("reindex", catalogue, "--gallery", root / "gallery", "--bundle", bundle)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def address(fashion: Path) -> Iterator[str]:
    with run_server("serve", "--gallery", fashion / "gallery", "--examples", fashion / "catalogue/examples") as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with open_page(browser, address) as page:
        page.goto(f"{address}/#{START}")
        expect(cards(page)).to_have_count(12)
        yield page


def card(page: Page, title: str) -> Locator:
    return cards(page).filter(has_text=title)


def set_variety(page: Page, value: float) -> None:
    page.get_by_label("Variety").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('change')); }", value
    )


def open_rules(page: Page) -> Locator:
    """Opens the ranking rules, as a user with details for developers does; returns their panel."""
    page.locator("#panel > summary").click()
    page.get_by_role("switch", name="Details for developers").check()
    page.keyboard.press("Escape")
    page.get_by_text("Ranking rules", exact=True).click()
    return page.locator("#rankings")


def movements(panel: Locator, order: str) -> dict[str, str]:
    """Returns the movement of each item of an order, by id."""
    rows = panel.locator(f"#rankings-{order} .ranked")
    return dict(rows.evaluate_all("rows => rows.map((row) => [row.dataset.id, row.children[2].textContent])"))


# --- over HTTP


def test_variants_are_filtered_grouped_boosted_and_explained_over_http(address: str) -> None:
    def search(**options: Any) -> list[dict[str, Any]]:
        body = {"item_id": "shirt-01-red", "limit": 20, **options}
        items: list[dict[str, Any]] = httpx.post(f"{address}/v1/search", json=body).raise_for_status().json()["items"]
        return items

    everything = {item["id"] for item in search()}
    assert len(everything) == 13 and EXPIRED not in everything
    sized = search(filter={"sizes": {"all": ["S", "L"]}})
    assert {item["id"] for item in sized} == {"shirt-02-red", "shirt-03-red"}
    assert len(search(filter={"sizes": ["S", "39"]})) == 13
    assert httpx.get(f"{address}/v1/items/{EXPIRED}").status_code == 404

    ranking = {"group_by": "item_group_id", "boosts": [{"filter": {"in_stock": True}, "weight": 0.2}]}
    grouped = search(ranking=ranking, explain=True)
    parents = [item["attributes"]["item_group_id"] for item in grouped]
    assert len(parents) == len(set(parents)) == 5
    for item in grouped:
        explanation = item["explanation"]
        boosts = [one["share"] for one in explanation["shares"] if one["rule"] == "boosts[0]"]
        assert sum(boosts) == (0.2 if item["attributes"]["in_stock"] else 0)
        assert explanation["score"] == pytest.approx(explanation["similarity"] + sum(boosts), abs=2e-6)
    scores = [item["explanation"]["score"] for item in grouped]
    assert scores == sorted(scores, reverse=True)


# --- several examples


def test_items_are_added_as_examples_that_are_like_or_unlike(page: Page) -> None:
    with page.expect_request("**/v1/search") as sent:
        card(page, "Red shirt 'Umber'").get_by_role("button", name="Like Red shirt 'Umber' too").click(force=True)
    [photo, liked] = json.loads(sent.value.post_data or "{}")["examples"]
    assert set(photo) == {"image"} and liked == {"item_id": "shirt-03-red"}
    expect(page.get_by_role("heading", name="Like 2 examples")).to_be_visible()
    expect(card(page, "Red shirt 'Umber'")).to_have_count(0)

    with page.expect_request("**/v1/search") as sent:
        card(page, "Red shirt 'Tilda'").get_by_role("button", name="Less like").click(force=True)
    assert json.loads(sent.value.post_data or "{}")["examples"][2] == {"item_id": "shirt-01-red", "weight": -0.5}
    expect(page.get_by_role("heading", name="Like 2 examples, unlike another")).to_be_focused()
    examples = page.get_by_role("region", name="Searching with")
    expect(examples.get_by_role("img", name="Unlike Red shirt 'Tilda'")).to_be_visible()

    examples.get_by_role("button", name="Like Red shirt 'Tilda' instead of unlike").click()
    expect(page.get_by_role("heading", name="Like 3 examples")).to_be_visible()
    expect(examples.get_by_role("button", name="Unlike Red shirt 'Tilda' instead of like")).to_be_focused()
    examples.get_by_role("button", name="Remove shirt-01-red.jpg").press("Enter")
    expect(examples.get_by_role("button", name="Remove")).to_have_count(2)
    expect(examples.get_by_role("button", name="Remove Red shirt 'Umber'")).to_be_focused()
    expect(page.get_by_role("img", name="The item you are searching with: Red shirt 'Umber'")).to_be_visible()
    examples.get_by_role("button", name="Remove Red shirt 'Umber'").click()
    expect(examples).to_be_hidden()
    expect(page.get_by_role("heading", name="More like Red shirt 'Tilda'")).to_be_visible()
    page.go_back()
    expect(examples.get_by_role("listitem")).to_have_count(2)


def test_link_keeps_examples_of_the_gallery_and_history_also_photos(
    page: Page, browser: Browser, address: str, fashion: Path
) -> None:
    card(page, "Olive shirt 'Pesto'").get_by_role("button", name="Details").click()
    page.get_by_role("dialog").get_by_role("button", name="Less like this").click()
    expect(page.get_by_role("heading", name="Closest matches, unlike another")).to_be_focused()
    assert page.url.endswith(f"#{START}&unlike=item%3Ashirt-02-olive")
    titles = cards(page).locator(".title").all_inner_texts()
    with open_page(browser, address) as other:
        other.goto(page.url)
        expect(other.get_by_role("img", name="Unlike Olive shirt 'Pesto'")).to_be_visible()
        expect(cards(other).locator(".title")).to_have_text(titles)

    page.set_input_files("#upload-more", [fashion / "catalogue/shoe-01-red.jpg", fashion / "catalogue/shoe-02-red.jpg"])
    expect(page.get_by_role("heading", name="Like 3 examples, unlike another")).to_be_visible()
    expect(page.get_by_role("button", name="Copy link")).to_be_hidden()
    page.go_back()
    expect(page.locator("#query-examples li")).to_have_count(2)
    page.go_forward()
    expect(page.locator("#query-examples li")).to_have_count(4)
    page.reload()
    expect(page.locator("#notice")).to_contain_text("Photos are not kept after a reload")
    expect(page.locator("#query-examples li")).to_have_count(2)


def test_examples_beyond_the_limit_are_refused_with_a_notice(page: Page, fashion: Path) -> None:
    page.set_input_files("#upload-more", [fashion / "catalogue/shoe-01-red.jpg"] * 16)
    expect(page.locator("#notice")).to_have_text("A search combines up to 16 examples. Remove one first.")
    expect(page.locator("#query-examples-section")).to_be_hidden()
    expect(cards(page)).to_have_count(12)


# --- filters, variants and variety


def test_values_of_lists_are_combined_by_any_or_all(page: Page) -> None:
    sizes = page.get_by_role("group", name="Sizes")
    everything = sizes.get_by_role("switch", name="Items with all of these")
    sizes.get_by_text("S", exact=True).click()
    expect(cards(page)).to_have_count(8)
    expect(everything).to_be_hidden()
    sizes.get_by_text("L", exact=True).click()
    expect(cards(page)).to_have_count(8)
    everything.check()
    expect(cards(page)).to_have_count(3)
    expect(cards(page).locator(".facts").first).to_contain_text("S, M, L")
    expect(sizes.locator(".chip", has_text="M")).to_have_text("M3")  # of the items with S and L
    page.reload()
    expect(everything).to_be_checked()
    expect(cards(page)).to_have_count(3)
    page.get_by_role("button", name="Clear all filters").click()
    colours = page.get_by_role("group", name="Colour")
    for colour in ("red", "blue"):
        colours.get_by_text(colour).click()
    expect(cards(page)).to_have_count(10)
    expect(colours.get_by_role("switch")).to_be_hidden()  # an item has one colour


def test_variants_are_grouped_and_shown_on_request(page: Page) -> None:
    expect(page.get_by_role("group", name="Item group id")).to_have_count(0)  # nothing to choose by
    page.locator("#options > summary").click()
    page.get_by_label("Group variants").select_option("By item group id")
    expect(cards(page)).to_have_count(5)
    names = {title.split("'")[1] + title.split()[1] for title in cards(page).locator(".title").all_inner_texts()}
    assert len(names) == 5
    expect(page.locator("#option-count")).to_have_text("1")
    cards(page).first.get_by_role("button", name="All variants of Red shirt 'Tilda'").click()
    expect(cards(page)).to_have_count(3)
    shirts = cards(page).locator(".title").all_inner_texts()
    assert sorted(shirts) == ["Blue shirt 'Tilda'", "Olive shirt 'Tilda'", "Red shirt 'Tilda'"]
    expect(page.locator("#other-conditions-text")).to_have_text('{"item_group_id":"shirt-01"}')
    page.go_back()
    expect(cards(page)).to_have_count(5)
    assert page.url.endswith("group=item_group_id")


def test_variety_prefers_results_that_differ(page: Page) -> None:
    titles = cards(page).locator(".title")
    before = titles.all_inner_texts()
    page.locator("#options > summary").click()
    set_variety(page, 0.6)
    expect(titles.nth(1)).not_to_have_text(before[1])
    expect(titles.first).to_have_text(before[0])
    assert page.url.endswith("diversity=0.6")
    page.reload()
    expect(page.get_by_label("Variety")).to_have_value("0.6")
    expect(page.get_by_label("Variety")).to_have_attribute("aria-valuetext", "60 %")


# --- ranking rules


def test_rules_are_previewed_next_to_the_plain_order_and_stored(page: Page, address: str) -> None:
    expect(page.locator("#rankings")).to_be_hidden()
    panel = open_rules(page)
    expect(page.locator("#results")).to_be_hidden()
    expect(panel.locator("#rankings-before .ranked")).to_have_count(12)
    panel.get_by_label("Rules as JSON").fill(json.dumps(RULES))
    panel.get_by_role("button", name="Preview").click()
    expect(panel.locator("#rankings-after .ranked")).to_have_count(8)
    before, after = movements(panel, "before"), movements(panel, "after")
    assert after["shirt-02-blue"] == "pinned"
    assert {gone for gone in before if before[gone] == "hidden"} == {gone for gone in before if "shoe" in gone}
    assert after["shirt-01-olive"].startswith("▲") and after["shirt-03-red"].startswith("▼")
    boosted = panel.locator("[data-id=shirt-01-olive]").last
    expect(boosted.locator(".shares")).to_contain_text("+ 0.100 boosts[0] =")
    expect(boosted.locator(".reason")).to_contain_text("sorted by their score")

    panel.get_by_role("button", name="Save").click()
    expect(panel.get_by_label("Store as")).to_be_focused()  # it needs a name
    panel.get_by_label("Store as").fill("autumn")
    panel.get_by_role("button", name="Save").click()
    expect(panel.get_by_text("Stored as autumn, version ")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("Stored as autumn")
    stored = httpx.get(f"{address}/v1/rankings/autumn").raise_for_status().json()
    expect(panel.get_by_label("Stored ranking").locator("option").last).to_have_text(
        f"autumn · version {stored['version']}"
    )
    assert stored["ranking"]["pin"] == ["shirt-02-blue"]

    panel.get_by_label("Stored ranking").select_option("")
    panel.get_by_label("Stored ranking").select_option("autumn")
    loaded = json.loads(panel.get_by_label("Rules as JSON").input_value())
    assert (loaded["pin"], loaded["hide"]) == (RULES["pin"], RULES["hide"])
    assert "group_by" not in loaded  # there is none


def test_change_of_somebody_else_is_not_overwritten(browser: Browser, address: str) -> None:
    with open_page(browser, address, refusable=("/v1/rankings/winter",)) as page:
        page.goto(f"{address}/#item=shirt-01-red")
        panel = open_rules(page)
        expect(panel.locator("#rankings-after .ranked")).to_have_count(12)
        httpx.put(f"{address}/v1/rankings/winter", json={"diversity": 0.5}).raise_for_status()
        panel.get_by_label("Store as").fill("winter")
        panel.get_by_role("button", name="Save").click()
        expect(panel.get_by_role("alert")).to_contain_text("not the one you loaded")
    assert httpx.get(f"{address}/v1/rankings/winter").json()["ranking"]["diversity"] == 0.5


def test_rules_that_are_invalid_are_explained(page: Page) -> None:
    panel = open_rules(page)
    panel.get_by_label("Rules as JSON").fill('{"boosts": [')
    panel.get_by_role("button", name="Preview").click()
    expect(panel.get_by_role("alert")).to_contain_text("The rules are not JSON")
    expect(panel.get_by_label("Rules as JSON")).to_be_focused()
    panel.get_by_label("Rules as JSON").fill('{"diversity": 7}')
    panel.get_by_role("button", name="Preview").click()
    expect(panel.get_by_role("alert")).to_contain_text("diversity")


def test_rules_are_for_keys_that_may_store_them(browser: Browser, fashion: Path, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    tokens = {scope: ring.create(scope, [scope]) for scope in ("search", "write")}
    with run_server("serve", "--gallery", fashion / "gallery", "--keys", tmp_path / "keys.json") as address:
        for scope, token in tokens.items():
            with open_page(browser, address, refusable=("/v1/jobs",)) as page:
                page.add_init_script(f"sessionStorage.setItem('lookalike-key', '{token}')")
                page.add_init_script("localStorage.setItem('lookalike-developer', 'true')")
                page.goto(f"{address}/#item=shirt-01-red")
                expect(cards(page)).to_have_count(12)
                expect(page.locator("#counts")).not_to_be_empty()
                expect(page.get_by_text("Ranking rules", exact=True)).to_be_visible(visible=scope == "write")


# --- layout


@pytest.mark.parametrize(("width", "direction"), [(390, "ltr"), (390, "rtl"), (1280, "rtl")])
def test_examples_options_and_rules_fit_the_screen(browser: Browser, address: str, width: int, direction: str) -> None:
    phone = width < 500
    size = {"width": width, "height": 844}
    with open_page(browser, address, viewport=size, has_touch=phone, is_mobile=phone) as page:
        page.goto(f"{address}/#{START}&like=item:shirt-02-red&unlike=item:shoe-01-red&group=item_group_id")
        page.evaluate("direction => { document.documentElement.dir = direction; }", direction)
        expect(page.get_by_role("region", name="Searching with").get_by_role("img")).to_have_count(3)
        page.locator("#options > summary").click()
        expect(page.get_by_label("Variety")).to_be_visible()
        if phone:
            button = cards(page).first.get_by_role("button", name="Less like").bounding_box()
            assert button and min(button["width"], button["height"]) >= 36  # large enough to touch
        panel = open_rules(page)
        expect(panel.locator("#rankings-after .ranked").first).to_be_visible()
        assert page.evaluate(OVERFLOW) == 0
