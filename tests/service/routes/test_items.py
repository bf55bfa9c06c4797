"""Items: stored, changed and removed by one or many writers, and found by the next search."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image

from index.embedding.bundle import Bundle
from index.gallery import Gallery, open_gallery
from index.gallery.types import Item, NewImage
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM, Attribute
from service.auth.api_keys import KeyRing
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import block_gallery
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, tiny_photo

PNG = {"Content-Type": "image/png"}
MUG = {"title": "A mug", "url": "https://shop.example/mug", "attributes": {"category": "mug", "price": 12.5}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service whose gallery these tests may write."""
    root = tmp_path_factory.mktemp("writable")
    gallery = make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))
    with serving(Settings(gallery=gallery, threads=1, max_batch=4)) as client:
        yield client


def coloured(*colour: int) -> bytes:
    """Returns a photo that no other item of the gallery resembles."""
    out = io.BytesIO()
    image = Image.new("RGB", (64, 64), colour)
    image.paste((255, 255, 255), (0, 0, 64, 16))
    image.save(out, "PNG")
    return out.getvalue()


def in_json(image_id: str, photo: bytes) -> dict[str, str]:
    return {"id": image_id, "image": base64.b64encode(photo).decode()}


def best(client: httpx.Client, photo: bytes) -> dict[str, Any]:
    """Returns the first item of a search."""
    found: dict[str, Any] = client.post("/v1/search?limit=1", files={"image": photo}).json()["items"][0]
    return found


def image_ids(response: httpx.Response) -> list[str]:
    assert response.status_code in (200, 201), response.text
    return [image["id"] for image in response.json()["images"]]


# Storing


def test_an_item_is_found_by_the_search_after_its_put(shop: httpx.Client) -> None:
    photo = coloured(10, 200, 120)
    put = shop.put("/v1/items/mug-1", json={**MUG, "images": [in_json("front", photo)]})
    assert put.status_code == 201
    found = best(shop, photo)
    assert (found["id"], found["image"]["id"]) == ("mug-1", "front")
    assert found["score"] == pytest.approx(1, abs=1e-3)
    assert found["attributes"] == MUG["attributes"]
    stored = shop.get("/v1/items/mug-1")
    assert stored.json() == put.json() and stored.headers["etag"] == put.headers["etag"]
    assert stored.headers["etag"] == f'"{stored.json()["version"]}"'
    assert shop.get(stored.json()["images"][0]["url"]).headers["content-type"] == "image/jpeg"


