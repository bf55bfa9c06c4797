"""Practises failures with real photos: PostgreSQL, three nodes of Qdrant and two replicas, searched and written to.

Two clients search and two write all the time. Each write is followed by a search for its photo on the other replica.
After no response, 429 or 503 they repeat the request on the other replica. Meanwhile a replica and a node are killed
and started again, and PostgreSQL is killed. Then nothing that was acknowledged may be missing, and a copy in a folder
must return the same answers. Prints what happened; ends with an error if a promise was broken.

The photos of the catalogue and those that clients write come from one folder, such as the Grocery Store Dataset.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from index.gallery import open_gallery
from index.gallery.filters import Filter

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers and the clients are those of the tests
from service.client import Client
from tests.support.postgres import run_postgres
from tests.support.qdrant import run_cluster
from tests.support.replicas import run_replicas
from tests.support.shoppers import CATALOGUE, Record, find_lost, shopping, wait_for

OPTIONS = "?min_pending=100&max_age=10"
"""Changes are applied soon, so that it happens during the drill."""
WRITTEN_SHARE = 3
"""One in so many photos is written by the clients, the others are the catalogue."""
CLIENTS, QUERIES, TOP = 4, 31, 10
COMPARED = 277
"""Photos whose answers the gallery and its copy must share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="folder of JPEG files, at any depth")
    parser.add_argument("--bundle", type=Path, required=True, help="the bundle that embeds them")
    parser.add_argument("--seconds", type=float, default=40, help="length of each phase (default: 40)")
    arguments = parser.parse_args()
    photos = sorted(arguments.photos.rglob("*.jpg"))
    random.Random(0).shuffle(photos)
    with tempfile.TemporaryDirectory(prefix="lookalike-drill-") as folder:
        run_drill(photos, arguments.bundle.resolve(), Path(folder), arguments.seconds)


def run_drill(photos: list[Path], bundle: Path, folder: Path, seconds: float) -> None:
    written, catalogue = photos[::WRITTEN_SHARE], [path for n, path in enumerate(photos) if n % WRITTEN_SHARE]
    with ExitStack() as stack:
        postgres = stack.enter_context(run_postgres(durable=True))
        cluster = stack.enter_context(run_cluster(folder / "qdrant"))
        gallery = f"{postgres.url()} {cluster.address('shop', OPTIONS)}"
        table = write_table(catalogue, folder / "catalogue.csv")
        os.environ["LOOKALIKE_CACHE"] = str(folder / "commands")
        run("reindex", table, "--images", "/", "--gallery", gallery, "--bundle", bundle)
        replicas = stack.enter_context(run_replicas(gallery, folder / "replicas"))
        addresses = [replica.address for replica in replicas]
        queries = [path.read_bytes() for path in catalogue[:QUERIES]]

        def photo(number: int) -> bytes:
            client, own = divmod(number, 1_000_000)
            return written[(own * CLIENTS + client) % len(written)].read_bytes()

        print_row("phase", "seconds", "searches", "after writes", "stale", "writes", "no response", "refused")
        print_row(*["---"] * 8)
        with shopping(addresses, queries, CLIENTS, photo) as record:
            record.may_write.set()
            phase = Phase(record)
            time.sleep(seconds)
            phase.end("all run")
            replicas[1].kill()
            cluster.nodes[1].kill()
            time.sleep(seconds)
            phase.end("a replica and a node are dead")
            replicas[1].start()
            cluster.nodes[1].start()
            cluster.nodes[1].wait()
            replicas[1].wait()
            postgres.stop(signal.SIGQUIT)
            time.sleep(6)
            postgres.start()
            wait_for(record, "write", 1)
            time.sleep(seconds)
            phase.end("both start, then PostgreSQL is killed and starts")
        print(f"\nslowest request with its repetitions: {record.slowest:.1f} s")
        assert not record.problems, record.problems
        check_answers(record, [str(path) for path in catalogue[:QUERIES]])
        for address in addresses:
            assert find_lost(address, record) == []
        print(f"{len(record.stored)} written items are found, {len(record.deleted)} deleted ones are not")
        run("gallery", "verify", gallery)
        run("gallery", "copy", gallery, folder / "copy")
        run("gallery", "verify", folder / "copy")
        compare_copy(folder / "copy", addresses[0], bundle, [*catalogue, *written])


def write_table(catalogue: list[Path], path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "kind", "class"])
        for photo in catalogue:
            writer.writerow([photo, photo.resolve(), CATALOGUE["kind"], photo.parent.name])
    return path


def run(*arguments: str | Path) -> None:
    """Runs a command, which must succeed, and prints what it reports."""
    began = time.monotonic()
    command = [sys.executable, "-m", "lookalike", *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{' '.join(command[3:5])}, {time.monotonic() - began:.0f} s:", *ended.stdout.splitlines()[-2:], sep="\n  ")


class Phase:
    """Prints what the clients have counted since the end of the last phase."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._before = Counter(record.counts)
        self._began = time.monotonic()

    def end(self, name: str) -> None:
        now = Counter(self._record.counts)
        counts = now - self._before
        stale = counts["stale search"] + counts["stale check"]
        silent = sum(count for key, count in counts.items() if key.endswith(": no response"))
        refused = sum(count for key, count in counts.items() if ": " in key) - silent
        searches = counts["search"] + counts["check"]
        seconds = f"{time.monotonic() - self._began:.0f}"
        print_row(name, seconds, searches, counts["check"], stale, counts["write"], silent, refused)
        self._before, self._began = now, time.monotonic()


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def check_answers(record: Record, items: list[str]) -> None:
    """Checks that each query of the catalogue had one and the same answer in all phases, with its own item first."""
    for (_, query), answers in record.answers.items():
        assert len(answers) == 1, f"query {query} was answered differently: {answers}"
        (answer,) = answers
        assert answer[0][0] == items[query], f"query {query} does not find its own item: {answer}"
    print(f"{len(record.answers)} queries had one answer each")


def compare_copy(copy: Path, address: str, bundle: Path, photos: list[Path]) -> None:
    """Compares the answers of a copy in a folder with those of a replica."""
    loaded = Bundle.load(bundle)
    embedder = Embedder(loaded)
    asked = photos[:: max(1, len(photos) // COMPARED)]
    largest = 0.0
    with open_gallery(copy) as gallery, Client(address, timeout=60) as client:
        for path in asked:
            photo = path.read_bytes()
            vector = embedder.embed(load_pixels(photo, loaded.preprocessing)[None])
            for filter in ({}, {"class": path.parent.name}):
                hits = gallery.search(vector, bundle_id=loaded.id, top=TOP, filter=Filter.parse(filter)).hits[0]
                items = client.search(photo, limit=TOP, filter=filter).items
                assert [item.id for item in items] == [hit.item.id for hit in hits], f"{path} is answered differently"
                largest = max([largest, *np.abs(np.subtract([i.score for i in items], [h.score for h in hits]))])
    assert largest < 1e-3
    print(f"{2 * len(asked)} searches, half of them filtered, have the same items in the same order in the copy;")
    print(f"the scores differ by at most {largest:.6f}")


if __name__ == "__main__":
    main()
