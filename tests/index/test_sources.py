"""Sources: what is written to any kind of table is read back, and mistakes are told before any image is opened."""

import csv
import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from index.errors import LookalikeError
from index.images import ImageError, ImageLimits
from index.items import Attribute, Item
from index.places import Places
from index.sources import Checked, Source, SourceImage

PHOTO = b"the bytes of a photo"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


WRITERS = {".csv": write_csv, ".jsonl": write_json_lines, ".ndjson": write_json_lines, ".parquet": write_parquet}
ROWS = [
    {"item_id": "a", "image": "1.jpg", "title": "A ball", "colour": "red", "price": 4.5},
    {"item_id": "a", "image": "2.jpg", "title": "A ball", "colour": "red", "price": 4.5},
    {"item_id": "b", "image": "sub/3.jpg", "title": "A cube", "colour": "blue", "price": 7.0},
]


def attributes(source: Source) -> list[dict[str, Attribute]]:
    return [image.item.attributes for image in source]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_tells_the_same_items(tmp_path: Path, suffix: str) -> None:
    table = WRITERS[suffix](tmp_path / f"catalogue{suffix}", ROWS)
    source = Source([table])
    ball = Item(id="a", title="A ball", attributes={"colour": "red", "price": 4.5})
    cube = Item(id="b", title="A cube", attributes={"colour": "blue", "price": 7.0})
    assert list(source) == [
        SourceImage(ball, "1.jpg", str(tmp_path / "1.jpg")),
        SourceImage(ball, "2.jpg", str(tmp_path / "2.jpg")),
        SourceImage(cube, "sub/3.jpg", str(tmp_path / "sub/3.jpg")),
    ]
    assert source.check() == Checked(tables=1, rows=3, images=3)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
IDS = TEXTS.filter(bool)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(-(2.0**53), 2.0**53, allow_nan=False)
FULL = st.fixed_dictionaries({"item_id": IDS, "image": IDS.map("p/{}".format), "title": TEXTS, "url": TEXTS})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_typed_tables_give_back_what_was_written(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    values = data.draw(
        st.fixed_dictionaries({"size": st.sampled_from([st.integers(-99, 99), st.floats(-9, 9), st.booleans(), TEXTS])})
    )
    rows = data.draw(st.lists(FULL, min_size=1, max_size=5))
    sizes = data.draw(st.lists(st.none() | values["size"], min_size=len(rows), max_size=len(rows)))
    written = [{**row, "size": size} for row, size in zip(rows, sizes, strict=True)]
    table = WRITERS[suffix](tmp_path / f"t{suffix}", written)
    expected = [
        Item(id=row["item_id"], title=row["title"], url=row["url"], attributes={} if size is None else {"size": size})
        for row, size in zip(rows, sizes, strict=True)
    ]
    images = list(Source([table]))
    assert [image.item for image in images] == expected
    assert [image.image_id for image in images] == [row["image"] for row in rows]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(FULL, NUMBERS | st.booleans() | IDS.map("text {}".format)), min_size=1, max_size=5))
def test_a_csv_gives_back_what_was_written(tmp_path: Path, rows: list[tuple[dict[str, str], Attribute]]) -> None:
    table = write_csv(tmp_path / "t.csv", [{**row, "size": size} for row, size in rows])
    images = list(Source([table]))
    assert [image.item.attributes["size"] for image in images] == [size for _, size in rows]
    assert [type(image.item.attributes["size"]) for image in images] == [type(size) for _, size in rows]
    assert [image.item.id for image in images] == [row["item_id"] for row, _ in rows]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("12", 12),
        ("-.5", -0.5),
        ("1e3", 1000.0),
        ("True", True),
        ("false", False),
        ("007", "007"),
        ("+49", "+49"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("9007199254740993", "9007199254740993"),
        ("12345678901234567890", "12345678901234567890"),
        ("yes", "yes"),
    ],
)
def test_a_csv_cell_becomes_a_number_only_where_nothing_is_lost(tmp_path: Path, cell: str, value: Attribute) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "1", "image": "a.jpg", "x": cell, "empty": ""}])
    (found,) = attributes(Source([table]))
    assert found == {"x": value} and type(found["x"]) is type(value)