def test_the_same_put_again_changes_nothing(shop: httpx.Client) -> None:
    body = {**MUG, "images": [in_json("front", tiny_photo(0, 3)), in_json("back", tiny_photo(1, 3))]}
    first = shop.put("/v1/items/twice", json=body)
    revision = shop.get("/v1/status").json()["gallery"]["revision"]
    again = shop.put("/v1/items/twice", json=body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.headers["etag"] == first.headers["etag"] and again.json() == first.json()
    assert shop.get("/v1/status").json()["gallery"]["revision"] == revision


def test_images_stay_unless_they_are_given(shop: httpx.Client) -> None:
    body = {**MUG, "images": [in_json("a", tiny_photo(0, 1)), in_json("b", tiny_photo(1, 1))]}
    shop.put("/v1/items/images", json=body)
    renamed = shop.put("/v1/items/images", json={"title": "Renamed"})
    assert image_ids(renamed) == ["a", "b"]
    assert (renamed.json()["title"], renamed.json()["url"], renamed.json()["attributes"]) == ("Renamed", None, {})
    replaced = shop.put("/v1/items/images", json={"images": [in_json("b", tiny_photo(1, 1)), in_json("c", b"?")]})
    problem(replaced, 415, "image-unsupported")
    assert image_ids(shop.get("/v1/items/images")) == ["a", "b"], "a put that is refused changes nothing"
    body = {"images": [in_json("b", tiny_photo(1, 1)), in_json("c", tiny_photo(2, 1))]}
    assert image_ids(shop.put("/v1/items/images", json=body)) == ["b", "c"]
    assert image_ids(shop.put("/v1/items/images", json={"images": []})) == []
    assert shop.post("/v1/search", json={"item_id": "images"}).status_code == 404


def test_another_photo_under_the_same_id_takes_the_place_of_the_first(shop: httpx.Client) -> None:
    old, new = coloured(90, 10, 10), coloured(10, 10, 90)
    shop.put("/v1/items/changed", json={**MUG, "images": [in_json("front", old)]})
    shop.put("/v1/items/changed", json={**MUG, "images": [in_json("front", new)]})
    assert best(shop, new)["id"] == "changed"
    assert best(shop, new)["score"] > 0.99 > best(shop, old)["score"]


def test_a_form_brings_photos_as_files_named_by_their_ids(shop: httpx.Client) -> None:
    photo = coloured(200, 40, 120)
    files = [("image", ("front.png", photo)), ("image", ("back.jpg", tiny_photo(3, 2)))]
    put = shop.put("/v1/items/form", data={"item": json.dumps(MUG)}, files=files)
    assert put.status_code == 201 and image_ids(put) == ["front.png", "back.jpg"]
    assert best(shop, photo)["id"] == "form"
    as_file = [("item", ("item.json", json.dumps({"title": "From a file"}), "application/json"))]
    assert shop.put("/v1/items/form", files=as_file).json()["title"] == "From a file"
    assert image_ids(shop.get("/v1/items/form")) == ["front.png", "back.jpg"]


def test_an_image_is_put_and_removed_alone(shop: httpx.Client) -> None:
    photo = coloured(120, 120, 10)
    headers = {"Content-Type": "image/png"}
    problem(shop.put("/v1/items/none/images/1", content=photo, headers=headers), 404, "item-missing")
    shop.put("/v1/items/alone", json=MUG)
    first = shop.put("/v1/items/alone/images/1", content=photo, headers=headers)
    assert first.status_code == 201 and best(shop, photo)["id"] == "alone"
    again = shop.put("/v1/items/alone/images/1", json={"image": base64.b64encode(photo).decode()})
    assert (again.status_code, again.headers["etag"]) == (200, first.headers["etag"])
    assert shop.put("/v1/items/alone/images/2", content=tiny_photo(4, 1), headers=headers).status_code == 201
    assert [shop.delete("/v1/items/alone/images/1").status_code for _ in range(2)] == [204, 204]
    assert image_ids(shop.get("/v1/items/alone")) == ["2"]
    assert best(shop, photo)["score"] < 0.99
    problem(shop.put("/v1/items/alone/images/1", json={"image_url": "https://example.com/1.jpg"}), 422, "url-disabled")


def test_a_patch_changes_what_it_names_and_null_removes(shop: httpx.Client) -> None:
    shop.put("/v1/items/patched", json={**MUG, "images": [in_json("front", tiny_photo(5, 1))]})
    changes = {"url": None, "attributes": {"price": 9, "new": True, "category": None}}
    patched = shop.patch(
        "/v1/items/patched", content=json.dumps(changes), headers={"Content-Type": "application/merge-patch+json"}
    ).json()
    assert (patched["title"], patched["url"], patched["attributes"]) == ("A mug", None, {"new": True, "price": 9})
    assert len(patched["images"]) == 1
    unchanged = shop.patch("/v1/items/patched", json={"attributes": {"price": 9}})
    assert unchanged.json()["version"] == patched["version"]
    found = shop.post("/v1/search", files={"image": tiny_photo(5, 1)}, data={"filter": '{"new": true}'}).json()
    assert [item["attributes"]["price"] for item in found["items"]] == [9]
    assert shop.patch("/v1/items/patched", json={"attributes": None}).json()["attributes"] == {}
    problem(shop.patch("/v1/items/nobody", json={}), 404, "item-missing")


def test_a_deleted_item_is_not_found_and_deleting_it_again_is_allowed(shop: httpx.Client) -> None:
    photo = coloured(33, 180, 240)
    shop.put("/v1/items/gone", json={**MUG, "images": [in_json("front", photo)]})
    assert best(shop, photo)["id"] == "gone"
    assert [shop.delete("/v1/items/gone").status_code for _ in range(2)] == [204, 204]
    assert best(shop, photo)["id"] != "gone"
    problem(shop.get("/v1/items/gone"), 404, "item-missing")


# Several values


def test_an_attribute_may_have_several_values(shop: httpx.Client) -> None:
    attributes = {"sizes": ["S", "M", "S", 38], "tags": ["new"], "none": []}
    put = shop.put(
        "/v1/items/list", json={"attributes": attributes, "images": [in_json("front", coloured(80, 20, 200))]}
    )
    assert put.json()["attributes"] == {"sizes": ["S", "M", 38], "tags": ["new"]}
    assert shop.get("/v1/items/list").json() == put.json()
    assert best(shop, coloured(80, 20, 200))["attributes"] == put.json()["attributes"]
    again = shop.put("/v1/items/list", json={"attributes": attributes})
    assert again.json()["version"] == put.json()["version"]
    patched = shop.patch("/v1/items/list", json={"attributes": {"sizes": ["L"], "tags": []}}).json()
    assert patched["attributes"] == {"sizes": ["L"]}


def test_lists_are_searched_by_any_and_all_of_their_values_in_every_form(shop: httpx.Client) -> None:
    photo = coloured(200, 120, 10)
    sizes = {"one": ["S", "M"], "two": ["M", "L"], "three": "M", "four": 38}
    for name, value in sizes.items():
        body = {"attributes": {"cut": value, "since": f"2026-11-{10 + len(name)}"}, "images": [in_json("front", photo)]}
        assert shop.put(f"/v1/items/cut-{name}", json=body).status_code == 201
    filters: list[tuple[dict[str, Any], list[str]]] = [
        ({"cut": "M"}, ["one", "three", "two"]),
        ({"cut": ["S", 38]}, ["four", "one"]),
        ({"cut": {"all": ["M", "L"]}}, ["two"]),
        ({"any": [{"cut": "S"}, {"cut": {"gte": 38}}]}, ["four", "one"]),
        ({"cut": {"exists": True}, "not": {"any": [{"cut": "L"}, {"cut": "S"}]}}, ["four", "three"]),
        ({"since": {"gte": "2026-11-14T01:00:00+02:00", "lt": "2026-11-15"}}, ["four"]),
    ]
    for wanted, expected in filters:
        text = json.dumps(wanted)
        answers = [
            shop.post("/v1/search", json={"image": base64.b64encode(photo).decode(), "filter": wanted}),
            shop.post("/v1/search", params={"filter": text}, files={"image": photo}),
            shop.post("/v1/search", data={"filter": text}, files={"image": photo}),
            shop.get("/v1/items", params={"filter": text}),
        ]
        for answer in answers:
            found = [item["id"].removeprefix("cut-") for item in answer.json()["items"]]
            assert sorted(found) == expected, (wanted, answer.text)
    assert problem(shop.get("/v1/items", params={"filter": '{"any": []}'}), 422, "filter-invalid")


def test_facets_count_an_item_for_each_of_its_values(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    address = make_tiny_gallery(tmp_path / "gallery", bundle)
    with open_gallery(address) as gallery:
        for number, item in enumerate(gallery.scan().items):
            sizes = ("S", "M") if number % 2 else ("M", 38)
            gallery.upsert([(item.model_copy(update={"attributes": {"sizes": sizes, "n": number}}), [])], "")
        gallery.compact()
    with serving(Settings(gallery=address)) as shop:
        facet = shop.get("/v1/facets", params={"name": "sizes", "filter": '{"n": {"lt": 4}}'}).json()["facets"][0]
        assert facet["values"] == [
            {"value": "M", "count": 4}, {"value": 38, "count": 2}, {"value": "S", "count": 2}
        ]  # fmt: skip
        assert (facet["minimum"], facet["maximum"], facet["distinct"]) == (38, 38, 3)


# Expiry


def test_an_expired_item_does_not_exist(shop: httpx.Client) -> None:
    photo, path = coloured(10, 120, 220), "/v1/items/offer"
    body = {**MUG, "expires_at": "2100-01-01", "images": [in_json("front", photo), in_json("back", tiny_photo(1, 7))]}
    put = shop.put(path, json=body)
    assert put.json()["expires_at"] == "2100-01-01T00:00:00Z" and put.json()["attributes"] == MUG["attributes"]
    assert best(shop, photo)["id"] == "offer" and "expires_at" not in best(shop, photo)["attributes"]
    assert shop.get(path).json() == put.json()
    kept = shop.patch(path, json={"title": "An offer", "attributes": None}).json()
    assert (kept["expires_at"], kept["attributes"]) == ("2100-01-01T00:00:00Z", {})
    expired = shop.patch(path, json={"expires_at": "2020-01-01T10:00+02:00"})
    assert expired.json()["expires_at"] == "2020-01-01T08:00:00Z"
    tag = expired.headers["etag"]
    for answer in (
        shop.get(path),
        shop.patch(path, json={"title": "Too late"}),
        shop.put(f"{path}/images/side", content=photo, headers=PNG),
        shop.post("/v1/search", json={"item_id": "offer"}),
    ):
        problem(answer, 404, "item-missing")
    assert best(shop, photo)["id"] != "offer"
    assert "offer" not in [item["id"] for item in shop.get("/v1/items", params={"limit": 1000}).json()["items"]]
    assert shop.delete(path).status_code == 204
    problem(shop.put(path, json=MUG, headers={"If-Match": tag}), 412, "version-conflict")
    again = shop.put(path, json={**MUG, "images": [in_json("front", photo)]}, headers={"If-None-Match": "*"})
    assert (again.status_code, again.json()["expires_at"]) == (201, None)
    assert image_ids(again) == ["front"] and shop.get(path).json() == again.json()
    assert best(shop, photo)["id"] == "offer"
    cleared = shop.patch(path, json={"expires_at": "2100-01-01"}), shop.patch(path, json={"expires_at": None})
    assert cleared[1].json()["expires_at"] is None


# Conditions


def test_a_write_that_rests_on_an_older_version_is_refused(shop: httpx.Client) -> None:
    old = shop.put("/v1/items/guarded", json=MUG).headers["etag"]
    new = shop.patch("/v1/items/guarded", json={"title": "New"}, headers={"If-Match": old}).headers["etag"]
    photo = {"image": base64.b64encode(tiny_photo(0, 0)).decode()}
    for method, path, body in [
        ("PUT", "", MUG),
        ("PATCH", "", {"title": "Newer"}),
        ("DELETE", "", None),
        ("PUT", "/images/1", photo),
        ("DELETE", "/images/1", None),
    ]:
        refused = shop.request(method, f"/v1/items/guarded{path}", headers={"If-Match": old}, json=body)
        message = problem(refused, 412, "version-conflict")
        assert new in message["detail"]
    assert shop.get("/v1/items/guarded").headers["etag"] == new
    for fits in (new, f'"1", {new}', "*"):
        assert shop.patch("/v1/items/guarded", json={}, headers={"If-Match": fits}).status_code == 200
    assert shop.delete("/v1/items/guarded", headers={"If-Match": new}).status_code == 204
    problem(shop.delete("/v1/items/guarded", headers={"If-Match": "*"}), 412, "version-conflict")


@pytest.mark.parametrize("header", [",", ", ,"])
def test_a_condition_that_names_no_version_is_never_met(shop: httpx.Client, header: str) -> None:
    shop.put("/v1/items/unnamed", json={})
    for method in ("PUT", "PATCH"):
        refused = shop.request(method, "/v1/items/unnamed", json={}, headers={"If-Match": header})
        problem(refused, 412, "version-conflict")
    problem(shop.delete("/v1/items/unnamed", headers={"If-Match": header}), 412, "version-conflict")
    assert shop.get("/v1/items/unnamed", headers={"If-None-Match": header}).status_code == 200


def test_an_empty_header_is_no_condition(shop: httpx.Client) -> None:
    both = {"If-Match": "", "If-None-Match": ""}
    assert shop.put("/v1/items/plain", json={}, headers=both).status_code == 201
    assert shop.patch("/v1/items/plain", json={"title": "A mug"}, headers=both).status_code == 200
    assert shop.get("/v1/items/plain", headers=both).json()["title"] == "A mug"
    assert shop.delete("/v1/items/plain", headers=both).status_code == 204


def test_a_condition_in_several_lines_is_one(shop: httpx.Client) -> None:
    tag = shop.put("/v1/items/lines", json={}).headers["etag"]
    for others in ([tag, '"0"'], ['"0"', tag], ['"0"', f'"1", {tag}']):
        fits = [("If-Match", other) for other in others]
        assert shop.patch("/v1/items/lines", json={}, headers=fits).status_code == 200
        differs = [("If-None-Match", other) for other in others]
        problem(shop.patch("/v1/items/lines", json={}, headers=differs), 412, "version-conflict")


def test_if_none_match_only_creates_and_spares_reading_what_is_known(shop: httpx.Client) -> None:
    only_new = {"If-None-Match": "*"}
    created = shop.put("/v1/items/created", json=MUG, headers=only_new)
    assert created.status_code == 201
    problem(shop.put("/v1/items/created", json={"title": "Other"}, headers=only_new), 412, "version-conflict")
    known = shop.get("/v1/items/created", headers={"If-None-Match": created.headers["etag"]})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", created.headers["etag"])
    assert shop.get("/v1/items/created", headers={"If-None-Match": '"0"'}).json()["title"] == "A mug"


def test_no_change_of_many_writers_is_lost(shop: httpx.Client) -> None:
    shop.put("/v1/items/counter", json={"attributes": {"count": 0}})

    def add_one(_: int) -> None:
        while True:
            seen = shop.get("/v1/items/counter")
            more = {"attributes": {"count": seen.json()["attributes"]["count"] + 1}}
            written = shop.patch("/v1/items/counter", json=more, headers={"If-Match": seen.headers["etag"]})
            if written.status_code == 200:
                return
            problem(written, 412, "version-conflict")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_one, range(16)))
    assert shop.get("/v1/items/counter").json()["attributes"] == {"count": 16}


