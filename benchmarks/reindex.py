"""Images per second and memory of a re-indexing job against the embedder alone, Lite0 at 224 pixels, on all cores.

The job reads, checks, decodes, embeds, makes thumbnails and writes a new gallery; the embedder alone decodes the same
files in threads and embeds them. Both alternate in one process, and medians are compared. The photos are those of the
sample shop, enlarged to about 100 KB with the grain of a camera, or the JPEGs of a folder. Peak memory is measured in
separate processes.
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from _table import Row, make_row, print_table, write_json
from embed import untrained_run
from numpy.typing import NDArray
from PIL import Image

from index._util.system import usable_cores
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import decode, load_pixels
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from index.jobs import JobRecord
from training.backbones import EmbeddingModel
from training.config import TrainingConfig
from training.data import DataSet, default_shop, shop_data
from training.data.sample_shop import write_shop
from training.export import export_run

ENLARGED = (640, 640)
PEAK = """
import re, sys
from pathlib import Path
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex

table, gallery, bundle = sys.argv[1:]
run_reindex(ReindexOptions(source=[table], gallery=gallery, bundle=bundle, rejects=gallery + ".rejects.csv"))
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000)
"""
"""A job without PyTorch. Not `getrusage`: its peak includes that of the parent process."""
TIMES = 4
"""Ratio of images of the two jobs whose memory is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few photos and turns: within a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="JPEGs to index, instead of the sample shop's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        rows = compare(Path(folder), arguments.photos, quick=arguments.quick)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(folder: Path, photos: Path | None, *, quick: bool) -> list[Row]:
    images, turns = (96, 2) if quick else (2400, 3)
    data = shop_data(write_shop(folder / "shop", products_per_family=3, photos_per_product=4) if quick else _shop())
    files = found(photos, images) if photos else enlarged(data, folder / "photos", images)
    config = TrainingConfig()
    model = EmbeddingModel(config.backbone, input_size=config.preprocessing.input_size).eval()
    bundle = export_run(untrained_run(folder / "run", config, model), folder / "bundle", data.test[:16])
    size = f"{len(files):,} JPEGs of {statistics.mean(file.stat().st_size for file in files) / 1000:.0f} KB"
    rows = [*speed_rows(folder, files, bundle, size, turns), memory_row(folder, files, bundle)]
    # With fewer images than a job reads ahead, this only shows that everything runs.
    return [replace(row, target="", holds=None) for row in rows] if quick else rows


def _shop() -> Path:
    return write_shop(default_shop())


def found(folder: Path, images: int) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder} has no JPEGs.")
    return files[:: max(1, len(files) // images)][:images]


def enlarged(data: DataSet, folder: Path, images: int) -> list[Path]:
    """Writes photos of the sample shop at a realistic size, each with its own grain, so that no two are equal."""
    folder.mkdir()
    photos = [photo.path for photo in (*data.train, *data.test)]
    rng = np.random.default_rng(0)
    files = []
    for number in range(images):
        picture = decode(photos[number % len(photos)].read_bytes()).resize(ENLARGED, Image.Resampling.BICUBIC)
        grain = rng.normal(0, 6, (*ENLARGED, 1)).astype(np.float32)
        files.append(folder / f"{number:05}.jpg")
        grained = np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(grained).save(files[-1], quality=85)
    return files


def speed_rows(folder: Path, files: Sequence[Path], bundle: Bundle, size: str, turns: int) -> list[Row]:
    """Measures a new gallery against the embedder alone, alternating; then the last gallery again, unchanged."""
    table = write_table(folder / "source.csv", files)
    embedder = Embedder(bundle)
    numbers = count()

    def index_new() -> None:
        record = job(table, folder / f"gallery-{next(numbers)}", bundle)
        assert record.embedded == len(files), record

    def embed_only() -> None:
        assert embed_files(embedder, files) == len(files)

    contenders: dict[str, Callable[[], None]] = {"job": index_new, "alone": embed_only}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name, contender in list(contenders.items())[:: 1 if turn % 2 else -1]:
            seconds[name].append(timed(contender))
    gallery = folder / f"gallery-{next(numbers) - 1}"

    def index_again() -> None:
        record = job(table, gallery, bundle)
        assert (record.embedded, record.unchanged) == (0, len(files)), record

    rates = {name: len(files) / statistics.median(times) for name, times in seconds.items()}
    unchanged = len(files) / statistics.median(timed(index_again) for _ in range(turns))
    return [
        make_row(f"job, {size}", rates["job"], "the embedder alone", rates["alone"], "images/s", at_least=0.9),
        make_row("the same source again, unchanged", unchanged, "the first job", rates["job"], "images/s", at_least=20),
    ]


def embed_files(embedder: Embedder, files: Sequence[Path]) -> int:
    """Decodes files in threads and embeds them in batches of 128, with the next batch being decoded meanwhile."""

    def load(file: Path) -> NDArray[np.uint8]:
        return load_pixels(file.read_bytes(), embedder.bundle.preprocessing)

    count, batches = 0, [files[start : start + 128] for start in range(0, len(files), 128)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        following = [pool.submit(load, file) for file in batches[0]]
        for number in range(len(batches)):
            current, following = following, [pool.submit(load, file) for file in (*batches, ())[number + 1]]
            count += len(embedder.embed(np.stack([future.result() for future in current])))
    return count


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def memory_row(folder: Path, files: Sequence[Path], bundle: Bundle) -> Row:
    """Compares the peak memory of two jobs: it must not grow with the source."""
    peaks = []
    for times in (1, TIMES):
        gallery = folder / f"memory-{times}"
        table = write_table(folder / f"memory-{times}.csv", files, times)
        command = [sys.executable, "-c", PEAK, table, gallery, bundle.directory]
        ended = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        peaks.append(float(ended.stdout))
        shutil.rmtree(gallery)
    name = f"peak memory of a job, {TIMES * len(files):,} images"
    return make_row(name, peaks[1], f"{len(files):,} images", peaks[0], "MB", at_most=1.1)


def write_table(path: Path, files: Sequence[Path], times: int = 1) -> Path:
    """Writes a table with two photos per item."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "title", "price"])
        for round_ in range(times):
            for number, photo in enumerate(files):
                writer.writerow([f"{round_}-{number // 2}", photo, f"Product {number // 2}", number / 4])
    return path


def job(table: Path, gallery: Path, bundle: Bundle) -> JobRecord:
    rejects = gallery.with_suffix(".rejects.csv")
    options = ReindexOptions(source=[str(table)], gallery=str(gallery), bundle=bundle.directory, rejects=rejects)
    return run_reindex(options)


if __name__ == "__main__":
    main()