def test_json_lines_may_list_images_and_nest_attributes(tmp_path: Path) -> None:
    row = {"item_id": 7, "image": ["a.jpg", "https://example.com/b.jpg"], "attributes": {"size": 3, "none": None}}
    images = list(Source([write_json_lines(tmp_path / "t.jsonl", [row])]))
    item = Item(id="7", attributes={"size": 3})
    assert images == [
        SourceImage(item, "a.jpg", str(tmp_path / "a.jpg")),
        SourceImage(item, "https://example.com/b.jpg", "https://example.com/b.jpg"),
    ]


def test_parquet_dates_decimals_and_times_become_texts_and_numbers(tmp_path: Path) -> None:
    moment = datetime(2026, 5, 4, 3, 2, 1, 999, tzinfo=UTC)
    table = pyarrow.table(
        {
            "item_id": [1],
            "image": [["a.jpg"]],
            "day": [date(2026, 5, 4)],
            "price": [Decimal("4.50")],
            "stock": [Decimal("12.00")],
            "fine": pyarrow.array([moment], pyarrow.timestamp("ns", "UTC")).cast(pyarrow.timestamp("ns", "UTC")),
            "gone": pyarrow.array([float("nan")], from_pandas=False),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    assert attributes(Source([tmp_path / "t.parquet"])) == [
        {"day": "2026-05-04", "price": 4.5, "stock": 12, "fine": "2026-05-04T03:02:01.000999+00:00"}
    ]


def test_columns_are_mapped_and_attributes_limited(tmp_path: Path) -> None:
    rows = [{"sku": "a", "photo": "1.jpg", "photo_id": "front", "colour": "red", "cost": 3}]
    table = write_csv(tmp_path / "t.csv", rows)
    mapping = {"item_id": "sku", "image": "photo", "image_id": "photo_id"}
    source = Source([table], columns=mapping, attributes=["colour"], images="/photos")
    source.check()
    assert list(source) == [SourceImage(Item(id="a", attributes={"colour": "red"}), "front", "/photos/1.jpg")]


def test_several_addresses_patterns_and_folders_are_one_source(tmp_path: Path) -> None:
    for name in ("2.csv", "1.csv"):
        write_csv(tmp_path / name, [{"item_id": name, "image": "a.jpg"}])
    (tmp_path / "3.jsonl.gz").write_bytes(gzip.compress(b'{"item_id": "packed", "image": "a.jpg"}\n'))
    (tmp_path / "shop" / "ball").mkdir(parents=True)
    (tmp_path / "shop" / "ball" / "b.JPG").write_bytes(PHOTO)
    (tmp_path / "shop" / "ball" / "notes.txt").write_text("no photo")
    source = Source([str(tmp_path / "*.csv"), tmp_path / "shop", f"file://{tmp_path}/3.jsonl.gz"])
    assert [image.item.id for image in source] == ["1.csv", "2.csv", "ball", "packed"]
    assert source.check() == Checked(tables=3, rows=3, images=4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "sku,photo\n1,a.jpg\n", "no column 'item_id' and no 'image'; it has sku, photo.*item_id=sku"),
        ("t.csv", "", "no column .*it has none"),
        ("t.csv", "item_id,image,image\n", "two columns 'image'"),
        ("t.csv", "item_id,image\n", "names no images"),
        ("t.csv", "item_id,image\n1,a.jpg\n2,\n", "t.csv, line 3: no value for 'image', only for item_id"),
        ("t.csv", "item_id,image\n1,a.jpg,surplus\n", "line 2: 3 fields under 2 columns"),
        ("t.csv", "item_id,image\n1,htp://example.com/a.jpg\n", "line 2: 'htp.*no address that is known"),
        ("t.csv", f"item_id,image\n1,{'x' * 600}\n", "line 2: image_id: .* has 600 characters"),
        ("t.csv.gz", gzip.compress(b"item_id,image\n1,a.jpg\n")[:-9], "Compressed file ended"),
        ("t.csv", b"item_id,image\n1,\xff\n", "utf-8"),
        ("t.jsonl", '{"item_id": 1, "image": "a"}\n{"item_id": 2\n', "line 2: no JSON"),
        ("t.jsonl", '{"sku": 1, "image": "a"}\n', "line 1: no value for 'item_id', only for sku, image"),
        ("t.jsonl", '{"item_id": "1", "image": "a", "size": [1]}\n', r"line 1: attributes.size: .* text, a number"),
        ("t.jsonl", '{"item_id": "1", "image": "a", "x": 1, "attributes": {"x": 2}}\n', "'x' is a column and"),
        ("t.jsonl", '{"item_id": "1", "image": ["a", "b"], "image_id": "c"}\n', "line 1: image_id: 1 for 2 images"),
        ("t.jsonl", '{"item_id": "\\ud800", "image": "a"}\n', "line 1: id"),
        ("t.jsonl", '{"item_id": "1", "image": "\\ud800"}\n', "line 1: .*surrogates not allowed"),
        ("t.jsonl", "[]\n", "line 1: no JSON object"),
        ("t.parquet", "no parquet", "no Parquet table"),
        ("t.xlsx", "", "no table of a known format"),
    ],
)
def test_a_wrong_table_is_refused_before_any_work(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LookalikeError, match=message):
        Source([tmp_path / name]).check()


