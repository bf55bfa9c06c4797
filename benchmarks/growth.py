"""How the embedded engine grows with the number of vectors: build, files, memory, first answer, rate and recall.

Up to a million vectors a gallery is filled and compacted; beyond, a generation is built and opened without a store,
which takes hours to fill. Every size is built, and then searched, in a process of its own. The vectors and queries are
those of `gallery.py`. What an earlier run has finished is reused, with --dir.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _shop import TOP, Queries, Rows, Shop, faiss, plain_cases, synthetic_shop
from numpy.typing import NDArray

from index.gallery import open_gallery
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss.arrays import pack_texts
from index.gallery.vectors.faiss.columns import encode_columns
from index.gallery.vectors.faiss.generation import (
    Generation,
    Records,
    open_generation,
    pack,
    read_manifest,
    write_generation,
)
from index.gallery.vectors.faiss.index import GENERATIONS
from index.gallery.vectors.faiss.searcher import EXACT, AllowList, Searcher
from index.gallery.vectors.faiss.settings import IndexKind

FULL, QUICK = (512, [10_000, 100_000, 1_000_000, 4_000_000, 10_000_000]), (64, [2_000, 25_000])
"""Dimensions and counts of vectors."""
MAX_IN_STORE = 1_000_000
"""Number of vectors up to which a gallery is filled."""
BATCH = 256
QUERIES, TURNS = 400, 7
FILTERED_QUERIES = 40
SHARES = (0.01, 0.1, 0.5)
"""Shares of the vectors that random filters match."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few thousand small vectors: within a minute on 2 cores")
    parser.add_argument("--count", type=int, nargs="+", metavar="N", help="vectors (default: 10000 to 10 million)")
    parser.add_argument("--kind", choices=("exact", "hnsw", "ivf"), help="this kind of index, whatever the number")
    parser.add_argument("--dir", type=Path, help="keep vectors and indexes here, 5 kB per vector, and continue")
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl", help="append the measurements to FILE")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size, counts = QUICK if arguments.quick else FULL
    if arguments.role:
        [count] = arguments.count
        place = Place(arguments.dir, count, size, arguments.kind)
        print(json.dumps(ROLES[arguments.role](place)))
        return
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as temporary:
        folder = arguments.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [measure(Place(folder, count, size, arguments.kind)) for count in arguments.count or counts]
    if arguments.results:
        with arguments.results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print_rows(rows)


class Place:
    """The files of one number of vectors."""

    def __init__(self, folder: Path, count: int, size: int, kind: IndexKind | None) -> None:
        self.folder, self.count, self.size, self.kind = folder, count, size, kind
        self.in_store = count <= MAX_IN_STORE and kind is None
        name = f"{count}x{size}"
        self.vectors = folder / f"vectors-{name}.npy"
        self.truth = folder / f"truth-{name}.npz"
        self.index = folder / f"index-{name}-{kind or 'default'}"

    @property
    def generation(self) -> Path:
        [path] = (self.index / GENERATIONS).iterdir()
        return path

    def load(self) -> tuple[NDArray[np.float16], Queries, Rows, Rows]:
        """Returns the vectors, the queries, their true neighbours, and a number from 0 to 999 for each vector."""
        truth = np.load(self.truth)
        return np.load(self.vectors, mmap_mode="r"), truth["queries"], truth["neighbours"], truth["buckets"]


def measure(place: Place) -> dict[str, Any]:
    """Runs every role that is not finished, each in a process of its own."""
    row: dict[str, Any] = {"vectors": place.count, "dimension": place.size}
    for role in ROLES:
        record = place.index.with_suffix(f".{role}.json")
        if not record.is_file() or role == "search":
            command = [sys.executable, __file__, "--role", role, "--dir", place.folder, "--count", place.count]
            command += ["--kind", place.kind] if place.kind else []
            command += ["--quick"] if place.size == QUICK[0] else []
            record.write_bytes(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True).stdout)
        row |= json.loads(record.read_text(encoding="utf-8"))
        log(f"{place.count:,}: {role} done, {row}")
    return row


# Roles


