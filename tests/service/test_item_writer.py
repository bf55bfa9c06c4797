"""The item writer: writes of one item that meet, and bundles that are activated meanwhile."""

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.errors import StorageFull
from index.gallery.types import NewImage
from service import inference
from service.admission import Overloaded
from service.settings import Settings
from service.url_fetcher import Fetcher
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

    def change_after_reading(self: Any, item_id: str, **options: Any) -> Any:
        seen = stored(self, item_id, **options)
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
        answer = client.post("/v1/search?limit=1", files={"image": photo}).json()
        assert answer["bundle"] != first.bundle_id
        assert (answer["items"][0]["id"], answer["items"][0]["score"]) == ("mug", pytest.approx(1, abs=1e-3))


# Bundles that jobs prepare


class Preparation:
    """A job that prepares a second bundle, as the service sees it in the gallery."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.gallery = open_gallery(settings.gallery)
        self.bundle = Bundle.load(make_tiny_bundle(folder, grid=2))
        self.copy = Path(settings.gallery) / "bundles" / self.bundle.id
        self.gallery.keep_bundle(self.bundle)
        self.job = self.gallery.jobs.begin("catalogue.csv", self.bundle.id)
        self.job.hold()

    def has_vectors(self, item_id: str) -> bool:
        """Whether every image of an item has a vector of the bundle."""
        stored = self.gallery.get_item(item_id)
        assert stored and stored.images
        return self.gallery.digests(item_id, self.bundle.id) == {image.id: image.digest for image in stored.images}


@pytest.fixture
def preparation(settings: Settings, tmp_path: Path) -> Iterator[Preparation]:
    preparation = Preparation(settings, tmp_path / "new")
    yield preparation
    preparation.gallery.close()


def store_mug(shop: httpx.Client, *photos: bytes, item_id: str = "mug") -> httpx.Response:
    images = [in_json(str(number), photo) for number, photo in enumerate(photos)]
    return shop.put(f"/v1/items/{item_id}", json={**MUG, "images": images})


def test_an_item_that_is_stored_during_a_job_is_found_after_its_bundle_is_activated(
    settings: Settings, preparation: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo, sizes = coloured(10, 200, 120), count_embedded(monkeypatch)
    with serving(settings.model_copy(update={"max_write_attempts": 1})) as shop:
        for item_id in ("mug", "cup"):
            del sizes[:]
            assert store_mug(shop, photo, coloured(9, 9, 99), item_id=item_id).status_code == 201
            assert preparation.has_vectors(item_id)
        assert sum(sizes) == 4, "each photo is embedded once per bundle"
        side = shop.put("/v1/items/mug/images/side", content=coloured(1, 2, 3), headers={"Content-Type": "image/png"})
        assert side.status_code == 201
        assert preparation.has_vectors("mug")
        first = shop.get("/v1/status").json()["bundle"]["id"]
        preparation.gallery.activate(preparation.bundle.id)
        preparation.job.update(state="done")
        assert store_mug(shop, photo, item_id="bowl").status_code == 201, "this write meets the new bundle"
        found = shop.post("/v1/search?limit=3", files={"image": photo}).json()
        assert found["bundle"] == preparation.bundle.id != first
        assert {item["id"] for item in found["items"]} == {"mug", "cup", "bowl"}
        by_item = shop.post("/v1/search?limit=2", json={"item_id": "mug"}).json()
        assert {item["id"] for item in by_item["items"]} == {"cup", "bowl"}


@pytest.mark.parametrize("overlap", [60.0, 0.0])
def test_items_are_found_by_processes_that_have_not_yet_switched_to_the_new_bundle(
    settings: Settings, preparation: Preparation, monkeypatch: pytest.MonkeyPatch, overlap: float
) -> None:
    monkeypatch.setattr(inference, "_OVERLAP_SECONDS", overlap)
    with serving(settings) as shop:
        first = shop.get("/v1/status").json()["bundle"]["id"]
        assert store_mug(shop, coloured(10, 200, 120)).status_code == 201
        preparation.gallery.activate(preparation.bundle.id)
        preparation.job.update(state="done")
        assert store_mug(shop, coloured(9, 9, 99), item_id="cup").status_code == 201
        assert shop.get("/v1/status").json()["bundle"]["id"] == preparation.bundle.id
        assert store_mug(shop, coloured(1, 2, 3), item_id="bowl").status_code == 201
        assert preparation.has_vectors("bowl")
        assert bool(preparation.gallery.digests("bowl", first)) == (overlap > 0)


@pytest.mark.parametrize("state", ["interrupted", "cancelled"])
def test_items_are_embedded_for_a_bundle_until_its_job_is_repeated(
    shop: httpx.Client, preparation: Preparation, state: str
) -> None:
    preparation.job.update(state=state)
    assert store_mug(shop, coloured(10, 200, 120)).status_code == 201
    assert preparation.has_vectors("mug")
    preparation.gallery.drop_bundle(preparation.bundle.id)
    assert store_mug(shop, coloured(10, 200, 120), item_id="cup").status_code == 201
    assert not preparation.has_vectors("cup")


def test_a_job_that_begins_while_an_item_is_written_gets_its_vectors(
    settings: Settings, shop: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery_class = class_of_gallery(settings)
    upsert = gallery_class.upsert
    begun: list[Preparation] = []

    def write_and_begin(self: Any, *args: Any, **given: Any) -> int:
        revision: int = upsert(self, *args, **given)
        if not begun:
            begun.append(Preparation(settings, tmp_path / "new"))
        return revision

    monkeypatch.setattr(gallery_class, "upsert", write_and_begin)
    assert store_mug(shop, coloured(10, 200, 120)).status_code == 201
    (preparation,) = begun
    assert preparation.has_vectors("mug")
    preparation.gallery.close()


def test_a_known_photo_that_is_sent_again_gets_the_vector_that_it_lacks(
    settings: Settings, shop: httpx.Client, tmp_path: Path
) -> None:
    photo = coloured(10, 200, 120)
    version = store_mug(shop, photo).json()["version"]
    preparation = Preparation(settings, tmp_path / "new")
    again = store_mug(shop, photo)
    assert (again.status_code, again.json()["version"]) == (200, version), "a vector is not a change of the item"
    assert preparation.has_vectors("mug")
    preparation.gallery.close()


def test_the_photo_at_a_url_is_fetched_once_for_all_bundles_and_reported_if_it_changes_in_between(
    settings: Settings, preparation: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    async def fetch(self: Fetcher, url: str, on_bytes: object = None) -> bytes:
        fetched.append(url)
        return coloured(len(fetched), 200, 120)

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    body = {**MUG, "images": [{"id": "front", "image_url": "https://cdn.example.com/1.png"}]}
    with serving(settings.model_copy(update={"url_hosts": ["cdn.example.com"]})) as shop:
        # The first write loads the model, and so embeds with it only after its commit.
        detail = problem(shop.put("/v1/items/mug", json=body), 503, "not-ready")["detail"]
        assert detail.startswith("The item is stored")
        assert detail.endswith("The photo of image 'front' changed while it was being stored.")
        assert len(fetched) == 2 and not preparation.has_vectors("mug")
        assert shop.put("/v1/items/mug", json=body).status_code == 200
        assert len(fetched) == 3 and preparation.has_vectors("mug")


@pytest.mark.parametrize("fault", ["unloadable", "unusable"])
def test_a_prepared_bundle_that_cannot_be_used_fails_no_write(
    shop: httpx.Client,
    preparation: Preparation,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault == "unloadable":
        (preparation.copy / "model.onnx").write_bytes(b"no model")
    else:
        run = Embedder._run

        def run_or_fail(self: Embedder, session: Any, pixels: Any) -> Any:
            vectors = run(self, session, pixels)
            return vectors * np.nan if self.bundle.id == preparation.bundle.id else vectors

        monkeypatch.setattr(Embedder, "_run", run_or_fail)
    photo = coloured(10, 200, 120)
    for item_id in ("mug", "cup"):
        assert store_mug(shop, photo, item_id=item_id).status_code == 201
    assert shop.post("/v1/search?limit=1", files={"image": photo}).json()["items"][0]["id"] in ("mug", "cup")
    assert not preparation.has_vectors("mug")
    assert "lookalike_unprepared_images_total 2.0" in shop.get("/metrics").text
    assert f"item 'mug' is stored without vectors of bundle {preparation.bundle.id}" in caplog.text


def test_an_active_bundle_that_cannot_be_loaded_is_reported_after_the_item_is_stored(
    shop: httpx.Client, preparation: Preparation
) -> None:
    stored = preparation.gallery.get_item("ball-red")
    assert stored
    vector = np.ones(preparation.bundle.dimension, np.float32)
    image = NewImage(stored.images[0].id, stored.images[0].digest, vector, b"")
    preparation.gallery.upsert([(stored.item, [image])], preparation.bundle.id)
    preparation.gallery.activate(preparation.bundle.id)
    (preparation.copy / "model.onnx").write_bytes(b"no model")
    body = problem(store_mug(shop, coloured(10, 200, 120)), 503, "not-ready")
    assert preparation.bundle.id in body["detail"] and "again" in body["remedy"]
    assert shop.get("/v1/items/mug").status_code == 200
    metrics = shop.get("/metrics").text
    assert "lookalike_gallery_unsearchable_images 16.0" in metrics and "unprepared_images_total 0.0" in metrics


@pytest.mark.parametrize(
    "error", [StorageFull("Nothing was written.", "Free space."), Overloaded("64 photos to embed are waiting already.")]
)
def test_an_answer_tells_that_the_item_is_stored_when_only_a_later_vector_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: LookalikeError
) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    settings = Settings(gallery=gallery, threads=1, bundle_poll_seconds=1000)
    gallery_class = class_of_gallery(settings)
    upsert, written = gallery_class.upsert, []

    def fail_second_write(self: Any, entries: Any, bundle_id: str, **given: Any) -> int:
        written.append(bundle_id)
        if len(written) == 2:
            raise error
        revision: int = upsert(self, entries, bundle_id, **given)
        return revision

    body = {**MUG, "images": [in_json("front", coloured(1, 2, 3))]}
    with serving(settings) as client:
        source = tmp_path / "gallery-source" / "catalogue.csv"
        index_source(source, gallery=gallery, bundle=make_tiny_bundle(tmp_path / "other", grid=8))
        monkeypatch.setattr(gallery_class, "upsert", fail_second_write)
        detail = problem(client.put("/v1/items/mug", json=body), 503, "not-ready")["detail"]
        assert detail.startswith("The item is stored") and error.problem in detail
        assert client.get("/v1/items/mug").status_code == 200
        assert client.put("/v1/items/mug", json=body).status_code == 200
        assert client.post("/v1/search?limit=1", files={"image": coloured(1, 2, 3)}).json()["items"][0]["id"] == "mug"