def test_a_nested_value_of_parquet_is_told_with_row_and_column(tmp_path: Path) -> None:
    rows = [{"item_id": "1", "image": "a", "size": None}, {"item_id": "2", "image": "b", "size": {"x": 1}}]
    with pytest.raises(LookalikeError, match=r"t.parquet, row 2: attributes.size: "):
        Source([write_parquet(tmp_path / "t.parquet", rows)]).check()


def test_bad_rows_of_all_tables_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("item_id,image\n1,\n,a.jpg\n3,fine.jpg\n")
    (tmp_path / "2.csv").write_text("item_id,image\n" + "1,\n" * 30)
    with pytest.raises(LookalikeError) as caught:
        Source([tmp_path / "1.csv", tmp_path / "2.csv"]).check()
    assert caught.value.problem.count(", line ") == 10
    assert "1.csv, line 3" in str(caught.value) and "2.csv, line 9" in str(caught.value)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "1", "image": "a.jpg", "colour": "", "size": 1}])
    with pytest.raises(LookalikeError, match="Nothing matches"):
        Source([str(tmp_path / "*.parquet")]).check()
    with pytest.raises(LookalikeError, match="No source at"):
        Source([tmp_path / "missing.csv"]).check()
    with pytest.raises(LookalikeError, match="No column 'sku' can be mapped"):
        Source([table], columns={"sku": "item_id"})
    with pytest.raises(LookalikeError, match="no column 'name'"):
        Source([table], columns={"title": "name"}).check()
    with pytest.raises(LookalikeError, match="attribute 'color'; there are colour, size"):
        Source([table], attributes=["color"]).check()
    Source([table], attributes=["colour"]).check()  # a column without a value today is no mistake
    with pytest.raises(LookalikeError, match="gopher://"):
        Source(["gopher://example.com/t.csv"]).check()


def test_a_local_image_that_cannot_be_read_is_an_image_error(tmp_path: Path) -> None:
    (tmp_path / "a b.jpg").write_bytes(PHOTO)
    source = Source([])
    assert source.read(str(tmp_path / "a b.jpg")) == source.read(f"file://{tmp_path}/a%20b.jpg") == PHOTO
    for place in (tmp_path, tmp_path / "missing.jpg", tmp_path / "nul\0.jpg"):
        with pytest.raises(ImageError) as caught:
            source.read(str(place))
        assert caught.value.reason == "unreadable"
    with pytest.raises(ImageError) as caught:
        source.read(str(tmp_path / "a b.jpg"), ImageLimits(max_bytes=5))
    assert caught.value.reason == "too_large"


class Shop(BaseHTTPRequestHandler):
    """A server with good and bad days, which counts what it was asked for."""

    asked: ClassVar[list[str]] = []
    files: ClassVar[dict[str, bytes]] = {}
    stop: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path in self.files:
            self.answer(200, self.files[path])
        elif path == "/busy.jpg":
            self.answer(503 if self.asked.count(path) < 3 else 200, PHOTO)
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
        """A client that hangs up on an endless answer is what the tests are about."""


@pytest.fixture
def shop() -> Iterator[str]:
    Shop.asked.clear()
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


