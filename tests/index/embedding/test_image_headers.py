"""Tests of the checks before decoding: limits, named formats, and memory that is known in advance."""

import io
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from index._util.byte_budget import ByteBudget
from index.embedding.image_headers import ImageError, ImageLimits, decode_cost, hold_memory
from index.embedding.images import decode
from tests.support.memory import peak_memory, reset_peak_memory
from tests.support.tiff import grey_tags, write_tiff

SIDE = 7071
MIB = 2**20
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory by /proc")


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, depth: int, colour: int, *, extra: bytes = b"") -> bytes:
    """Returns a black PNG that is rotated by its EXIF data, made without the memory for its pixels."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row, packer = b"\0" + bytes(-(-width * channels * depth // 8)), zlib.compressobj(1)
    rows = max(1, MIB // len(row))
    packed = [packer.compress(row * min(rows, height - top)) for top in range(0, height, rows)]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    exif = chunk(b"eXIf", b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0")
    body = chunk(b"IDAT", b"".join(packed) + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + exif + extra + body + chunk(b"IEND", b"")


def webp_lossless(width: int, height: int) -> bytes:
    """Returns a WebP of 38 bytes: a single colour, whatever the size."""
    data = bytearray(encode(Image.new("RGB", (1, 1)), "WEBP", lossless=True))
    data[21:25] = ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
    data[4:8], data[16:20] = struct.pack("<I", 30), struct.pack("<I", 18)
    return bytes(data) + bytes(4)


def jpeg_of_scans(side: int, count: int) -> bytes:
    """Returns a progressive JPEG that repeats its last scan until it has `count`."""
    data = encode(Image.new("RGB", (side, side)), "JPEG", progressive=True, quality=30)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (count - 10) + data[-2:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "This file is not a photo of a known format."),
        (b"%PDF-1.7\n", "This is a PDF file, which is not supported. Convert it to JPEG."),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "This is an SVG file, which is not supported."),
        (
            encode(Image.new("1", (2, 2)), "TIFF", compression="group4"),
            "The TIFF cannot be decoded: its compression is",
        ),
    ],
)
def test_unsupported_format_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert caught.value.reason == "unsupported" and message in str(caught.value)


def test_heic_is_named_where_its_decoder_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError) as caught:
        decode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert caught.value.reason == "unsupported"
    assert caught.value.problem == "This is a HEIC photo, and HEIC support is not installed."
    assert caught.value.remedy == "Convert it to JPEG, or install lookalike[heic]."


@pytest.mark.parametrize("size", [(1, 1001), (1001, 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_each_side_is_limited(size: tuple[int, int], kind: str) -> None:
    data = encode(Image.new("RGB", size), kind)
    with pytest.raises(ImageError, match="the limit of a side is 1,000") as caught:
        decode(data, ImageLimits(max_side=1000))
    assert caught.value.reason == "too_many_pixels"
    assert decode(data, ImageLimits(max_side=1001)).size == size


@ON_LINUX
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: png(1, 49_999_999, 8, 0), "too_many_pixels"),
        (lambda: webp_lossless(16_384, 16_384), "too_many_pixels"),
        (lambda: jpeg_of_scans(7000, 11), "unreadable"),
        (lambda: jpeg_of_scans(1000, 101), "unreadable"),
        (lambda: png(8, 8, 8, 0, extra=chunk(b"teXt", b"a\0b") * 20_000), "unreadable"),
        (lambda: b"\xff\xd8" + b"\xff\xe1\0\2" * 3_000_000, "unreadable"),
        (lambda: b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"\x21\xfe\0" * 3_000_000, "unreadable"),
    ],
    ids=["narrow", "canvas", "scans at 49 MP", "scans at 1 MP", "PNG chunks", "JPEG segments", "GIF blocks"],
)
def test_hostile_file_is_refused_in_little_time_and_memory(make: Callable[[], bytes], reason: str) -> None:
    data = make()
    reset_peak_memory()
    before, started = peak_memory(), time.perf_counter()
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert caught.value.reason == reason
    assert time.perf_counter() - started < 0.5
    assert peak_memory() - before < 64 * MIB


def test_scans_are_limited_by_the_pixels() -> None:
    assert decode(jpeg_of_scans(1000, 100)).size == (1000, 1000)
    with pytest.raises(ImageError, match=r"11 scans; the limit at 7000 x 7000 pixels is 10\. Save it again"):
        decode(jpeg_of_scans(7000, 11))


def test_photo_with_many_scans_keeps_no_small_one_waiting() -> None:
    slow, small = jpeg_of_scans(1500, 60), jpeg_of_scans(100, 1)
    budget, entered = ByteBudget(1 << 30, max_holders=2, small=1 << 28), threading.Event()

    def work(data: bytes) -> None:
        with hold_memory(budget, data):
            entered.set()

    threads = [threading.Thread(target=work, args=(data,)) for data in (slow, small)]
    with hold_memory(budget, slow):
        threads[0].start()
        assert not entered.wait(0.2), "two of them would take all places"
        threads[1].start()
        assert entered.wait(10)
    for thread in threads:
        thread.join(10)


def test_large_run_length_encoded_bmp_is_refused() -> None:
    header = struct.pack("<IiiHHIIiiII", 40, 1000, 1000, 1, 8, 1, 0, 0, 0, 256, 0)
    bmp = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + header + bytes(1024)
    assert decode(bmp + (b"\xff\1" * 3 + b"\xeb\1\0\0") * 1000).size == (1000, 1000)
    with pytest.raises(ImageError, match="the limit with run-length encoding is 1,000,000"):
        decode(bmp + b"\1\1" * 1_000_000)


def test_cost_of_a_large_jpeg_follows_the_scale_that_it_is_decoded_at() -> None:
    data = encode(Image.new("RGB", (4000, 3000)), "JPEG")
    assert decode_cost(data) > 4 * 4000 * 3000
    assert decode_cost(data, side=256) < decode_cost(data) / 8
    progressive = encode(Image.new("RGB", (4000, 3000)), "JPEG", progressive=True)
    assert decode_cost(progressive, side=256) > 3 * 4000 * 3000, "all coefficients are held in memory"


def test_image_that_exceeds_the_whole_budget_is_refused() -> None:
    data = encode(Image.new("RGB", (1000, 1000)), "WEBP")
    cost = decode_cost(data)
    with pytest.raises(ImageError, match=f"takes {cost:,} bytes of memory; the limit is {cost - 1:,}") as caught:
        hold_memory(ByteBudget(cost - 1), data).__enter__()
    assert caught.value.reason == "too_many_pixels"
    with hold_memory(ByteBudget(cost), data):
        assert decode(data).size == (1000, 1000)


def test_second_image_waits_for_the_memory_of_the_first() -> None:
    data = encode(Image.new("RGB", (1000, 1000)), "PNG")
    budget, entered = ByteBudget(int(1.5 * decode_cost(data))), threading.Event()

    def work() -> None:
        with hold_memory(budget, data):
            entered.set()

    thread = threading.Thread(target=work)
    with hold_memory(budget, data):
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join(10)


MEASURE = """
import sys
from tests.support.memory import peak_memory
from index.embedding.images import Preprocessing, decode_cost, decode_for_model, model_side, thumbnail
rule = Preprocessing(resize=256, input_size=224)
def run(data):
    picture, part = decode_for_model(rule, data)
    rule.apply(picture, part)
    thumbnail(picture)
