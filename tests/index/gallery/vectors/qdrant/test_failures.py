"""Nodes and appliers that are killed, on a cluster of the module's own: nothing is lost, and searches recover."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.errors import IndexUnavailable, StoreUnavailable
from tests.index.gallery.reference import BUNDLE, ReferenceGallery, index_stats, make_entries, wait_until
from tests.support.postgres import PostgresServer
from tests.support.qdrant import QUICK, Cluster, only_in_test_cluster, open_gallery_on, run_cluster
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow

ENTRIES = make_entries(160)
QUERY = ENTRIES[3][1][0].vector[None]
_APPLIER = """
import sys
from pathlib import Path
from tests.support.qdrant import QUICK, open_gallery_on
settings = QUICK.model_copy(update={"upload_batch": 4, "upload_threads": 1})
with open_gallery_on(sys.argv[1], Path(sys.argv[2]), settings=settings) as gallery:
    print("open", flush=True)
    gallery.compact(rebuild=sys.argv[3] == "rebuild")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def check(gallery: Gallery, reference: ReferenceGallery, top: int = 20) -> None:
    reference.check(gallery.search(QUERY, bundle_id=BUNDLE, top=top).hits[0], QUERY, top=top)


def test_searches_and_writes_continue_while_a_node_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    reference = ReferenceGallery(ENTRIES[:100])
    with open_gallery_on(cluster.address("one"), tmp_path / "gallery") as gallery:
        gallery.upsert(ENTRIES[:100], BUNDLE)
        gallery.activate(BUNDLE)
        killer = threading.Timer(0.5, cluster.nodes[1].kill)
        killer.start()
        for number in range(100, 130):
            gallery.upsert([ENTRIES[number]], BUNDLE)
            reference.upsert([ENTRIES[number]])
            check(gallery, reference)
            time.sleep(0.05)
        killer.join()
        gallery.compact()
        wait_until(lambda: index_stats(gallery).pending == 0)
        check(gallery, reference, top=200)
        cluster.nodes[1].start()
        cluster.nodes[1].wait()
        for _ in range(20):
            check(gallery, reference, top=200)


@only_in_test_cluster
def test_a_node_that_hung_serves_no_searches_before_it_knows_what_it_missed(tmp_path: Path) -> None:
    """It takes its own copies for complete, and answers at once."""
    reference = ReferenceGallery(ENTRIES[:100])
    settings = QUICK.model_copy(update={"write_timeout": 15})  # Qdrant gives a node up after ten seconds
    cluster = Cluster(tmp_path / "cluster")
    node = cluster.nodes[1]
    with TcpProxy(node.p2p_port) as others, ExitStack() as stack:
        stack.callback(cluster.stop)
        node.be_reached_at(others.port)
        cluster.start()
        folder, address = tmp_path / "gallery", cluster.address("cut")
        gallery, idle = (stack.enter_context(open_gallery_on(address, folder, settings=settings)) for _ in range(2))
        gallery.upsert(ENTRIES[:100], BUNDLE)
        gallery.activate(BUNDLE)
        for one in (gallery, idle):
            check(one, reference, top=200)
        node.pause()
        gallery.upsert(ENTRIES[100:], BUNDLE)
        reference.upsert(ENTRIES[100:])
        gone = [item.id for item, _ in ENTRIES[:40]]
        gallery.delete(gone)
        reference.delete(gone)
        gallery.compact()
        wait_until(lambda: index_stats(idle).pending == 0)
        others.hang()  # what it missed does not reach it during the test
        node.resume()
        time.sleep(2.5)  # a node that failed is asked again
        for _ in range(12):
            for one in (gallery, idle):
                check(one, reference, top=200)