def test_a_table_and_its_images_come_over_http(tmp_path: Path, shop: str) -> None:
    packed = gzip.compress(b"item_id,image\n1,a%20b.jpg\n2,/top.jpg\n")
    Shop.files |= {"/x/t.csv.gz": packed, "/x/a%20b.jpg": PHOTO, "/top.jpg": b"other"}
    source = Source([f"{shop}/x/t.csv.gz?signature=1"])
    assert source.check() == Checked(tables=1, rows=2, images=2)
    assert [image.place for image in source] == [f"{shop}/x/a%20b.jpg", f"{shop}/top.jpg"]
    assert [source.read(image.place) for image in source] == [PHOTO, b"other"]
    assert len([path for path in Shop.asked if "t.csv" in path]) == 1, "the table is fetched once"


def test_parquet_comes_from_a_server_without_ranges(tmp_path: Path, shop: str) -> None:
    Shop.files["/t.parquet"] = write_parquet(tmp_path / "t.parquet", ROWS).read_bytes()
    assert Source([f"{shop}/t.parquet"], images="/photos").check().images == 3


@pytest.mark.parametrize(
    ("path", "reason", "asked"),
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
def test_a_bad_answer_is_an_image_error(shop: str, path: str, reason: str, asked: int) -> None:
    Shop.files["/empty.jpg"] = b""
    with pytest.raises(ImageError) as caught:
        Places(timeout=0.3).read(f"{shop}/{path}", ImageLimits(max_bytes=1_000_000))
    assert caught.value.reason == reason
    assert len(Shop.asked) == asked


def test_a_server_that_is_not_there_is_an_image_error(shop: str) -> None:
    for place in ("http://127.0.0.1:1/a.jpg", "http://no-such-host.invalid/a.jpg", "http://[/a.jpg"):
        with pytest.raises(ImageError) as caught:
            Places(timeout=1).read(place)
        assert caught.value.reason in ("unreachable", "unreadable")
    with pytest.raises(LookalikeError, match="it does not exist"):
        Source([f"{shop}/missing.csv"]).check()


def test_a_busy_server_is_asked_again(shop: str) -> None:
    assert Source([]).read(f"{shop}/busy.jpg") == PHOTO


def test_threads_read_at_once(shop: str) -> None:
    Shop.files |= {f"/{number}.jpg": b"%d" % number for number in range(100)}
    source = Source([])
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: source.read(f"{shop}/{number}.jpg"), range(100)))
    assert found == [b"%d" % number for number in range(100)]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """fsspec's store in memory: addresses, patterns and files as of any object store."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


def test_a_bucket_of_tables_is_a_source(bucket: Any) -> None:
    for number in (2, 1):
        bucket.pipe(f"/bucket/day/{number}.csv", f"item_id,image\n{number},photos/a.jpg\n".encode())
    bucket.pipe("/bucket/day/photos/a.jpg", PHOTO)
    source = Source(["memory://bucket/day/*.csv"])
    assert source.check() == Checked(tables=2, rows=2, images=2)
    assert [image.item.id for image in source] == ["1", "2"]
    assert [source.read(image.place) for image in source] == [PHOTO, PHOTO]
    with pytest.raises(LookalikeError, match="Nothing matches"):
        Source(["memory://bucket/day/*.parquet"]).check()
    with pytest.raises(ImageError) as caught:
        source.read("memory://bucket/day/none.jpg")
    assert caught.value.reason == "unreadable"


def test_a_remote_table_cannot_name_files_of_this_machine(bucket: Any) -> None:
    bucket.pipe("/bucket/t.csv", b"item_id,image\n1,file:///etc/passwd\n2,/etc/passwd\n")
    with pytest.raises(LookalikeError, match="line 2: .*file of this machine"):
        Source(["memory://bucket/t.csv"]).check()


def test_a_missing_package_is_told_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aiohttp", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[remote\]"'):
        Source(["https://example.com/t.csv"]).check()


def test_a_long_table_is_a_stream(tmp_path: Path) -> None:
    import tracemalloc

    def peak(rows: int) -> int:
        with (tmp_path / "t.csv").open("w") as file:
            file.write("item_id,image,colour\n")
            file.writelines(f"{number},{number}.jpg,red\n" for number in range(rows))
        tracemalloc.start()
        assert Source([tmp_path / "t.csv"]).check().images == rows
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(10)  # what is allocated once
    assert peak(20_000) < 2 * peak(200) + 100_000
