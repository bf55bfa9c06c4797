"""A gallery in a folder, in PostgreSQL with FAISS, and in PostgreSQL with three nodes of Qdrant, with the same vectors.

All servers run on this machine, on loopback, so that the figures show what the engines cost, not what several machines
gain. The peer of Qdrant is its own client with the same collection, effort and payload. Searches return the ten nearest
of one query; contenders take turns, and medians are compared. Needs the extra `dev`, and `make .servers/qdrant`.
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _ours import BATCH, KINDS, SHARES, Ours
from _peers import Contender, measure_recall
from _shop import TOP, Case, Shop, filtered_cases, plain_cases, synthetic_shop
from _table import Row, make_row, print_table, write_json
from _timing import rates, search_turn

from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.vectors.qdrant.settings import QdrantSettings

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers are started as for the tests
from tests.support.postgres import PostgresServer, run_postgres
from tests.support.qdrant import Cluster, run_cluster

FULL, QUICK = (512, 100_000), (64, 5_000)
"""Dimension and count of vectors."""
EMBEDDED, REPLICAS, CLUSTER = "folder: SQLite + FAISS", "PostgreSQL + FAISS", "PostgreSQL + Qdrant"
RETRY_SECONDS, PATIENCE_SECONDS = 0.02, 60


class Effort(NamedTuple):
    """The size of the measurements."""

    queries: int
    filtered_queries: int
    rounds: int
    writes: int
    exact_up_to: int
    """Vectors that Qdrant compares without a graph."""


class RawQdrant:
    """The collection of a gallery, searched with Qdrant's own client: one per node, by turns, as the gallery does."""

    name = "Qdrant's client"

    def __init__(self, cluster: Cluster, collection: str, effort: int) -> None:
        from qdrant_client import QdrantClient, models

        self._models: Any = models
        self._clients: list[Any] = [
            QdrantClient(
                host="127.0.0.1", port=node.http, grpc_port=node.grpc, prefer_grpc=True, check_compatibility=False
            )
            for node in cluster.nodes
        ]
        self._turns = itertools.cycle(self._clients)
        self._collection = collection
        self._effort = effort

    def search(self, case: Case) -> Any:
        condition, effort = None, self._effort
        if case.choice:
            effort *= QdrantSettings().filtered_factor
            bounds = self._models.Range(gte=case.choice.low, lt=case.choice.high)
            condition = self._models.Filter(
                must=[self._models.FieldCondition(key=f"n.{case.choice.attribute}", range=bounds)]
            )
        return next(self._turns).query_points(
            self._collection,
            query=case.query[0],
            limit=TOP,
            query_filter=condition,
            search_params=self._models.SearchParams(hnsw_ef=effort or None, exact=not effort),
            with_payload=["i", "r"],
        )

    def rows(self, result: Any) -> list[int]:
        return [point.id - 1 for point in result.points]  # images were stored in the order of the rows

    def close(self) -> None:
        for client in self._clients:
            client.close()