def test_an_item_that_many_put_at_once_is_that_of_one_of_them(shop: httpx.Client) -> None:
    bodies = [
        {"title": str(number), "images": [in_json(f"{number}-{view}", tiny_photo(number, view)) for view in range(2)]}
        for number in range(6)
    ]
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda body: shop.put("/v1/items/contested", json=body), bodies))
        assert {answer.status_code for answer in answers} <= {200, 201}
        stored = shop.get("/v1/items/contested")
        assert image_ids(stored) == [f"{stored.json()['title']}-{view}" for view in range(2)]


def test_one_of_many_who_create_an_item_does(shop: httpx.Client) -> None:
    def create(number: int) -> int:
        body = {"title": str(number), "images": [in_json("front", tiny_photo(number, 1))]}
        return shop.put("/v1/items/first", json=body, headers={"If-None-Match": "*"}).status_code

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(create, range(4))) == [201, 412, 412, 412]


# Ids


@pytest.mark.parametrize("item_id", ["AB/12", "a/images/b", "/", "100 % wool?", "Möbel#1", "%2F", "images"])
def test_an_id_may_hold_anything_that_is_encoded(shop: httpx.Client, item_id: str) -> None:
    image_id = "https://cdn.example/front/1.jpg?size=2"
    path = f"/v1/items/{quote(item_id, safe='')}"
    assert shop.put(path, json=MUG).json()["id"] == item_id
    headers = {"Content-Type": "image/jpeg"}
    put = shop.put(f"{path}/images/{quote(image_id, safe='')}", content=tiny_photo(6, 1), headers=headers)
    assert (put.status_code, put.json()["id"], image_ids(put)) == (201, item_id, [image_id])
    assert shop.delete(f"{path}/images/{quote(image_id, safe='')}").status_code == 204
    assert shop.get(path).json()["images"] == []
    assert shop.delete(path).status_code == 204
    assert shop.get(path).status_code == 404


