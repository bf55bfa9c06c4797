"""Searches, writes, memory and files of a gallery against raw FAISS, hnswlib, usearch and a Milvus server.

The vectors are synthetic, in nested clusters, or real embeddings from a file; queries are stored vectors with noise.
A search returns the ten nearest of one query. Contenders take turns in one process, with one thread per query, and
medians are compared. Recall is against exact search; peers are tuned to reach the recall of the gallery.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _ours import BATCH, KINDS, PAGE, RANKINGS, SHARES, Ours
from _peers import Contender, Hnswlib, Milvus, Peer, RawFaiss, Usearch, measure_recall, tune_to_recall
from _shop import (
    BUCKETS,
    TAGGED_WIDTHS,
    TOP,
    Case,
    Choice,
    Shop,
    embedded_shop,
    faiss,
    filtered_cases,
    plain_cases,
    synthetic_shop,
    tagged_cases,
)
from _table import Row, make_row, print_table, write_json
from _timing import THREADS, Process, latencies, rates, search_turn

from index.gallery import Gallery, open_gallery
from index.gallery.vectors.faiss.arrays import open_arrays
from index.gallery.vectors.faiss.generation import INDEX_FILE, RECORDS_FILE
from index.gallery.vectors.faiss.index import GENERATIONS
from index.rankings import Ranking

FULL, QUICK = (512, [100_000, 1_000_000]), (64, [25_000])
"""Dimensions and counts of vectors."""
MAX_PEER_VECTORS = 100_000
"""Number of vectors up to which every peer builds its own index: more take hours."""
WRITES, PAUSE = 8, 0.5
"""Number of batches written during searches, and the seconds from one to the next."""


class Effort(NamedTuple):
    """The size of the measurements."""

    queries: int
    filtered_queries: int
    rounds: int
    quiet_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few small vectors, no server: within a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--count", type=int, nargs="+", metavar="N", help="vectors (default: 100000 1000000)")
    parser.add_argument("--embeddings", type=Path, metavar="FILE.npy", help="real vectors instead of synthetic ones")
    parser.add_argument("--dir", type=Path, help="keep the galleries here and reuse existing ones")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(*arguments.read)
    elif arguments.write:
        write(*arguments.write)
    else:
        random.seed(0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and temporary copies are removed
        with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as temporary:
            rows = compare(arguments, arguments.dir or Path(temporary))
        print_table(rows)
        if arguments.json:
            write_json(rows, arguments.json)


def compare(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    size, counts = QUICK if arguments.quick else FULL
    effort = Effort(300, 40, 3, 1.0) if arguments.quick else Effort(1000, 100, 5, 5.0)
    rows = []
    for count in arguments.count or counts:
        file = arguments.embeddings
        shop = embedded_shop(file, count) if file else synthetic_shop(count, size)
        place = folder / f"{shop.source}-{len(shop.vectors)}x{shop.vectors.shape[1]}"
        rows += Benchmark(shop, place, effort, quick=arguments.quick).rows()
    return rows


class Benchmark:
    """All measurements of one set of vectors."""

    def __init__(self, shop: Shop, folder: Path, effort: Effort, *, quick: bool) -> None:
        self._shop, self._effort, self._quick = shop, effort, quick
        self._address = folder / "gallery"
        self._record = folder / "built.json"
        self._size = f"{len(shop.vectors):,} x {shop.vectors.shape[1]}"

    def rows(self) -> list[Row]:
        built = self._build()
        cases = plain_cases(self._shop, self._effort.queries)
        rows = [
            make_row(
                f"upserts in batches of {BATCH}, {self._size}", built["upserts"], "limit", 2000, "items/s",
                **self._target(at_least=1),
            ),
            *self._reader_rows(cases),
        ]  # fmt: skip
        with closing(open_gallery(self._address)) as gallery:
            self._check(gallery)
            ours = Ours(gallery, self._shop.bundle_id)
            with self._peers() as (raw, others):
                peers = [raw, *others]
                rows += self._build_rows(built, raw)
                rows += self._search_rows(ours, peers, cases)
                rows += self._filtered_rows(ours, peers)
            rows += self._list_rows(ours)
            rows.append(self._new_filter_row(ours, cases))
            rows += self._ranked_rows(ours, cases)
        return rows + self._busy_rows(cases)

    def _check(self, gallery: Gallery) -> None:
        """Fails if the gallery is searched exactly, because its generation is missing or damaged."""
        stats = gallery.stats()
        if stats.index.kind != "hnsw" or stats.index.pending or stats.images != len(self._shop.vectors):
            raise SystemExit(f"{self._address} has no HNSW index of all vectors: remove it ({stats}).")

    def _target(self, **bound: float) -> dict[str, float]:
        """Returns the target of a row; none in the quick form, which is too small to measure speed or size."""
        return {} if self._quick else bound

    # Build

    def _build(self) -> dict[str, float]:
        """Builds the gallery, or reuses that of an earlier run; returns how fast it was built."""
        if not self._record.is_file():
            shutil.rmtree(self._address, ignore_errors=True)
            with closing(open_gallery(self._address, create=True)) as gallery:
                begin = time.perf_counter()
                count = len(self._shop.vectors)
                for start in range(0, count, BATCH):
                    rows = range(start, min(start + BATCH, count))
                    gallery.upsert(self._shop.entries(rows, tagged=True), self._shop.bundle_id)
                    if start // BATCH % 400 == 0:
                        log(f"{self._size}: {start:,} upserted, {time.perf_counter() - begin:.0f} s")
                upserted = time.perf_counter()
                gallery.compact()
                compacted = time.perf_counter()
                log(f"{self._size}: compacted in {compacted - upserted:.0f} s, {gallery.stats()}")
            record = {"upserts": count / (upserted - begin), "compaction": compacted - upserted}
            self._record.write_text(json.dumps(record), encoding="utf-8")
        built: dict[str, float] = json.loads(self._record.read_text(encoding="utf-8"))
        return built

    def _build_rows(self, built: dict[str, float], raw: RawFaiss) -> list[Row]:
        files = sum(path.stat().st_size for path in self._generation().iterdir())
        bare = faiss.serialize_index(raw.index).nbytes
        rows = [make_row(f"the generation's files, {self._size}", files / 2**20, raw.name, bare / 2**20, "MiB")]
        if raw.seconds:
            name = f"build of a generation, {self._size}"
            rows.append(make_row(name, built["compaction"], f"{raw.name}, add alone", raw.seconds, "s"))
        return rows

    @contextmanager
    def _peers(self) -> Iterator[tuple[RawFaiss, list[Peer]]]:
        """Builds raw FAISS and the other peers. A peer that is not installed is skipped."""
        file = self._generation() / INDEX_FILE
        peers: list[Peer] = []
        try:
            if len(self._shop.vectors) > MAX_PEER_VECTORS:
                # Images were stored in the order of the rows, so their keys are row numbers from 1.
                order = open_arrays(self._generation() / RECORDS_FILE)["keys"] - 1
                raw = RawFaiss(faiss.read_index(str(file)), "raw FAISS, the generation's own index", order=order)
            else:
                like = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
                raw = RawFaiss.build(self._shop, like, THREADS)
                for kind in (Hnswlib, Usearch) if self._quick else (Hnswlib, Usearch, Milvus):
                    try:
                        peers.append(kind(self._shop, THREADS))
                    except ImportError as error:
                        log(f"{kind.name} is skipped ({error}): pip install -e '.[bench]'")
                        continue
                    log(f"{self._size}: {kind.name} built in {peers[-1].seconds:.0f} s")
            faiss.omp_set_num_threads(1)
            yield raw, peers
        finally:
            faiss.omp_set_num_threads(THREADS)
            for peer in peers:
                peer.close()

    def _generation(self) -> Path:
        """Returns the folder of the only generation."""
        [folder] = (self._address / GENERATIONS).iterdir()
        return folder

    # A process that only searches

    def _reader_rows(self, cases: Sequence[Case]) -> list[Row]:
        """Measures start and memory of a new process, the only one that maps the files."""
        with tempfile.TemporaryDirectory() as folder:
            queries = Path(folder) / "queries.npy"
            np.save(queries, np.concatenate([case.query for case in cases]))
            runs = [start("--read", self._address, self._shop.bundle_id, queries).communicate()[0] for _ in range(3)]
        first, pss, anonymous = (statistics.median(column) for column in zip(*map(json.loads, runs), strict=True))
        file_size = sum(path.stat().st_size for path in self._generation().iterdir()) / 2**20
        # A small generation is smaller than the interpreter with its libraries, some 70 MiB.
        large = self._target(at_most=1.3) if len(self._shop.vectors) > MAX_PEER_VECTORS else {}
        return [
            make_row(
                f"open and first answer in a fresh process, {self._size}", first, "limit", 2.0, "s",
                **self._target(at_most=1),
            ),
            make_row(
                f"memory of a process after {len(cases):,} queries, {self._size}", pss, "the generation's files",
                file_size, "MiB", **large,
            ),
            make_row(f"of that, anonymous memory, {self._size}", anonymous, "the generation's files", file_size, "MiB"),
        ]  # fmt: skip

    # Search

    def _search_rows(self, ours: Ours, peers: Sequence[Peer], cases: Sequence[Case]) -> list[Row]:
        target = measure_recall(ours, cases)
        labels = {peer.name: f"{peer.name}, {tune_to_recall(peer, cases, target)}" for peer in peers}
        log(f"{self._size}: ours recall {target:.4f}, {labels}")
        rows = []
        with ThreadPoolExecutor(THREADS, initializer=partial(faiss.omp_set_num_threads, 1)) as pool:
            for threads in (1, THREADS):
                contenders: list[Contender] = [ours, *peers]
                turns = {one.name: search_turn(one, cases, pool if threads > 1 else None) for one in contenders}
                if threads == 1:
                    turns["items"] = lambda: [ours.rows(ours.search(case)) for case in cases]
                qps = rates(turns, len(cases), self._effort.rounds)
                name = f"search, {threads} {'threads' if threads > 1 else 'thread'}, {self._size}, recall {target:.4f}"
                for peer in peers:
                    bound = self._target(at_least=0.9) if peer is peers[0] else {}
                    rows.append(make_row(name, qps["ours"], labels[peer.name], qps[peer.name], "QPS", **bound))
                if threads == 1:
                    rows.append(make_row(f"{name}, items read", qps["items"], "hits alone", qps["ours"], "QPS"))
        return rows

    def _filtered_rows(self, ours: Ours, peers: Sequence[Peer]) -> list[Row]:
        rows, recalls = [], []
        for kind in KINDS:
            for share in SHARES:
                if share == 1 and kind != "random":
                    continue
                cases = filtered_cases(self._shop, kind, share, self._effort.filtered_queries)
                contenders: list[Contender] = [ours, *peers]
                recall_by = {one.name: measure_recall(one, cases) for one in contenders}
                measured = rates({one.name: search_turn(one, cases) for one in contenders}, len(cases), 3)
                name = f"filtered, {kind}, {share:.1%}, {self._size}"
                log(f"{name}: {recall_by}, {measured}")
                recalls.append(recall_by["ours"])
                rows.append(make_row(f"{name}, recall@{TOP}", recalls[-1], "exact", 1.0, "recall", at_least=0.99))
                for peer in peers:
                    label = f"{peer.name}, recall {recall_by[peer.name]:.3f}"
                    rows.append(make_row(name, measured["ours"], label, measured[peer.name], "QPS"))
        lowest = make_row(
            f"filtered, lowest recall@{TOP}, {self._size}", min(recalls), "exact", 1.0, "recall", at_least=0.99
        )
        return [*rows, lowest]

    def _list_rows(self, ours: Ours) -> list[Row]:
        """Compares filters on an attribute with several values with ranges that the same items match."""
        rows = []
        for width in TAGGED_WIDTHS[1:]:
            cases = tagged_cases(self._shop, width, self._effort.filtered_queries)
            ranges = [case._replace(choice=case.choice and replace(case.choice, tag=None)) for case in cases]
            name = f"filtered by one of several values, {width / BUCKETS:.1%}, {self._size}"
            recalls = measure_recall(ours, cases), measure_recall(ours, ranges)
            rows.append(make_row(f"{name}, recall@{TOP}", recalls[0], "a range", recalls[1], "recall", at_least=0.99))
            turns = {"list": search_turn(ours, cases), "range": search_turn(ours, ranges)}
            measured = rates(turns, len(cases), 3)
            rows.append(make_row(name, measured["list"], "a range", measured["range"], "QPS"))
        return rows

    def _new_filter_row(self, ours: Ours, cases: Sequence[Case]) -> Row:
        """Measures searches that each have a new filter, so that none is cached."""
        mask = np.ones(len(self._shop.vectors), np.bool_)
        few = cases[: self._effort.filtered_queries]
        known = Choice("bucket", 0, 10, mask)
        fresh = [case._replace(choice=Choice("bucket", low, low + 10, mask)) for low, case in enumerate(few)]
        turns = {"new": search_turn(ours, fresh), "known": search_turn(ours, [c._replace(choice=known) for c in few])}
        measured = rates(turns, len(few), 3)
        return make_row(
            f"filtered, 1 %, each a new filter, {self._size}", measured["new"], "the same one", measured["known"], "QPS"
        )

    def _ranked_rows(self, ours: Ours, cases: Sequence[Case]) -> list[Row]:
        """Measures searches with rules, each against the plain search for a page of the same size."""

        def run(ranking: Ranking | None) -> None:
            for case in cases:
                ours.read_page(case, ranking)

        turns = {name: partial(run, ranking) for name, ranking in (("plain", None), *RANKINGS.items())}
        measured = rates(turns, len(cases), self._effort.rounds)
        bound = self._target(at_least=0.5)
        return [
            make_row(
                f"{PAGE} items read, {_describe(name)}, {self._size}",
                measured[name],
                "plain",
                measured["plain"],
                "QPS",
                **bound,
            )
            for name in RANKINGS
        ]

    # Search during other work

    def _busy_rows(self, cases: Sequence[Case]) -> list[Row]:
        """Measures searches on a copy of the gallery while other processes write to it and compact it."""
        with tempfile.TemporaryDirectory(dir=self._address.parent) as folder:
            copy = Path(folder) / "gallery"
            shutil.copytree(self._address, copy)
            with closing(open_gallery(copy)) as gallery:
                ours = Ours(gallery, self._shop.bundle_id)
                latencies(ours, cases, seconds=self._effort.quiet_seconds / 4)
                quiet = latencies(ours, cases, seconds=self._effort.quiet_seconds)
                with start("--write", copy, self._shop.bundle_id) as writer:
                    writing = latencies(ours, cases, writer)
                    pace = float(writer.communicate()[0])  # a failed writer prints none
                pending = gallery.stats().index.pending
                before = latencies(ours, cases, seconds=self._effort.quiet_seconds)
                with subprocess.Popen(
                    [sys.executable, "-m", "lookalike", "gallery", "compact", copy], text=True
                ) as compactor:
                    compacting = latencies(ours, cases, compactor)
                # A large generation is verified in the background before searches use it.
                end = time.perf_counter() + 60
                while gallery.stats().index.pending and time.perf_counter() < end:
                    ours.search(cases[0])
                if compactor.returncode or gallery.stats().index.pending:
                    pending = gallery.stats().index.pending
                    raise SystemExit(f"The compaction ended with {compactor.returncode}; {pending} images are pending.")
        rows = []
        for work, busy, peer, still in (
            (f"while another process upserts {pace:.0f} items/s", writing, "quiet", quiet),
            (f"with {pending:,} changes pending", before, "none pending", quiet),
            ("while a compaction runs", compacting, f"quiet, {pending:,} pending", before),
        ):
            rows.append(make_row(f"search {work}, {self._size}", 1 / busy.mean(), peer, 1 / still.mean(), "QPS"))
            high, low = (1000 * float(np.percentile(values, 99)) for values in (busy, still))
            rows.append(make_row(f"p99 latency {work}, {self._size}", high, peer, low, "ms"))
        return rows


def _describe(name: str) -> str:
    ranking = RANKINGS[name]
    return name if ranking == Ranking(group_by=ranking.group_by) else f"{name}, window {ranking.window}"


# Roles of the other processes


def start(role: str, *arguments: object) -> Process:
    """Runs this file in another process and waits until it is ready."""
    command = [sys.executable, __file__, role, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{' '.join(command)} ended with {process.wait()}.")
    return process


def read(address: str, bundle_id: str, queries: str) -> None:
    """Prints the seconds until the first result, and the memory in MiB after all of them."""
    print("ready", flush=True)
    vectors = np.load(queries)
    begin = time.perf_counter()
    with closing(open_gallery(address)) as gallery:
        gallery.search(vectors[:1], bundle_id=bundle_id, top=TOP)
        first = time.perf_counter() - begin
        for row in range(1, len(vectors)):
            gallery.search(vectors[row : row + 1], bundle_id=bundle_id, top=TOP)
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    sizes = {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines[1:])}
    print(json.dumps([first, sizes["Pss"], sizes["Anonymous"]]))


def write(address: str, bundle_id: str) -> None:
    """Upserts batches at intervals; half of the items are new, and half get another vector."""
    with closing(open_gallery(address)) as gallery:
        stats = gallery.stats()
        assert stats.dimension
        shop = synthetic_shop(WRITES * BATCH, stats.dimension)
        print("ready", flush=True)
        first = time.perf_counter()
        for rows in np.random.default_rng(0).permutation(WRITES * BATCH).reshape(WRITES, BATCH).tolist():
            begin = time.perf_counter()
            gallery.upsert(shop.entries(rows, first=stats.items - WRITES * BATCH // 2), bundle_id)
            time.sleep(max(0.0, PAUSE - (time.perf_counter() - begin)))
    print(WRITES * BATCH / (time.perf_counter() - first))


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