class Place(NamedTuple):
    """Where one of the galleries is."""

    name: str
    address: str
    caches: tuple[Path, Path]
    """The cache folders of two replicas."""

    def open(self, replica: int = 0, *, create: bool = False) -> Gallery:
        return open_gallery(self.address, create=create, cache=self.caches[replica])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few small vectors: within two minutes on 2 cores")
    parser.add_argument("--count", type=int, metavar="N", help=f"vectors (default: {FULL[1]})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    random.seed(0)
    size, count = QUICK if arguments.quick else FULL
    effort = Effort(100, 20, 3, 20, 1000) if arguments.quick else Effort(500, 50, 5, 200, 20_000)
    shop = synthetic_shop(arguments.count or count, size)
    with open_places(effort) as (places, postgres, cluster):
        rows = compare(shop, places, postgres, cluster, effort)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


@contextmanager
def open_places(effort: Effort) -> Iterator[tuple[list[Place], PostgresServer, Cluster]]:
    """Starts the servers; PostgreSQL writes to disk as it does in production."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookalike-bench-")))
        postgres = stack.enter_context(run_postgres(durable=True))
        cluster = stack.enter_context(run_cluster(folder / "qdrant"))
        nodes = cluster.address("bench", f"?shards=3&replicas=2&exact_up_to={effort.exact_up_to}")
        addresses = {
            EMBEDDED: str(folder / "gallery"),
            REPLICAS: f"{postgres.url()}?schema=faiss",
            CLUSTER: f"{postgres.url()}?schema=qdrant {nodes}",
        }
        places = [
            Place(name, address, (folder / f"{number}-a", folder / f"{number}-b"))
            for number, (name, address) in enumerate(addresses.items())
        ]
        yield places, postgres, cluster


def compare(
    shop: Shop, places: Sequence[Place], postgres: PostgresServer, cluster: Cluster, effort: Effort
) -> list[Row]:
    label = f"{len(shop.vectors):,} x {shop.vectors.shape[1]}"
    rows = build_rows(shop, places, label)
    with ExitStack() as stack:
        galleries = [stack.enter_context(place.open()) for place in places]
        found = galleries[-1].stats().index
        raw = RawQdrant(cluster, str(found.name).partition("@")[0], found.effort or 0)
        stack.callback(raw.close)
        contenders = [
            Ours(gallery, shop.bundle_id, place.name) for gallery, place in zip(galleries, places, strict=True)
        ]
        rows += search_rows(contenders, raw, shop, effort, label)
        others = [stack.enter_context(place.open(1)) for place in places]
        rows += freshness_rows(shop, galleries, others, places, effort, label)
    return rows + recovery_rows(shop, places, postgres, cluster, label)


def build_rows(shop: Shop, places: Sequence[Place], label: str) -> list[Row]:
    """Measures writes and builds; blocks of writes take turns."""
    upserts, builds = dict.fromkeys(places, 0.0), {}
    starts = range(0, len(shop.vectors), BATCH)
    with ExitStack() as stack:
        galleries = {place: stack.enter_context(place.open(create=True)) for place in places}
        for start in starts:
            entries = list(shop.entries(range(start, min(start + BATCH, len(shop.vectors)))))
            for place in random.sample(places, len(places)):
                begin = time.perf_counter()
                galleries[place].upsert(entries, shop.bundle_id)
                upserts[place] += time.perf_counter() - begin
        for place in places:
            begin = time.perf_counter()
            galleries[place].activate(shop.bundle_id)
            builds[place] = time.perf_counter() - begin
    pace = {place: len(shop.vectors) / seconds for place, seconds in upserts.items()}
    first = places[0]
    return [
        make_row(f"{name}, {label}: {place.name}", values[place], first.name, values[first], unit)
        for name, values, unit in (
            (f"upserts in batches of {BATCH}", pace, "items/s"),
            ("build and activation", builds, "s"),
        )
        for place in places[1:]
    ]


def search_rows(contenders: Sequence[Ours], raw: RawQdrant, shop: Shop, effort: Effort, label: str) -> list[Row]:
    cases = plain_cases(shop, effort.queries)
    rows = _rate_rows(f"search, {label}", contenders, raw, cases, effort.rounds)
    lowest = dict.fromkeys([one.name for one in contenders], 1.0)
    for kind in KINDS:
        for share in SHARES[: len(SHARES) if kind == "random" else -1]:
            filtered = filtered_cases(shop, kind, share, effort.filtered_queries)
            for one in contenders:
                lowest[one.name] = min(lowest[one.name], measure_recall(one, filtered))
    filtered = filtered_cases(shop, "random", 0.1, effort.filtered_queries)
    rows += _rate_rows(f"search with a filter of 10 %, {label}", contenders, raw, filtered, effort.rounds)
    return rows + [
        make_row(
            f"filtered, lowest recall@{TOP} of 13 kinds, {label}: {name}", value, "exact", 1.0, "recall", at_least=0.99
        )
        for name, value in lowest.items()
    ]


def _rate_rows(name: str, contenders: Sequence[Ours], raw: RawQdrant, cases: Sequence[Case], rounds: int) -> list[Row]:
    everyone: list[Contender] = [*contenders, raw]
    recalls = {one.name: measure_recall(one, cases) for one in everyone}
    qps = rates({one.name: search_turn(one, cases) for one in everyone}, len(cases), rounds)
    first, last = contenders[0].name, contenders[-1].name
    peer = f"{raw.name}, recall {recalls[raw.name]:.4f}"
    return [
        *(
            make_row(f"{name}, recall {recalls[one.name]:.4f}: {one.name}", qps[one.name], first, qps[first], "QPS")
            for one in contenders[1:]
        ),
        make_row(f"{name}: {last}", qps[last], peer, qps[raw.name], "QPS", at_least=0.8),
    ]


def freshness_rows(
    shop: Shop,
    galleries: Sequence[Gallery],
    others: Sequence[Gallery],
    places: Sequence[Place],
    effort: Effort,
    label: str,
) -> list[Row]:
    """Measures the first search of another handle after each write, which must find what was written."""
    pairs = list(zip(places, galleries, others, strict=True))
    seconds: dict[str, list[float]] = {place.name: [] for place in places}
    count, misses = len(shop.vectors), 0
    for _, _, other in pairs:
        other.search(shop.vectors[:1].astype("f4"), bundle_id=shop.bundle_id, top=1)
    for number in range(effort.writes):
        [entry] = shop.entries([number], first=count)
        for place, gallery, other in random.sample(pairs, len(pairs)):
            gallery.upsert([entry], shop.bundle_id)
            begin = time.perf_counter()
            hits = other.search(shop.vectors[number : number + 1].astype("f4"), bundle_id=shop.bundle_id, top=TOP).hits[
                0
            ]
            seconds[place.name].append(time.perf_counter() - begin)
            misses += entry[0].id not in {hit.item.id for hit in hits}
    if misses:
        raise SystemExit(f"{misses} of {effort.writes * len(pairs)} writes were not found by the next search.")
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    first = places[0].name
    name = f"first search of another replica after a write, none of {effort.writes} missed, {label}"
    return [make_row(f"{name}: {place.name}", medians[place.name], first, medians[first], "ms") for place in places[1:]]


def recovery_rows(
    shop: Shop, places: Sequence[Place], postgres: PostgresServer, cluster: Cluster, label: str
) -> list[Row]:
    """Measures how long searches and writes fail after a server was killed, and how soon a new replica answers."""
    query = shop.vectors[:1].astype("f4")
    ready = {}
    for place in places:
        begin = time.perf_counter()
        with closing(open_gallery(place.address, cache=place.caches[0])) as gallery:
            gallery.search(query, bundle_id=shop.bundle_id, top=TOP)
        ready[place.name] = time.perf_counter() - begin
    first, last = places[0].name, places[-1]
    rows = [
        make_row(
            f"open and first search of a replica, {label}: {place.name}", ready[place.name], first, ready[first], "s"
        )
        for place in places[1:]
    ]
    with closing(last.open()) as gallery:
        gallery.search(query, bundle_id=shop.bundle_id, top=TOP)
        cluster.nodes[1].kill()
        begin = time.perf_counter()
        slowest = max(_timed_search(gallery, query, shop.bundle_id) for _ in range(100))
        rows.append(
            make_row("slowest of 100 searches after one node of three was killed", slowest, "limit", 10, "s", at_most=1)
        )
        seconds = _wait_for_write(gallery, shop)
        rows.append(make_row("first write after that", seconds, "limit", 10, "s", at_most=1))
        cluster.nodes[1].start()
        cluster.nodes[1].wait()
        postgres.stop()
        begin = time.perf_counter()
        _timed_search(gallery, query, shop.bundle_id)  # continues with what was last read
        postgres.start()
        _wait_for_write(gallery, shop)
        rows.append(
            make_row(
                "from the end of PostgreSQL to the next write, its restart included",
                time.perf_counter() - begin,
                "limit",
                10,
                "s",
                at_most=1,
            )
        )
    return rows


def _timed_search(gallery: Gallery, query: Any, bundle_id: str) -> float:
    begin = time.perf_counter()
    assert gallery.search(query, bundle_id=bundle_id, top=TOP).hits[0]
    return time.perf_counter() - begin


def _wait_for_write(gallery: Gallery, shop: Shop) -> float:
    """Repeats a write until it is accepted; returns the seconds."""
    begin = time.perf_counter()
    while True:
        try:
            gallery.upsert(list(shop.entries([0], first=2 * len(shop.vectors))), shop.bundle_id)
            return time.perf_counter() - begin
        except LookalikeError:
            if time.perf_counter() - begin > PATIENCE_SECONDS:
                raise
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main()