def generate(place: Place) -> dict[str, Any]:
    """Writes the vectors, and queries with their true neighbours."""
    if not place.truth.exists():
        temporary = place.vectors.with_suffix(".tmp")
        shop = synthetic_shop(place.count, place.size, temporary)
        temporary.rename(place.vectors)
        cases = plain_cases(shop, QUERIES)
        queries = np.concatenate([case.query for case in cases]).astype(np.float32)
        np.savez(place.truth, queries=queries, neighbours=[case.truth for case in cases], buckets=shop.buckets)
    return {}


def build(place: Place) -> dict[str, Any]:
    """Builds the index from scratch."""
    shutil.rmtree(place.index, ignore_errors=True)
    place.index.mkdir()
    begin, used = time.perf_counter(), time.process_time()
    with anonymous_memory() as peak:
        if place.in_store:
            begin, used = fill(place)
        else:
            build_generation(place)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    plan = read_manifest(place.generation).plan
    return {
        "kind": plan.kind,
        "store": place.in_store,
        "build_seconds": seconds,
        "build_cpu_seconds": cpu,
        "build_anonymous_mib": peak(),
        "files_mib": sum(path.stat().st_size for path in place.generation.iterdir()) / 2**20,
        "effort": plan.effort,
        "built_recall": plan.recall,
    }


def fill(place: Place) -> tuple[float, float]:
    """Fills a gallery and compacts it; returns when the compaction began, in wall and in CPU seconds."""
    vectors, _, _, buckets = place.load()
    clusters = np.zeros(place.count, np.int64)
    shop = Shop(vectors, clusters, clusters, buckets, "synthetic")
    with closing(open_gallery(place.index, create=True)) as gallery:
        for start in range(0, place.count, BATCH):
            rows = range(start, min(start + BATCH, place.count))
            gallery.upsert(shop.entries(rows), shop.bundle_id)
        begin, used = time.perf_counter(), time.process_time()
        gallery.compact()
    return begin, used


def build_generation(place: Place) -> None:
    """Builds a generation of items with one image and one attribute each."""
    vectors, _, _, buckets = place.load()
    folder = place.index / GENERATIONS
    folder.mkdir()
    scratch = place.index / "scratch"
    built = builder.build(vectors, kind=place.kind, scratch=scratch, on_progress=log_progress)
    log(f"{place.count:,}: built, {built.plan}")
    records = make_records(place.count, buckets)
    write_generation(
        folder / "1",
        bundle_id="synthetic",
        dimension=place.size,
        revision=1,
        index=built.index,
        plan=built.plan,
        arrays=pack(records, built.order + 1),
    )
    scratch.unlink(missing_ok=True)


def make_records(count: int, buckets: Rows) -> Records:
    """Returns the records of items whose keys are row numbers from 1 on."""
    keys = np.arange(1, count + 1)
    attributes = [{"bucket": bucket} for bucket in range(int(buckets.max()) + 1)]
    texts = (f'["{row:08d}", "Product {row}", "", {{"bucket": {buckets[row]}}}]' for row in range(count))
    offsets, blob = pack_texts(texts)
    columns = encode_columns(attributes[bucket] for bucket in buckets)
    return Records(
        revision=1,
        keys=keys,
        revisions=np.ones(count, np.int64),
        owners=np.arange(count, dtype=np.int32),
        image_ids=["1"] * count,
        digests=np.zeros((count, 32), np.uint8),
        item_keys=keys,
        items={"items/offsets": offsets, "items/blob": blob, **columns},
    )


