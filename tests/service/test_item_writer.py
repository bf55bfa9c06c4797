"""The item writer: writes of one item that meet, and bundles that are activated meanwhile."""

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from index.embedding.embedder import Embedder
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import class_of_gallery
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import index_source, make_tiny_gallery, tiny_photo, write_tiny_source

MUG: dict[str, Any] = {"title": "A mug", "attributes": {"category": "mug", "price": 12.5}}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Returns settings of a service whose gallery a test may write."""
    gallery = make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    return Settings(gallery=gallery, threads=1)


@pytest.fixture
def shop(settings: Settings) -> Iterator[httpx.Client]:
    with serving(settings) as client:
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


def count_embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the size of every batch that is embedded."""
    sizes: list[int] = []
    for name in ("embed", "embed_single_threaded"):
        embed = getattr(Embedder, name)

        def counted(self: Embedder, pixels: Any, embed: Any = embed) -> Any:
            sizes.append(len(pixels))
            return embed(self, pixels)

        monkeypatch.setattr(Embedder, name, counted)
    return sizes


def test_writes_that_meet_embed_each_photo_once(shop: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_embedded(monkeypatch)
    bodies = [
        {**MUG, "images": [in_json(f"{number}-{view}", tiny_photo(number, view)) for view in range(4)]}
        for number in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: shop.put("/v1/items/contested", json=body), bodies))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert sum(sizes) == 8 * 4


def test_an_answer_has_the_version_and_content_of_its_own_write(
    settings: Settings, shop: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery_class = class_of_gallery(settings)
    upsert, is_first = gallery_class.upsert, threading.Event()

    def write_again(self: Any, entries: Any, bundle_id: str, **given: Any) -> int:
        revision: int = upsert(self, entries, bundle_id, **given)
        if not is_first.is_set():
            is_first.set()
            (item, _) = entries[0]
            upsert(self, [(item.model_copy(update={"title": "Somebody else's"}), [])], bundle_id)
        return revision

    monkeypatch.setattr(gallery_class, "upsert", write_again)
    put = shop.put("/v1/items/mine", json={**MUG, "images": [in_json("front", tiny_photo(0, 1))]})
    assert (put.status_code, put.json()["title"], len(put.json()["images"])) == (201, "A mug", 1)
    stored = shop.get("/v1/items/mine")
    assert stored.json()["title"] == "Somebody else's"
    assert put.json()["version"] < stored.json()["version"]
    stale = shop.patch("/v1/items/mine", json={"title": "Lost?"}, headers={"If-Match": put.headers["etag"]})
    problem(stale, 412, "version-conflict")


def test_an_answer_equals_what_is_read_afterwards(shop: httpx.Client) -> None:
    photos = [in_json("a", tiny_photo(0, 1)), in_json("b", tiny_photo(1, 1)), in_json("c", tiny_photo(2, 1))]
    replaced = in_json("a", tiny_photo(3, 1))
    bodies: list[dict[str, Any]] = [
        {**MUG, "images": photos},
        {**MUG, "images": photos},
        {"title": "Numbers", "attributes": {"z": 9, "a": True}},
        {"title": "Numbers", "attributes": {"z": 9.0, "a": True}},
        {"title": "Numbers", "attributes": {"z": 9.0, "a": 1}},
        {"title": "Replaced", "images": [replaced, photos[2]]},
        {"title": "Replaced", "images": [photos[2], replaced]},
        {"images": []},
    ]
    for body in bodies:
        put = shop.put("/v1/items/equal", json=body)
        got = shop.get("/v1/items/equal")
        assert (put.content, put.headers["etag"]) == (got.content, got.headers["etag"])


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_a_write_that_always_meets_others_gives_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gallery_class = class_of_gallery(settings)
    stored, reads = gallery_class.get_item, []

    def change_after_reading(self: Any, item_id: str) -> Any:
        seen = stored(self, item_id)
        reads.append(item_id)
        self.upsert([(seen.item.model_copy(update={"title": f"Version {len(reads)}"}), [])], "")
        return seen

    with serving(settings.model_copy(update={"max_write_attempts": 3})) as client:
        monkeypatch.setattr(gallery_class, "get_item", change_after_reading)
        refused = client.request(method, "/v1/items/ball-red", json=None if method == "DELETE" else MUG)
        body = problem(refused, 503, "overloaded")
        assert body["detail"] == "Other writers changed item 'ball-red' during 3 attempts."
        assert (refused.headers["retry-after"], len(reads)) == ("1", 3)
        assert 'lookalike_refused_total{reason="conflict"} 1.0' in client.get("/metrics").text


def test_an_item_is_found_although_the_bundle_was_replaced_while_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, other = make_tiny_bundle(tmp_path / "one"), make_tiny_bundle(tmp_path / "two", grid=2)
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    first = index_source(source, gallery=gallery, bundle=bundle)
    settings = Settings(gallery=gallery, threads=1)
    gallery_class = class_of_gallery(settings)
    upsert, is_replaced = gallery_class.upsert, threading.Event()

    def write_and_replace(self: Any, *args: Any, **given: Any) -> int:
        revision: int = upsert(self, *args, **given)
        if not is_replaced.is_set():
            is_replaced.set()
            index_source(source, gallery=gallery, bundle=other)
        return revision

    monkeypatch.setattr(gallery_class, "upsert", write_and_replace)
    photo = coloured(10, 200, 120)
    with serving(settings) as client:
        put = client.put("/v1/items/mug", json={**MUG, "images": [in_json("front", photo)]})
        assert put.status_code == 201 and is_replaced.is_set()
        answer = client.post("/v1/search?top=1", files={"image": photo}).json()
        assert answer["bundle"] != first.bundle_id
        assert (answer["items"][0]["id"], answer["items"][0]["score"]) == ("mug", pytest.approx(1, abs=1e-3))