def test_an_id_that_is_not_utf_8_or_too_long_is_refused(shop: httpx.Client) -> None:
    assert "%FF" in problem(shop.put("/v1/items/%FF", json=MUG), 422, "request-invalid")["detail"]
    problem(shop.put(f"/v1/items/{'x' * 513}", json=MUG), 422, "request-invalid")
    problem(shop.get("/v1/items/a/b"), 404, "not-found")


# Limits


def test_an_item_with_too_many_images_is_refused(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    card = Bundle.load(bundle).card
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.keep_bundle(Bundle.load(bundle))
        vector = np.eye(card.dimension, dtype=np.float32)[0]
        images = [NewImage(str(n), f"{n:064x}", vector, b"") for n in range(MAX_IMAGES_PER_ITEM)]
        gallery.upsert([(Item(id="crate"), images)], card.id)
    with serving(Settings(gallery=tmp_path / "gallery", threads=1)) as client:
        photo = coloured(1, 2, 3)
        refused = problem(client.put("/v1/items/crate/images/more", content=photo, headers=PNG), 422, "limit-exceeded")
        assert "257 images; the limit is 256" in refused["detail"]
        assert client.put("/v1/items/crate/images/7", content=photo, headers=PNG).status_code == 200
        assert image_ids(client.put("/v1/items/crate", json={**MUG, "images": [in_json("new", photo)]})) == ["new"]


def test_an_attribute_beyond_the_limit_of_the_gallery_is_refused(tmp_path: Path) -> None:
    make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    with open_gallery(tmp_path / "gallery") as gallery:
        for start in range(4, MAX_ATTRIBUTE_NAMES, 252):  # those of the tiny gallery are four
            names: dict[str, Attribute] = {f"name-{n}": n for n in range(start, min(start + 252, MAX_ATTRIBUTE_NAMES))}
            gallery.upsert([(Item(id=f"item-{start}", attributes=names), [])], "")
    with serving(Settings(gallery=tmp_path / "gallery", threads=1)) as client:
        changes = {"attributes": {"size": "large"}}
        refused = problem(client.patch("/v1/items/ball-red", json=changes), 422, "limit-exceeded")
        assert "'ball-red' has the new attribute 'size'" in refused["detail"]
        assert client.patch("/v1/items/ball-red", json={"attributes": {"name-9": 1}}).status_code == 200


# Lists and facets


def test_all_items_are_listed_page_by_page_in_the_order_of_their_ids(shop: httpx.Client) -> None:
    wanted = {"brand": "Tiny", "price": {"lt": 10}}
    seen: list[dict[str, Any]] = []
    cursor = ""
    while cursor is not None:
        page = shop.get("/v1/items", params={"filter": json.dumps(wanted), "limit": 4, "cursor": cursor}).json()
        assert len(page["items"]) <= 4
        seen, cursor = [*seen, *page["items"]], page["cursor"]
    assert [item["id"] for item in seen] == sorted(f"ball-{colour}" for colour in COLOURS[:6])
    assert all(len(item["images"]) == 2 and item["version"] for item in seen)
    assert seen[0] == shop.get(f"/v1/items/{seen[0]['id']}").json()


def test_an_item_that_stops_matching_while_it_is_listed_is_left_out(
    shop: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"filter": json.dumps({"stock": {"lt": 20}})}
    for item_id, stock in (("listed-1", 10), ("listed-2", 10)):
        shop.put(f"/v1/items/{item_id}", json={"attributes": {"stock": stock}})
    iter_items = Gallery.iter_items

    def iter_and_change(self: Gallery, **options: Any) -> Iterator[Item]:
        for item in iter_items(self, **options):
            self.upsert([(Item(id="listed-1", attributes={"stock": 30}), [])], "")
            yield item

    monkeypatch.setattr(Gallery, "iter_items", iter_and_change)
    assert [item["id"] for item in shop.get("/v1/items", params=wanted).json()["items"]] == ["listed-2"]


def test_every_write_describes_a_store_that_cannot_be_written(shop: httpx.Client) -> None:
    paths = shop.get("/openapi.json").json()["paths"]
    for path in ("/v1/items/{item_id}", "/v1/items/{item_id}/images/{image_id}"):
        for method in paths[path].keys() - {"get"}:
            responses = paths[path][method]["responses"]
            assert "507" in responses, (method, path)
            assert "store-read-only" in responses["503"]["content"]["application/problem+json"]["examples"]


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"filter": "{"}, "request-invalid"),
        ({"filter": '{"price": {"under": 5}}'}, "filter-invalid"),
        ({"filter": "[]"}, "filter-invalid"),
        ({"filter": "[" * 3000}, "request-invalid"),
        ({"filter": '{"a": {"\\ud800": 1}}'}, "request-invalid"),
        ({"limit": "1001"}, "request-invalid"),
    ],
)
def test_a_list_with_an_invalid_parameter_is_refused(shop: httpx.Client, params: dict[str, str], kind: str) -> None:
    problem(shop.get("/v1/items", params=params), 422, kind)


