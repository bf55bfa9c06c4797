"""A shop on PostgreSQL with FAISS or Qdrant: real servers, commands, replicas and clients, and every failure at once.

Nothing that was acknowledged may be lost, no answer may be wrong, and a repetition must answer what failed.
"""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from index.gallery import open_gallery
from index.gallery.filters import Filter
from service.client import Client
from tests.end_to_end.test_reindexing import running
from tests.support.postgres import PostgresServer, run_postgres
from tests.support.processes import lookalike
from tests.support.qdrant import Cluster, only_in_test_cluster, run_cluster
from tests.support.replicas import Replica, run_replicas
from tests.support.shoppers import CATALOGUE, Record, find_lost, photo_of, shopping, wait_for
from tests.support.tiny_bundle import make_tiny_bundle

PHOTOS = 120
QUERIES = range(0, PHOTOS, 10)
OPTIONS = "?shards=3&replicas=2&apply_delay=3&min_pending=20&max_age=2&write_timeout=20"
"""Changes are applied soon, so that an applier works during the test."""


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with run_postgres(durable=True) as server:
        yield server


@pytest.fixture
def qdrant(tmp_path: Path) -> Iterator[Cluster]:
    with run_cluster(tmp_path / "qdrant") as cluster:
        yield cluster


def write_catalogue(folder: Path) -> Path:
    folder.mkdir()
    with (folder / "catalogue.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "kind", "colour"])
        for number in range(PHOTOS):
            (folder / f"{number}.png").write_bytes(photo_of(number))
            writer.writerow([f"item-{number}", f"{number}.png", CATALOGUE["kind"], ("red", "blue")[number % 2]])
    return folder / "catalogue.csv"


def run(*arguments: str | Path) -> str:
    """Runs a command that must succeed."""
    ended = lookalike(*arguments)
    assert ended.returncode == 0, f"{arguments[:2]}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def eventually(check: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def switch_bundles(gallery: str, table: Path, new: Path, record: Record) -> None:
    """Re-indexes with a new bundle during searches and writes; returns to the old one, and to the new one again."""
    job = (table, "--gallery", gallery, "--bundle", new, "--rejects", table.with_name("rejects.csv"))
    with running(*job) as process:
        wait_for(record, "search", 5)
        process.kill()
    record.may_write.set()  # the killed job's bundle counts as prepared: new items are embedded for it too
    wait_for(record, "write", 10)
    run("reindex", *job)
    wait_for(record, "search", 20)
    wait_for(record, "write", 5)
    record.pause_writes()  # what is stored now has vectors of the new bundle only
    for _ in range(2):
        run("gallery", "rollback", gallery)
        wait_for(record, "search", 20)
    record.may_write.set()


def check_answers(record: Record, bundles: set[str]) -> None:
    assert {bundle for bundle, _ in record.answers} == bundles
    for (bundle, query), answers in record.answers.items():
        assert len(answers) == 1, f"bundle {bundle} answered query {query} differently: {answers}"
        (answer,) = answers
        assert answer[0][0] == f"item-{QUERIES[query]}" and len(answer) == 5


def restart_postgres(server: PostgresServer, replicas: list[Replica], record: Record) -> None:
    """Ends PostgreSQL as a crash does; searches continue and report their age, writes are refused."""
    server.stop(signal.SIGQUIT)
    wait_for(record, "stale search", 3)
    wait_for(record, "write: 503 store-unavailable", 2)
    assert [replica.probe("/readyz")[0] for replica in replicas] == [200, 200]
    server.start()
    wait_for(record, "write", 5)


def kill_applier(replicas: list[Replica], record: Record) -> None:
    """Kills the process of a replica that applies changes to Qdrant; a later one continues."""
    eventually(lambda: any(replica.compactions() for replica in replicas), "no replica applies changes")
    for replica in replicas:
        for process in replica.compactions():
            os.kill(process, signal.SIGKILL)
    wait_for(record, "write", 3)


def kill_compaction(gallery: str, replica: Replica, record: Record) -> None:
    """Kills a compaction in the cache of a replica; the next one builds what the replica then opens."""
    command = [sys.executable, "-m", "lookalike", "gallery", "compact", gallery, "--rebuild"]
    environment = {**os.environ, "LOOKALIKE_CACHE": str(replica.cache)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        eventually(
            lambda: process.poll() is not None or bool(list(replica.cache.rglob(".*.lookalike-tmp"))), "it builds"
        )
        process.kill()
    wait_for(record, "write", 3)
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    wait_for(record, "write", 3)


def check_copy(gallery: str, folder: Path, address: str, bundle: Path) -> None:
    """Copies the gallery into a folder and compares the answers of both."""
    run("gallery", "copy", gallery, folder)
    run("gallery", "verify", folder)
    loaded = Bundle.load(bundle)
    embedder = Embedder(loaded, threads=1)
    with open_gallery(folder) as copy, Client(address, timeout=60) as client:
        for query in range(0, PHOTOS, 3):
            photo = photo_of(query)
            vector = embedder.embed(load_pixels(photo, loaded.preprocessing)[None])
            for filter in ({}, {"colour": "red"}):
                wanted = copy.search(vector, bundle_id=loaded.id, filter=Filter.parse(filter)).hits[0]
                found = client.search(photo, limit=10, filter=filter).items
                assert [hit.id for hit in found] == [hit.item.id for hit in wanted]
                assert np.allclose([hit.score for hit in found], [hit.score for hit in wanted], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss", pytest.param("qdrant", marks=only_in_test_cluster)])
def test_a_shop_on_several_machines_survives_what_happens_to_them(
    postgres: PostgresServer,
    tmp_path: Path,
    engine: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster: Cluster | None = request.getfixturevalue("qdrant") if engine == "qdrant" else None
    gallery = postgres.url() + (f" {cluster.address('shop', OPTIONS)}" if cluster else "")
    monkeypatch.setenv("LOOKALIKE_CACHE", str(tmp_path / "commands"))
    table = write_catalogue(tmp_path / "source")
    old, new = make_tiny_bundle(tmp_path / "old"), make_tiny_bundle(tmp_path / "new", grid=8)
    run("reindex", table, "--gallery", gallery, "--bundle", old, "--rejects", tmp_path / "rejects.csv")
    with run_replicas(gallery, tmp_path / "replicas") as replicas:
        addresses = [replica.address for replica in replicas]
        with shopping(addresses, [photo_of(query) for query in QUERIES]) as record:
            switch_bundles(gallery, table, new, record)
            replicas[1].kill()
            if cluster:
                cluster.nodes[1].kill()
            wait_for(record, "write", 10)
            replicas[1].start()
            restart_after_kill(replicas[1], cluster)
            restart_postgres(postgres, replicas, record)
            if cluster:
                kill_applier(replicas, record)
            else:
                kill_compaction(gallery, replicas[0], record)
            wait_for(record, "write", 10)
        assert record.problems == []
        check_answers(record, {Bundle.load(old).id, Bundle.load(new).id})
        print(dict(record.counts), f"slowest {record.slowest:.1f} s")
        for address in addresses:
            assert find_lost(address, record) == []
        run("gallery", "verify", gallery)
        check_copy(gallery, tmp_path / "copy", addresses[0], new)
        assert {replica.stop() for replica in replicas} <= {0, -signal.SIGTERM}


def restart_after_kill(replica: Replica, cluster: Cluster | None) -> None:
    if cluster:
        cluster.nodes[1].start()
        cluster.nodes[1].wait()
    replica.wait()
