"""Places: files are read below the folder of their row only, whatever path or link leads elsewhere."""

import os
from pathlib import Path

import pytest

from index.embedding.images import ImageError
from index.ingest.places import OWN_FOLDER, AllowedPlaces, resolve_place

PHOTO = b"the bytes of a photo"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with photos, next to one with a secret."""
    shop = tmp_path / "shop"
    (shop / "photos").mkdir(parents=True)
    (shop / "photos" / "1.jpg").write_bytes(PHOTO)
    for name in ("private", "shop-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret.jpg").write_bytes(b"secret")
    (shop / "inner").symlink_to(shop / "photos")
    (shop / "outer").symlink_to(tmp_path / "private")
    (shop / "link.jpg").symlink_to("../private/secret.jpg")
    (shop / "chain.jpg").symlink_to("link.jpg")
    (shop / "loop.jpg").symlink_to("loop.jpg")
    return shop


def read(value: str, folder: Path, allowed: AllowedPlaces = OWN_FOLDER) -> bytes:
    return allowed.read_file(resolve_place(str(folder), value), str(folder))


def test_every_path_below_the_folder_is_read(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("photos/1.jpg", "./photos//1.jpg", "photos/../photos/1.jpg", "inner/1.jpg", "../shop/photos/1.jpg"):
        assert read(value, shop) == PHOTO, value
    for value in (f"{shop}/photos/1.jpg", f"file://{shop}/photos/1.jpg", f"FILE://{shop}/photos/%31.jpg"):
        assert read(value, shop) == PHOTO, value
    monkeypatch.chdir(shop)
    assert read("photos/1.jpg", Path()) == PHOTO
    assert read("../shop/photos/1.jpg", Path()) == PHOTO
    (shop.parent / "alias").symlink_to(shop)
    assert read("photos/1.jpg", shop.parent / "alias") == PHOTO, "the operator may name the folder by a link"


@pytest.mark.parametrize(
    "value",
    [
        "../private/secret.jpg",
        "photos/../../private/secret.jpg",
        "../private/missing.jpg",
        "../shop-2/secret.jpg",
        "outer/secret.jpg",
        "outer/missing.jpg",
        "link.jpg",
        "chain.jpg",
        "inner/../../private/secret.jpg",
        "..",
        ".",
        "/etc/passwd",
        "//etc/passwd",
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "local:///etc/passwd",
        "file:///%65tc/passwd",
        "/proc/self/environ",
    ],
)
def test_nothing_outside_the_folder_is_read(shop: Path, value: str) -> None:
    with pytest.raises(ImageError, match=r"is outside .*--allow-folder") as caught:
        read(value, shop)
    assert caught.value.reason == "forbidden"


def test_a_loop_of_links_is_unreadable(shop: Path) -> None:
    with pytest.raises(ImageError) as caught:
        read("loop.jpg", shop)
    assert caught.value.reason == "unreadable"


def test_the_operator_may_allow_more_folders(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.parent)
    for folder in ("private", str(shop.parent / "private"), f"file://{shop.parent}/private/"):
        allowed = AllowedPlaces.of([folder], [])
        for value in ("../private/secret.jpg", "outer/secret.jpg", "chain.jpg", f"{shop.parent}/private/secret.jpg"):
            assert read(value, shop, allowed) == b"secret"
        with pytest.raises(ImageError, match="is outside"):
            read("../shop-2/secret.jpg", shop, allowed)


def test_a_link_that_appears_after_the_check_is_not_followed(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = os.path.realpath

    def swap(path: Path) -> str:
        """Resolves a path and then replaces the folder of the photo by a link, as an attacker would."""
        resolved = resolve(path)
        if path.name == "1.jpg":
            (shop / "photos").rename(shop / "moved")
            (shop.parent / "private" / "1.jpg").write_bytes(b"secret")
            (shop / "photos").symlink_to(shop.parent / "private")
        return resolved

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(ImageError) as caught:
        read("photos/1.jpg", shop)
    assert caught.value.reason == "unreadable"


def test_objects_of_a_store_are_below_the_prefix_of_their_row() -> None:
    permits = OWN_FOLDER.permits
    assert permits("s3://bucket/day/photos/1.jpg", "s3://bucket/day")
    assert permits("https://example.com/1.jpg", "s3://bucket/day") and permits("http://[::1]/1.jpg", "/shop")
    for place in (
        "s3://bucket/night/1.jpg",
        "s3://bucket/day-2/1.jpg",
        "s3://other/day/1.jpg",
        "gs://bucket/day/1.jpg",
    ):
        assert not permits(place, "s3://bucket/day"), place
    for place in ("s3://bucket/1.jpg", "htp://example.com/1.jpg", "simplecache::file:///etc/passwd", "http+unix://x/1"):
        assert not permits(place, "/shop"), place
    assert AllowedPlaces.of(["s3://bucket"], []).permits("s3://bucket/1.jpg", "/shop")