def search(place: Place) -> dict[str, Any]:
    """Opens the index in this process and searches it with one thread, in turns with exact scans of the same file."""
    _, queries, neighbours, buckets = place.load()
    faiss.omp_set_num_threads(1)
    generation, first = open_and_search(place, queries[:1])
    searcher = generation.searcher
    count = len(queries) if place.count > TOP else 1

    def run() -> list[NDArray[np.int64]]:
        return [searcher.search(queries[row : row + 1], TOP)[1][0] for row in range(count)]

    found = [generation.keys[positions] - 1 for positions in run()]
    memory = memory_mib()
    recall = np.mean([len(np.intersect1d(*pair)) / TOP for pair in zip(found, neighbours[:count], strict=True)])
    walls, cpus, scans = [], [], []
    for _ in range(TURNS):
        begin, used = time.perf_counter(), time.thread_time()
        run()
        walls.append(count / (time.perf_counter() - begin))
        cpus.append(count / (time.thread_time() - used))
        begin = time.thread_time()
        searcher.storage.search(queries[:1], TOP)
        scans.append(1 / (time.thread_time() - begin))
    return {
        "first_seconds": first,
        "memory_mib": memory["Pss"],
        "anonymous_mib": memory["Anonymous"],
        "recall": float(recall),
        "qps_wall_best": max(walls),
        "qps_wall_median": statistics.median(walls),
        "qps_cpu_median": statistics.median(cpus),
        "scan_qps_cpu_median": statistics.median(scans),
        **filtered(generation, queries, buckets),
    }


def open_and_search(place: Place, query: Queries) -> tuple[Generation, float]:
    """Returns the generation, and the seconds from the start of opening the gallery, or it, to the first hits."""
    begin = time.perf_counter()
    if place.in_store:
        with closing(open_gallery(place.index)) as gallery:
            stats = gallery.stats()
            assert stats.index.name
            hits = gallery.search(query, bundle_id=str(stats.bundle_id), top=TOP).hits[0]
            assert hits[0].item.id
            first = time.perf_counter() - begin
        generation, _ = open_generation(place.generation)
        return generation, first
    generation, _ = open_generation(place.generation)
    _, positions = generation.searcher.search(query, TOP)
    for position in positions[0].tolist():
        generation.item(int(generation.owners[position]))
    return generation, time.perf_counter() - begin


def filtered(generation: Generation, queries: Queries, buckets: Rows) -> dict[str, float]:
    """Returns recall and rate of searches among items that match at random."""
    measured = {}
    rows = generation.keys - 1
    for share in SHARES:
        allowed = AllowList(buckets[rows] < share * 1000)
        searcher = generation.searcher
        part = queries[:FILTERED_QUERIES]
        truth, _ = Searcher(searcher.storage, EXACT).search(part, TOP, allowed)
        searcher.search(part[:1], TOP, allowed, filtered=True)
        used = time.thread_time()
        scores = np.concatenate(
            [searcher.search(part[row : row + 1], TOP, allowed, filtered=True)[0] for row in range(len(part))]
        )
        measured[f"filtered_{share:g}_qps_cpu"] = len(part) / (time.thread_time() - used)
        measured[f"filtered_{share:g}_recall"] = float(np.mean(scores >= truth[:, -1:] - 1e-5))
    return measured


ROLES = {"generate": generate, "build": build, "search": search}


# Memory


@contextmanager
def anonymous_memory() -> Iterator[Any]:
    """Yields a function that returns the peak of this process's anonymous memory, in MiB, sampled every 0.2 s."""
    peak, ended = 0.0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.2):
            peak = max(peak, memory_mib()["Anonymous"])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        ended.set()
        thread.join()


def memory_mib() -> dict[str, float]:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines[1:])}


# Output


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the measurements as a Markdown table."""
    print("| vectors | index | build, CPU-s | build, memory | files | memory | first answer | searches/s | recall@10 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = (
            f"{row['vectors']:,}",
            row["kind"] + ("" if row["store"] else ", no store"),
            f"{row['build_cpu_seconds']:,.0f}",
            f"{row['build_anonymous_mib']:,.0f} MiB",
            f"{row['files_mib']:,.0f} MiB",
            f"{row['memory_mib']:,.0f} MiB",
            f"{row['first_seconds']:.2f} s",
            f"{row['qps_cpu_median']:,.0f}",
            f"{row['recall']:.3f}",
        )
        print(f"| {' | '.join(cells)} |")


def log_progress(done: int, total: int) -> None:
    log(f"{done:,} of {total:,}, {time.process_time():.0f} CPU-s, peak {resource_mib():,.0f} MiB")


def resource_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
