"""Pictures: addressed by content, cached, and never read from a path in a request."""

import io

import httpx
import pytest
from PIL import Image

from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import tiny_photo


@pytest.fixture
def address(client: httpx.Client) -> str:
    """Of a picture in the gallery."""
    answer = client.post("/v1/search?limit=1", files={"image": tiny_photo(0, 0)}).json()
    return str(answer["items"][0]["image"]["url"])


def test_a_picture_may_be_cached_forever(client: httpx.Client, address: str) -> None:
    picture = client.get(address)
    assert picture.headers["content-type"] == "image/jpeg"
    assert picture.headers["cache-control"] == "public, max-age=86400, immutable"
    assert Image.open(io.BytesIO(picture.content)).size == (96, 96)


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_a_current_copy_is_not_sent_again(client: httpx.Client, address: str, form: str) -> None:
    etag = client.get(address).headers["etag"]
    assert etag.startswith('"') and etag.endswith('"')
    again = client.get(address, headers={"If-None-Match": form.format(etag)})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)


def test_an_outdated_copy_is_sent_again(client: httpx.Client, address: str) -> None:
    assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("digest", ["0" * 64, "0" * 63, "A" * 64, "..%2f..%2fetc%2fpasswd", "' or 1=1"])
def test_a_digest_that_names_nothing_is_not_found(client: httpx.Client, digest: str) -> None:
    problem(client.get(f"/media/{digest}.jpg"), 404, "not-found")


def test_the_examples_are_the_photos_of_the_folder(client: httpx.Client) -> None:
    (example,) = client.get("/v1/examples").json()["examples"]
    assert example == {"name": "blue ball.jpg", "url": "/examples/blue%20ball.jpg"}
    photo = client.get(example["url"])
    assert (photo.content, photo.headers["content-type"]) == (tiny_photo(2, 5), "image/jpeg")


@pytest.mark.parametrize("name", ["notes.txt", "none.jpg", "..%2Fbundle%2Fbundle.json", "%2Fetc%2Fpasswd"])
def test_nothing_but_a_listed_example_is_served(client: httpx.Client, name: str) -> None:
    problem(client.get(f"/examples/{name}"), 404, "not-found")


def test_without_a_folder_there_are_no_examples(settings: Settings) -> None:
    with serving(settings.model_copy(update={"examples": None})) as client:
        assert client.get("/v1/examples").json() == {"examples": []}
        problem(client.get("/examples/blue%20ball.jpg"), 404, "not-found")


def test_how_long_caches_keep_a_thumbnail_is_a_setting(settings: Settings) -> None:
    with serving(settings.model_copy(update={"media_max_age": 60})) as client:
        found = client.post("/v1/search", json={"item_id": "ball-blue"}).json()["items"][0]["image"]["url"]
        assert client.get(found).headers["cache-control"] == "public, max-age=60, immutable"