def test_facets_list_the_attributes_to_filter_by(client: httpx.Client) -> None:
    facets = {facet["name"]: facet for facet in client.get("/v1/facets").json()["facets"]}
    assert facets["brand"]["values"] == [{"value": "Tiny", "count": 8}]
    assert (facets["price"]["minimum"], facets["price"]["maximum"]) == (4.5, 11.5)
    few = client.get("/v1/facets?limit=3").json()["facets"]
    assert {len(facet["values"]) for facet in few} == {1, 3} and facets["colour"]["distinct"] == 8
    named = client.get("/v1/facets?name=price&name=brand&name=unknown").json()["facets"]
    assert [facet["name"] for facet in named] == ["brand", "price"]
    too_many = client.get("/v1/facets", params={"name": [str(number) for number in range(101)]})
    problem(too_many, 422, "request-invalid")


def test_facets_count_the_items_that_match_a_filter(client: httpx.Client) -> None:
    params = {"filter": '{"colour": ["red", "blue"], "price": {"lt": 5}}'}
    facets = {facet["name"]: facet for facet in client.get("/v1/facets", params=params).json()["facets"]}
    assert facets["colour"]["values"] == [{"value": "red", "count": 1}] and facets["colour"]["distinct"] == 1
    assert facets["brand"]["values"] == [{"value": "Tiny", "count": 1}]
    assert (facets["price"]["minimum"], facets["price"]["maximum"]) == (4.5, 4.5)
    none = client.get("/v1/facets", params={"filter": '{"colour": "unknown"}', "name": "brand"}).json()["facets"]
    assert (none[0]["values"], none[0]["distinct"]) == ([], 0)


