"""Remote files over HTTP and from a bucket, and every way in which reading one can fail."""

import gzip
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from index.embedding.images import ImageError, ImageLimits
from index.errors import LookalikeError
from index.ingest.places import AllowedPlaces
from index.ingest.remote_files import FileReader, RetrySettings
from index.ingest.sources import Source, SourceSummary

PHOTO = b"the bytes of a photo"
LOOPBACK = AllowedPlaces.of([], ["127.0.0.1"])


def test_a_local_image_that_cannot_be_read_is_an_image_error(tmp_path: Path) -> None:
    (tmp_path / "a b.jpg").write_bytes(PHOTO)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    files, folder = FileReader(), str(tmp_path)
    for place in (f"{folder}/a b.jpg", f"file://{folder}/a%20b.jpg"):
        assert files.read(place, folder) == PHOTO
    for name in ("folder", "pipe", "missing.jpg", "nul\0.jpg"):
        with pytest.raises(ImageError) as caught:
            files.read(f"{folder}/{name}", folder)
        assert caught.value.reason == "unreadable"
    with pytest.raises(ImageError) as caught:
        files.read(f"{folder}/a b.jpg", folder, ImageLimits(max_bytes=5))
    assert caught.value.reason == "too_large"


class Shop(BaseHTTPRequestHandler):
    """A server with working and failing paths, which records its requests."""

    requested: ClassVar[list[str]] = []
    files: ClassVar[dict[str, bytes]] = {}
    stop: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.requested.append(self.path)
        path = self.path.partition("?")[0]
        if path in self.files:
            self.answer(200, self.files[path])
        elif path == "/busy.jpg":
            self.answer(503 if self.requested.count(path) < 3 else 200, PHOTO)
        elif path == "/forbidden.jpg":
            self.answer(403, b"")
        elif path == "/broken.jpg":
            self.answer(500, b"")
        elif path == "/slow.jpg":
            self.stop.wait(20)
        elif path == "/truncated.jpg":
            self.answer(200, PHOTO, length=1000)
        elif path == "/dripping.jpg":
            self.answer(200, b"", length=1000)
            while not self.stop.wait(0.1):
                self.wfile.write(b".")
        elif path == "/endless.jpg":
            self.answer(200, b"", length=10**12)
            while not self.stop.is_set():
                self.wfile.write(bytes(1 << 16))
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the tests' output quiet."""


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that close the connection, as the tests provoke."""


@pytest.fixture
def shop() -> Iterator[str]:
    Shop.requested.clear()
    Shop.files.clear()
    Shop.stop.clear()
    server = QuietServer(("127.0.0.1", 0), Shop)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Shop.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_table_and_its_images_are_read_over_http(shop: str) -> None:
    packed = gzip.compress(b"item_id,image\n1,a%20b.jpg\n2,/top.jpg\n")
    Shop.files |= {"/x/t.csv.gz": packed, "/x/a%20b.jpg": PHOTO, "/top.jpg": b"other"}
    source = Source([f"{shop}/x/t.csv.gz?signature=1"], allowed=LOOPBACK)
    assert source.check() == SourceSummary(tables=1, rows=2, images=2)
    assert [image.place for image in source] == [f"{shop}/x/a%20b.jpg", f"{shop}/top.jpg"]
    assert [source.read(image) for image in source] == [PHOTO, b"other"]
    assert len([path for path in Shop.requested if "t.csv" in path]) == 1, "the table is fetched once"


def test_parquet_is_read_from_a_server_without_range_requests(tmp_path: Path, shop: str) -> None:
    parquet.write_table(pyarrow.table({"item_id": [1, 2], "image": ["a.jpg", "b.jpg"]}), tmp_path / "t.parquet")
    Shop.files["/t.parquet"] = (tmp_path / "t.parquet").read_bytes()
    assert Source([f"{shop}/t.parquet"], images="/photos").check().images == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "reason", "requested"),
    [
        ("missing.jpg", "unreadable", 1),
        ("forbidden.jpg", "unreadable", 1),
        ("broken.jpg", "unreachable", 3),
        ("slow.jpg", "unreachable", 3),
        ("dripping.jpg", "unreachable", 3),
        ("truncated.jpg", "unreachable", 3),
        ("endless.jpg", "too_large", 1),
        ("empty.jpg", "empty", 1),
    ],
)
def test_a_bad_response_is_an_image_error(shop: str, path: str, reason: str, requested: int) -> None:
    Shop.files["/empty.jpg"] = b""
    with pytest.raises(ImageError) as caught:
        files = FileReader(LOOPBACK, RetrySettings(timeout=0.3, backoff=0.05))
        files.read(f"{shop}/{path}", "/shop", ImageLimits(max_bytes=1_000_000))
    assert caught.value.reason == reason
    assert len(Shop.requested) == requested


def test_an_unreachable_server_is_an_image_error(shop: str) -> None:
    for place in ("http://127.0.0.1:1/a.jpg", "http://no-such-host.invalid/a.jpg", "http://[/a.jpg"):
        with pytest.raises(ImageError) as caught:
            FileReader(LOOPBACK, RetrySettings(timeout=1)).read(place, "/shop")
        assert caught.value.reason in ("unreachable", "unreadable")
    with pytest.raises(LookalikeError, match="it does not exist"):
        Source([f"{shop}/missing.csv"]).check()


def test_a_request_to_a_busy_server_is_retried(shop: str) -> None:
    assert FileReader(LOOPBACK).read(f"{shop}/busy.jpg", "/shop") == PHOTO


def test_threads_read_concurrently(shop: str) -> None:
    Shop.files |= {f"/{number}.jpg": b"%d" % number for number in range(100)}
    files = FileReader(LOOPBACK)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: files.read(f"{shop}/{number}.jpg", "/shop"), range(100)))
    assert found == [b"%d" % number for number in range(100)]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """fsspec's filesystem in memory, with addresses and patterns like an object store."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


