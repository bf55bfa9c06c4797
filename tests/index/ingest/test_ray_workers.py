"""Re-indexing on a Ray cluster: the same gallery as without, also when workers die."""

import csv
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.embedding.bundle import MODEL_FILE, Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.jobs import JobRecord, opened_jobs
from index.ingest.pipeline import run_reindex
from index.ingest.ray_workers import RayWorkers
from index.ingest.sources import Source
from index.ingest.workers import LocalWorkers, Workers
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, write_tiny_source

ROWS = 600
"""Five chunks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two cores of this machine, as a cluster of its own processes."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "lookalike[ray]"')
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield started
    started.shutdown()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path / "bundle"))


class Killer(SimpleHTTPRequestHandler):
    """Serves photos; some are never answered, since whoever asks for them is killed."""

    deadly: dict[str, int]
    """Photo to the number of times that it still kills."""
    raylet: int
    killed: list[int]

    def do_GET(self) -> None:
        if self.deadly.get(self.path, 0):
            self.deadly[self.path] -= 1
            asking = owner(self.client_address[1], self.raylet)
            self.killed.append(asking)
            os.kill(asking, signal.SIGKILL)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def owner(port: int, parent: int) -> int:
    """The child process that holds the near end of a connection."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = {line[9] for line in lines if line[1].endswith(f":{port:04X}")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            if f"socket:[{inode}]" in {os.readlink(file) for file in (process / "fd").iterdir()}:  # noqa: PTH115
                return int(process.name)
        except FileNotFoundError:  # it ended meanwhile
            continue
    raise AssertionError(f"no child of {parent} holds the port {port}")


@pytest.fixture
def killer(tmp_path: Path, cluster: Any) -> Iterator[tuple[str, type[Killer]]]:
    """The address of a server of the photos, and whom it kills."""
    write_tiny_source(tmp_path / "photos")
    raylet = cluster.head_node.all_processes["raylet"][0].process.pid
    kind = type("Kind", (Killer,), {"deadly": {}, "raylet": raylet, "killed": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=tmp_path / "photos"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", kind
    server.shutdown()
    thread.join()
    server.server_close()


def write_table(file: Path, photos: str, places: dict[int, str]) -> Source:
    """A table of many items with the tiny photos, at other places in some rows."""
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["item_id", "image", "image_id"])
        for row in range(ROWS):
            place = f"{photos}/{COLOURS[row % len(COLOURS)]}-{row // 8 % 2}.jpg"
            writer.writerow([f"item-{row:03}", places.get(row, place), "front"])
    return Source([file])


def run(
    source: Source, gallery: Path, bundle: Bundle, hire: Callable[[Source, Bundle], Workers] = LocalWorkers
) -> JobRecord:
    return run_reindex(
        source, gallery=gallery, bundle=bundle, hire=hire, rejects_file=gallery.with_name(f"{gallery.name}.csv")
    )


def contents(gallery: Path, bundle: Bundle) -> tuple[list[tuple[str, str]], dict[str, str], np.ndarray[Any, Any]]:
    """Every image, the digests and the vectors, in order."""
    opened = open_gallery(gallery)
    try:
        images = sorted(opened.image_ids())
        digests = {item: opened.digests(item, bundle.id)[image] for item, image in images}
        return images, digests, np.stack([opened.item_vectors(item, bundle.id)[image] for item, image in images])
    finally:
        opened.close()


def test_a_worker_that_is_killed_costs_no_image_and_doubles_none(
    tmp_path: Path, cluster: Any, bundle: Bundle, killer: tuple[str, type[Killer]]
) -> None:
    address, kind = killer
    kind.deadly["/red-1.jpg"] = 1
    places = {200: f"{address}/red-1.jpg", 7: str(tmp_path / "missing.jpg")}
    source = write_table(tmp_path / "table.csv", str(tmp_path / "photos"), places)
    record = run(source, tmp_path / "far", bundle, lambda _, bundle: RayWorkers(cluster.address, bundle))
    assert len(kind.killed) == 1
    assert (record.state, record.done, record.embedded, record.rejected) == ("partial", ROWS, ROWS - 1, 1)
    run(source, tmp_path / "near", bundle)
    far, near = contents(tmp_path / "far", bundle), contents(tmp_path / "near", bundle)
    assert len(far[0]) == ROWS - 1 and far[:2] == near[:2]
    np.testing.assert_array_equal(far[2], near[2])
    assert (tmp_path / "far.csv").read_text() == (tmp_path / "near.csv").read_text()


def test_a_chunk_that_kills_every_worker_ends_the_job_and_is_named(
    tmp_path: Path, cluster: Any, bundle: Bundle, killer: tuple[str, type[Killer]]
) -> None:
    address, kind = killer
    kind.deadly["/red-1.jpg"] = 99
    source = write_table(tmp_path / "table.csv", str(tmp_path / "photos"), {200: f"{address}/red-1.jpg"})
    with pytest.raises(LookalikeError, match=r"3 workers .* died over the 128 images from item item-128"):
        run(source, tmp_path / "gallery", bundle, lambda _, bundle: RayWorkers(cluster.address, bundle))
    assert len(kind.killed) == 3
    with opened_jobs(tmp_path / "gallery") as log:
        assert log.newest(1)[0].state == "failed"


def test_a_machine_that_joins_gets_work_and_one_that_is_lost_is_done_without(
    tmp_path: Path, cluster: Any, bundle: Bundle
) -> None:
    chunk = list(Source([write_tiny_source(tmp_path / "photos")]))
    workers = RayWorkers(cluster.address, bundle)
    try:
        assert workers.ahead == 4, "two for each worker"
        node = cluster.add_node(num_cpus=1)
        deadline = time.monotonic() + 60
        while workers.ahead < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers.ahead == 6
        first = [workers.submit(chunk, {}) for _ in range(12)]
        cluster.remove_node(node, allow_graceful=False)
        second = [workers.submit(chunk, {}) for _ in range(12)]
        for future in (*first, *second):
            assert len(future.result(timeout=60)) == len(chunk)
    finally:
        workers.close()


def test_workers_that_cannot_start_are_told_with_the_cause(tmp_path: Path, cluster: Any, bundle: Bundle) -> None:
    chunk = list(Source([write_tiny_source(tmp_path / "photos")]))
    (bundle.directory / MODEL_FILE).write_bytes(b"overwritten since")
    workers = RayWorkers(cluster.address, bundle)
    try:
        with pytest.raises(LookalikeError, match=r"No worker can start .* is damaged"):
            workers.submit(chunk, {}).result(timeout=60)
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "No Ray cluster answers at ray://127.0.0.1:1"),
        ("cluster", "'cluster' names no Ray cluster"),
        ("http://127.0.0.1:1", "names no Ray cluster"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(bundle: Bundle, address: str, message: str) -> None:
    pytest.importorskip("ray", reason='Ray is not installed: pip install "lookalike[ray]"')
    with pytest.raises(LookalikeError, match=message):
        RayWorkers(address, bundle)


def test_without_ray_the_way_to_install_it_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[ray\]"'):
        RayWorkers("local", bundle)