def test_facet_values_can_be_searched_by_a_text_in_any_case(client: httpx.Client) -> None:
    def search(**params: str) -> list[object]:
        (found,) = client.get("/v1/facets", params=params).json()["facets"]
        return [found["distinct"], *(value["value"] for value in found["values"])]

    assert search(name="colour", contains="RE") == [2, "green", "red"]
    assert search(name="colour", contains="re", limit="1") == [2, "green"]
    assert search(name="colour", contains="re", filter='{"price": {"lt": 5}}') == [1, "red"]
    assert search(name="price", contains="6.5") == [1, 6.5]
    assert search(name="colour", contains="no such") == [0]


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"contains": "re"}, "request-invalid"),
        ({"contains": "re", "name": ["colour", "brand"]}, "request-invalid"),
        ({"contains": "", "name": "colour"}, "request-invalid"),
        ({"contains": "r" * 201, "name": "colour"}, "request-invalid"),
        ({"filter": "{"}, "request-invalid"),
        ({"filter": '{"price": {"under": 5}}'}, "filter-invalid"),
    ],
)
def test_facets_with_an_invalid_parameter_are_refused(client: httpx.Client, params: dict[str, Any], kind: str) -> None:
    problem(client.get("/v1/facets", params=params), 422, kind)


def test_facets_are_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    with open_gallery(tmp_path / "gallery") as gallery:
        for number, colour in enumerate(COLOURS):
            rare: dict[str, Attribute] = {f"rare-{number}-{name}": 1 for name in range(150)}
            own: dict[str, Attribute] = {"colour": colour, "text": f"{number}" * 4000, **rare}
            gallery.upsert([(Item(id=f"ball-{colour}", attributes=own), [])], "")
        gallery.compact()
    with serving(Settings(gallery=tmp_path / "gallery", threads=1, max_answer_bytes=30_000)) as client:
        answer = client.get("/v1/facets")
        names = [facet["name"] for facet in answer.json()["facets"]]
        assert len(names) == 99 and names == sorted(names) and names[0] == "colour"
        assert answer.json()["left_out"] == ["text"] and len(answer.content) < 30_000
        text = client.get("/v1/facets?name=text&limit=3").json()["facets"]
        assert len(text[0]["values"]) == 3