@only_in_test_cluster
def test_searches_are_refused_while_no_node_answers_and_recover(cluster: Cluster, tmp_path: Path) -> None:
    reference = ReferenceGallery(ENTRIES[:50])
    with open_gallery_on(cluster.address("all"), tmp_path / "gallery") as gallery:
        gallery.upsert(ENTRIES[:50], BUNDLE)
        gallery.activate(BUNDLE)
        check(gallery, reference)
        for node in cluster.nodes:
            node.kill()
        messages = set()
        for _ in cluster.nodes:
            with pytest.raises(IndexUnavailable, match=r"Qdrant does not answer at 127.*Connection refused") as raised:
                gallery.search(QUERY, bundle_id=BUNDLE)
            messages.add(str(raised.value))
        assert len(messages) == 1, "one that repeats is logged once"
        gallery.upsert(ENTRIES[50:60], BUNDLE)
        reference.upsert(ENTRIES[50:60])
        with (
            open_gallery_on(cluster.address("all"), tmp_path / "gallery") as other,
            pytest.raises(IndexUnavailable, match="Start its nodes"),
        ):
            other.search(QUERY, bundle_id=BUNDLE)
        for node in cluster.nodes:
            node.start()
        for node in cluster.nodes:
            node.wait()
        deadline = time.monotonic() + 60
        while True:
            try:
                check(gallery, reference, top=100)
                break
            except IndexUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        gallery.compact()
        check(gallery, reference, top=100)


@only_in_test_cluster
def test_an_applier_that_is_killed_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    reference = ReferenceGallery(ENTRIES[:100])
    folder, address = tmp_path / "gallery", cluster.address("killed")
    with open_gallery_on(address, folder) as gallery:
        gallery.upsert(ENTRIES[:100], BUNDLE)
        gallery.activate(BUNDLE)
        killed = 0
        for turn in range(8):
            changed = make_entries(40, seed=10 + turn)
            gallery.upsert(changed, BUNDLE)
            reference.upsert(changed)
            gone = [item.id for item, _ in ENTRIES[40 + 5 * turn : 45 + 5 * turn]]
            gallery.delete(gone)
            reference.delete(gone)
            arguments = [address, str(folder), "rebuild" if turn % 3 == 2 else "apply"]
            process = subprocess.Popen([sys.executable, "-c", _APPLIER, *arguments], stdout=subprocess.PIPE)
            assert process.stdout and process.stdout.readline() == b"open\n"
            time.sleep(float(random.uniform(0.01, 0.5)))
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
            process.stdout.close()
            check(gallery, reference, top=200)
            with open_gallery_on(address, folder) as other:
                check(other, reference, top=200)
        assert killed
        gallery.compact()
        check(gallery, reference, top=200)
        assert gallery.verify() == []
        wait_until(lambda: index_stats(gallery).pending == 0)
        assert len(cluster.collections("killed")) <= 2, "what killed rebuilds left is removed by the next"


def test_an_applier_that_has_lost_its_lock_stops(
    cluster: Cluster, postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    address = f"{postgres_url} {cluster.address('lock', '?shards=3&replicas=2&apply_delay=4&write_timeout=20')}"
    with open_gallery(address, create=True, cache=tmp_path) as slow, open_gallery(address, cache=tmp_path) as other:
        slow.upsert(ENTRIES[:50], BUNDLE)
        slow.activate(BUNDLE)
        slow.upsert(ENTRIES[50:60], BUNDLE)
        with ThreadPoolExecutor(1) as threads:
            applying = threads.submit(slow.compact)
            held = "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted"
            wait_until(lambda: postgres.execute(f"SELECT 1 {held}") != [])
            time.sleep(1)  # it has read the changes, and waits for searches that began before
            # What a restart of the server, or a network that fails, does to the lock.
            postgres.execute(f"SELECT pg_terminate_backend(pid) {held}")
            other.delete([item.id for item, _ in ENTRIES[50:60]])
            other.compact()
            with pytest.raises(StoreUnavailable):
                applying.result()
        reference = ReferenceGallery(ENTRIES[:50])
        for gallery in (slow, other):
            check(gallery, reference, top=200)
        assert other.verify() == []


def test_all_copies_confirm_writes_again_after_a_writer_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    with open_gallery_on(cluster.address("factor"), tmp_path / "gallery") as gallery:
        gallery.upsert(ENTRIES[:50], BUNDLE)
        gallery.activate(BUNDLE)
        (name,) = cluster.collections("factor")

        def confirming() -> set[int]:
            found = [cluster.request("GET", f"/collections/{name}", node=node) for node in range(len(cluster.nodes))]
            return {one["config"]["params"]["write_consistency_factor"] for one in found}

        cluster.request("PATCH", f"/collections/{name}", {"params": {"write_consistency_factor": 1}})
        wait_until(lambda: confirming() == {1})  # nodes hear of it one after the other
        gallery.upsert(ENTRIES[50:60], BUNDLE)
        gallery.compact()
        wait_until(lambda: confirming() == {2})