def test_a_bucket_of_tables_is_a_source(bucket: Any) -> None:
    for number in (2, 1):
        bucket.pipe(f"/bucket/day/{number}.csv", f"item_id,image\n{number},photos/a.jpg\n".encode())
    bucket.pipe("/bucket/day/photos/a.jpg", PHOTO)
    source = Source(["memory://bucket/day/*.csv"])
    assert source.check() == SourceSummary(tables=2, rows=2, images=2)
    assert [image.item.id for image in source] == ["1", "2"]
    assert [source.read(image) for image in source] == [PHOTO, PHOTO]
    with pytest.raises(LookalikeError, match="Nothing matches"):
        Source(["memory://bucket/day/*.parquet"]).check()
    with pytest.raises(ImageError) as caught:
        FileReader().read("memory://bucket/day/none.jpg", "memory://bucket/day")
    assert caught.value.reason == "unreadable"


def test_rows_of_a_bucket_name_only_what_is_below_its_table(bucket: Any) -> None:
    places = [
        "file:///etc/passwd",
        "/other/a.jpg",
        "../../other/a.jpg",
        "%2e%2e/a.jpg",
        "//other/a.jpg",
        "s3://b/a.jpg",
    ]
    rows = "".join(f"{number},{place}\n" for number, place in enumerate(places))
    bucket.pipe("/bucket/day/t.csv", f"item_id,image\n{rows}".encode())
    bucket.pipe("/bucket/other/a.jpg", PHOTO)
    source = Source(["memory://bucket/day/t.csv"])
    assert source.check().images == len(places)
    for image in source:
        with pytest.raises(ImageError, match=r"is outside memory://bucket/day\. .*--allow-folder") as caught:
            source.read(image)
        assert caught.value.reason == "forbidden"
    allowed = AllowedPlaces.of(["memory://bucket/other/"], [])
    assert FileReader(allowed).read("memory://bucket/other/a.jpg", "memory://bucket/day") == PHOTO


def test_a_missing_package_is_reported_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("item_id,image\n1,https://example.com/a.jpg\n")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[remote\]"'):
        Source(["https://example.com/t.csv"]).check()
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[remote\]"'):
        Source([tmp_path / "t.csv"]).check()