def test_facets_do_not_take_the_places_of_searches(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = block_gallery(settings, monkeypatch, "facets")
    with serving(settings) as client, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(client.get, "/v1/facets") for _ in range(6)]
        assert blocker.started.acquire(timeout=60)
        assert client.post("/v1/search?limit=1", files={"image": tiny_photo(0, 0)}).status_code == 200
        blocker.released.set()
        assert {request.result().status_code for request in waiting} == {200}


def test_a_list_without_items_says_which_attribute_no_item_has(client: httpx.Client) -> None:
    empty = client.get("/v1/items", params={"filter": '{"color": "red"}'}).json()
    assert (empty["items"], len(empty["hints"])) == ([], 1) and "'color'" in empty["hints"][0]
    assert client.get("/v1/items", params={"filter": '{"colour": "red"}'}).json()["hints"] == []


# Mistakes


@pytest.mark.parametrize(
    ("method", "address", "message"),
    [
        ("GET", "/v1/items?limt=2", "limt is unknown (did you mean limit?)."),
        ("GET", "/v1/items?fliter=%7B%7D&x=1", "fliter is unknown (did you mean filter?). x is unknown."),
        ("GET", "/v1/items/ball-red?limit=2", "limit is unknown."),
        ("GET", "/v1/facets?top=5", "top is unknown."),
        ("GET", "/v1/jobs?count=5", "count is unknown."),
        ("GET", "/v1/status?verbose=1", "verbose is unknown."),
        ("GET", "/v1/examples?limit=1", "limit is unknown."),
        ("DELETE", "/v1/items/ball-red?force=1", "force is unknown."),
        ("POST", "/v1/search/batch?limit=1", "limit is unknown."),
        ("POST", "/v1/search?lmit=1", "lmit is unknown (did you mean limit?)."),
    ],
)
def test_an_unknown_option_is_refused(client: httpx.Client, method: str, address: str, message: str) -> None:
    body: dict[str, Any] = {"files": {"image": tiny_photo(0, 0)}} if method == "POST" else {}
    assert message in problem(client.request(method, address, **body), 422, "request-invalid")["detail"]
    assert client.get("/v1/items/ball-red").status_code == 200