run(open(sys.argv[1], "rb").read())
before = peak_memory()
data = open(sys.argv[2], "rb").read()
cost = decode_cost(data, side=model_side(rule))
assert peak_memory() - before < len(data) + 8 * 2**20, "the estimate itself takes memory"
run(data)
print(peak_memory() - before, cost)
"""


def tiff(size: tuple[int, int], samples: int, depth: int, rows: int) -> bytes:
    """Returns a black TIFF that is to be rotated, made without the memory for its pixels."""
    width, height = size
    strip = zlib.compress(bytes(width * samples * depth // 8 * rows), 1)
    last = zlib.compress(bytes(width * samples * depth // 8 * (height - rows * (-(-height // rows) - 1))), 1)
    tags = grey_tags(width, height, t258=[depth] * samples, t277=[samples], t262=[2 if samples > 1 else 1])
    tags |= {259: [8], 274: [6], 278: [rows], **({338: [2]} if samples == 4 else {})}
    return write_tiff(tags, [strip] * (-(-height // rows) - 1) + [last])


HUGE: dict[str, Callable[[], bytes]] = {
    "WebP of 38 bytes": lambda: webp_lossless(SIDE, SIDE),
    "WebP with opacity": lambda: encode(Image.new("RGBA", (SIDE, SIDE), (200, 9, 9, 99)), "WEBP"),
    "16-bit grey PNG": lambda: png(SIDE, SIDE, 16, 0),
    "RGBA PNG": lambda: png(SIDE, SIDE, 8, 6),
    "16-bit RGBA PNG": lambda: png(SIDE, SIDE, 16, 6),
    "wide RGBA PNG": lambda: png(20_000, 2_499, 8, 6),
    "tall grey PNG": lambda: png(2_499, 20_000, 8, 0),
    "1-bit PNG": lambda: png(SIDE, SIDE, 1, 0),
    "RGB PNG": lambda: png(SIDE, SIDE, 8, 2),
    "progressive JPEG": lambda: encode(Image.new("RGB", (SIDE, SIDE)), "JPEG", progressive=True, subsampling=0),
    "GIF": lambda: encode(Image.new("P", (SIDE, SIDE)), "GIF", transparency=0),
    "AVIF with opacity": lambda: encode(
        Image.new("RGBA", (SIDE, SIDE), (200, 9, 9, 99)), "AVIF", speed=10, subsampling="4:4:4"
    ),
    "TIFF in strips": lambda: tiff((SIDE, SIDE), 3, 8, rows=8),
    "TIFF of one strip": lambda: tiff((SIDE, SIDE), 3, 8, rows=SIDE),
    "16-bit RGBA TIFF": lambda: tiff((SIDE, SIDE), 4, 16, rows=SIDE),
    "grey TIFF": lambda: tiff((SIDE, SIDE), 1, 8, rows=SIDE),
    "16-bit grey TIFF": lambda: tiff((SIDE, SIDE), 1, 16, rows=SIDE),
    "tall TIFF": lambda: tiff((2_499, 20_000), 3, 8, rows=1),
    "uncompressed TIFF": lambda: encode(Image.new("RGB", (2600, 2600)), "TIFF"),
    "JPEG in a TIFF": lambda: encode(Image.new("RGB", (SIDE, SIDE)), "TIFF", compression="jpeg"),
}


@pytest.mark.slow
@ON_LINUX
@pytest.mark.parametrize("kind", HUGE)
def test_estimate_is_an_upper_bound_within_twice_the_peak(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("photos")
    (folder / "small").write_bytes(encode(Image.new("RGBA", (300, 300)), "PNG"))
    (folder / "huge").write_bytes(HUGE[kind]())
    command = [sys.executable, "-c", MEASURE, str(folder / "small"), str(folder / "huge")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    peak, cost = map(int, output.split())
    assert peak <= cost <= 2.2 * peak


IN_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from index.embedding.images import decode, decode_cost
from tests.support.memory import peak_memory
from threading import Barrier, Lock
data, lock, together = open(sys.argv[1], "rb").read(), Lock(), Barrier(8)
before = peak_memory()
def work(_):
    together.wait()
    with lock:
        decode(data)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
print(peak_memory() - before, decode_cost(data))
"""


@pytest.mark.slow
@ON_LINUX
def test_threads_keep_little_memory_of_a_photo_that_was_decoded(tmp_path: Path) -> None:
    (tmp_path / "huge").write_bytes(webp_lossless(SIDE, SIDE))
    command = [sys.executable, "-c", IN_THREADS, str(tmp_path / "huge")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    peak, cost = map(int, output.split())
    assert peak <= cost + 8 * 24 * MIB, "a thread may keep the smaller blocks"