def test_a_probe_may_have_any_option(client: httpx.Client) -> None:
    assert client.get("/healthz?probe=1").status_code == client.get("/metrics?now=1").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        '{"titel": "A mug"}',
        '{"title": 5}',
        '{"attributes": {"size": {"width": 5}}}',
        '{"attributes": {"": 1}}',
        '{"attributes": {"price": NaN}}',
        '{"title": "\\ud800"}',
        '{"images": [{"id": "a"}]}',
        '{"images": [{"id": "", "image": "aGk="}]}',
        '{"images": [{"id": "a", "image": "aGk=", "image_url": "https://example.com"}]}',
        '{"images": [{"id": "a", "image": "aGk="}, {"id": "a", "image": "aGk="}]}',
        json.dumps({"images": [{"id": str(number), "image": "aGk="} for number in range(5)]}),
    ],
)
def test_an_invalid_item_is_refused_and_not_stored(shop: httpx.Client, body: str) -> None:
    response = shop.put("/v1/items/nonsense", content=body, headers={"Content-Type": "application/json"})
    problem(response, 422, "request-invalid")
    assert shop.get("/v1/items/nonsense").status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"images": [{}] * 5000}, "images must have at most 256 entries (got 5,000)"),
        ({"images": [{}] * 100}, "images[0].id is missing."),
        ({"images": [{}] * 100}, "And 90 more."),
        ({str(number): number for number in range(1000)}, "1,000 keys"),
        ({"attributes": {str(number): None for number in range(1000)}}, "attributes: 1,000 were sent"),
        (
            {"attributes": {"size": {"width": 5}}},
            "attributes.size must be a text, a number, true, false or a list of them (got an object).",
        ),
        (
            {"attributes": {"size": ["S", None]}},
            "attributes.size[1] must be a text, a number, true or false (got None).",
        ),
        ({"attributes": {"size": list(range(257))}}, "attributes.size must have at most 256 entries (got 257)."),
        ({"attributes": {"expires_at": "2026-11-19"}}, "attributes: expires_at is a field of the item"),
        ({"expires_at": "2026-11-19T10:00"}, "expires_at: must be a date, or a date and time with its time zone"),
        ({"expires_at": 5}, "expires_at must be a text (got 5)."),
        ({"attributes": {"price": 1e999}}, "attributes.price must be a finite number (got inf)."),
        ({"title": "x" * 1001}, "title must have at most 1,000 characters (got 1,001)."),
        ({"url": "x" * 2001}, "url must have at most 2,000 characters (got 2,001)."),
    ],
)
def test_mistakes_are_reported_with_their_places_and_briefly(shop: httpx.Client, body: object, message: str) -> None:
    response = shop.put("/v1/items/nonsense", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert message in problem(response, 422, "request-invalid")["detail"]
    assert len(response.content) < 2500
    assert shop.get("/v1/items/nonsense").status_code == 404


def test_a_change_has_the_same_limits_as_an_item(shop: httpx.Client) -> None:
    shop.put("/v1/items/long", json={"title": "x" * 1000, "url": "x" * 2000})
    many: dict[str, object] = {str(number): [] for number in range(1000)}
    for name, value in (("title", "x" * 1001), ("url", "x" * 2001), ("attributes", many)):
        response = shop.patch("/v1/items/long", json={name: value})
        assert name in problem(response, 422, "request-invalid")["detail"]
        assert len(response.content) < 2500
    shop.delete("/v1/items/long")


def test_a_body_of_another_kind_is_refused(shop: httpx.Client) -> None:
    plain = {"Content-Type": "text/plain"}
    problem(shop.put("/v1/items/x", content="A mug", headers=plain), 415, "body-unsupported")
    problem(shop.put("/v1/items/x"), 415, "body-unsupported")
    problem(shop.put("/v1/items/x", files={"image": ("a.jpg", tiny_photo(0, 0))}), 422, "request-invalid")
    nameless = shop.put("/v1/items/x", files={"image": ("", "A photo?"), "item": (None, "{}")})
    problem(nameless, 422, "request-invalid")
    shop.put("/v1/items/x", json=MUG)
    problem(shop.put("/v1/items/x/images/1", content="A mug", headers=plain), 415, "body-unsupported")
    problem(shop.put("/v1/items/x/images/1", json={}), 422, "request-invalid")
    headers = {"Content-Type": "application/json"}
    problem(shop.patch("/v1/items/x", content='{"title": "\\ud800"}', headers=headers), 422, "request-invalid")
    too_many = {"attributes": {str(number): number for number in range(257)}}
    problem(shop.patch("/v1/items/x", json=too_many), 422, "request-invalid")


def test_reading_needs_the_scope_search_and_writing_the_scope_write(settings: Settings, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    reader, writer = {"X-API-Key": ring.create("page", ["search"])}, {"X-API-Key": ring.create("shop", ["write"])}
    with serving(settings.model_copy(update={"keys": tmp_path / "keys.json"})) as client:
        for path in ("/v1/items", "/v1/items/ball-red", "/v1/facets"):
            assert client.get(path, headers=reader).status_code == 200
            problem(client.get(path), 401, "key-missing")
        for method, path in [("PUT", ""), ("PATCH", ""), ("DELETE", ""), ("PUT", "/images/1"), ("DELETE", "/images/1")]:
            refused = client.request(method, f"/v1/items/ball-red{path}", headers=reader, json={})
            assert "write" in problem(refused, 403, "forbidden")["detail"]
        assert client.patch("/v1/items/ball-red", json={}, headers=writer).status_code == 200


# Bundles


def test_the_first_photo_of_an_empty_gallery_is_found(tmp_path: Path) -> None:
    bundle, photo = make_tiny_bundle(tmp_path / "bundle"), tiny_photo(0, 0)
    with serving(Settings(gallery=tmp_path / "gallery", bundle=bundle, create=True, threads=1)) as client:
        assert client.get("/v1/items").json() == {"items": [], "cursor": None, "hints": []}
        assert client.get("/v1/facets").json() == {"facets": [], "left_out": []}
        client.put("/v1/items/ball", json={"images": [in_json("front", photo)]})
        assert best(client, photo)["id"] == "ball"


def test_without_any_model_an_item_can_be_stored_but_no_photo(tmp_path: Path) -> None:
    with serving(Settings(gallery=tmp_path / "gallery", create=True, threads=1)) as client:
        assert client.put("/v1/items/ball", json=MUG).status_code == 201
        refused = client.put("/v1/items/ball", json={"images": [in_json("front", tiny_photo(0, 0))]})
        problem(refused, 503, "not-ready")
        assert client.get("/v1/items/ball").json()["title"] == "A mug"
