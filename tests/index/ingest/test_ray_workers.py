"""Re-indexing on a Ray cluster: the same gallery as without one, also when workers die."""

import csv
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.embedding.bundle import MODEL_FILE, Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.store.sqlite_jobs import SQLiteJobs
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from index.ingest.ray_workers import ClusterError, RaySettings, RayWorkers
from index.ingest.sources import Source
from index.jobs import JobRecord
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, write_tiny_source

ROWS = 600
"""Five chunks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two cores in processes of this machine, which reports nothing to Ray's makers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        started: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        yield started
        started.shutdown()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path / "bundle"))


class Killer(SimpleHTTPRequestHandler):
    """Serves photos; for some paths it kills the process that requests them instead."""

    deadly: dict[str, int]
    """Path to the number of times that it still kills."""
    raylet: int
    killed: list[int]

    def do_GET(self) -> None:
        if self.deadly.get(self.path, 0):
            self.deadly[self.path] -= 1
            client = find_child(self.client_address[1], self.raylet)
            self.killed.append(client)
            os.kill(client, signal.SIGKILL)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the tests' output quiet."""


def find_child(port: int, parent: int) -> int:
    """Returns the child process of `parent` that has a connection from this port."""
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
    """The address of a server of photos, and its handler."""
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


def write_table(file: Path, photos: str, places: dict[int, str]) -> Path:
    """Writes a table of many items with the tiny photos; `places` replaces those of some rows."""
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["item_id", "image", "image_id"])
        for row in range(ROWS):
            place = f"{photos}/{COLOURS[row % len(COLOURS)]}-{row // 8 % 2}.jpg"
            writer.writerow([f"item-{row:03}", places.get(row, place), "front"])
    return file


def run(table: Path, gallery: Path, bundle: Bundle, ray: str | None = None) -> JobRecord:
    rejects = gallery.with_name(f"{gallery.name}.csv")
    options = ReindexOptions(
        source=[str(table)],
        gallery=str(gallery),
        bundle=bundle.directory,
        rejects=rejects,
        ray=ray,
        allow_address=["127.0.0.1"],
    )
    return run_reindex(options)


def contents(gallery: Path, bundle: Bundle) -> tuple[list[tuple[str, str]], dict[str, str], np.ndarray[Any, Any]]:
    """Returns every image, the digests and the vectors, in order."""
    opened = open_gallery(gallery)
    try:
        images = sorted(opened.image_ids())
        digests = {item: opened.digests(item, bundle.id)[image] for item, image in images}
        return images, digests, np.stack([opened.item_vectors(item, bundle.id)[image] for item, image in images])
    finally:
        opened.close()


@pytest.mark.slow
def test_a_killed_worker_neither_loses_nor_repeats_an_image(
    tmp_path: Path, cluster: Any, bundle: Bundle, killer: tuple[str, type[Killer]]
) -> None:
    address, kind = killer
    kind.deadly["/red-1.jpg"] = 1
    places = {200: f"{address}/red-1.jpg", 7: str(tmp_path / "missing.jpg")}
    table = write_table(tmp_path / "table.csv", str(tmp_path / "photos"), places)
    record = run(table, tmp_path / "far", bundle, cluster.address)
    assert len(kind.killed) == 1
    assert (record.state, record.done, record.embedded, record.rejected) == ("partial", ROWS, ROWS - 1, 1)
    run(table, tmp_path / "near", bundle)
    far, near = contents(tmp_path / "far", bundle), contents(tmp_path / "near", bundle)
    assert len(far[0]) == ROWS - 1 and far[:2] == near[:2]
    np.testing.assert_array_equal(far[2], near[2])
    assert (tmp_path / "far.csv").read_text() == (tmp_path / "near.csv").read_text()


@pytest.mark.slow
def test_workers_reject_places_that_are_not_allowed(
    tmp_path: Path, cluster: Any, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = write_tiny_source(tmp_path / "shop").parent
    (tmp_path / "secret.jpg").write_bytes((shop / "red-0.jpg").read_bytes())
    (shop / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    places = {0: "../secret.jpg", 1: "link.jpg", 200: "http://127.0.0.2:9/a.jpg"}
    monkeypatch.chdir(tmp_path)  # a worker has another working directory
    table = write_table(Path("shop/table.csv"), ".", places)
    record = run(table, tmp_path / "gallery", bundle, cluster.address)
    assert (record.state, record.embedded, record.rejected) == ("partial", ROWS - 3, 3)
    with (tmp_path / "gallery.csv").open() as file:
        rows = {row["item_id"]: row["reason"] for row in csv.DictReader(file)}
    assert rows == {f"item-{row:03}": "forbidden" for row in places}


@pytest.mark.slow
def test_a_chunk_that_kills_every_worker_fails_the_job_and_is_named(
    tmp_path: Path, cluster: Any, bundle: Bundle, killer: tuple[str, type[Killer]]
) -> None:
    address, kind = killer
    kind.deadly["/red-1.jpg"] = 99
    table = write_table(tmp_path / "table.csv", str(tmp_path / "photos"), {200: f"{address}/red-1.jpg"})
    with pytest.raises(LookalikeError, match=r"3 workers .* died over the 128 images from item item-128"):
        run(table, tmp_path / "gallery", bundle, cluster.address)
    assert len(kind.killed) == 3
    with closing(SQLiteJobs(tmp_path / "gallery")) as history:
        assert history.newest(1)[0].state == "failed"


@pytest.mark.slow
def test_a_machine_that_joins_gets_work_and_a_lost_one_is_replaced(
    tmp_path: Path, cluster: Any, bundle: Bundle
) -> None:
    chunk = list(Source([write_tiny_source(tmp_path / "photos")]))
    workers = RayWorkers(cluster.address, bundle)
    try:
        assert workers.ahead == 4, "two per core"
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


@pytest.mark.slow
def test_workers_that_cannot_start_are_reported_with_the_cause(cluster: Any, bundle: Bundle) -> None:
    (bundle.directory / MODEL_FILE).write_bytes(b"overwritten since")
    with pytest.raises(ClusterError, match=r"No worker can start .* is damaged"):
        RayWorkers(cluster.address, bundle)


@pytest.mark.slow
def test_a_cluster_that_starts_no_worker_in_time_is_reported(cluster: Any, bundle: Bundle) -> None:
    with pytest.raises(ClusterError, match=r"no free core for 0\.001 seconds.*ray status"):
        RayWorkers(cluster.address, bundle, settings=RaySettings(start_seconds=0.001))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "No Ray cluster answers at ray://127.0.0.1:1"),
        ("cluster", "'cluster' is not a valid address"),
        ("http://127.0.0.1:1", "is not a valid address"),
    ],
)
def test_an_unreachable_cluster_is_reported_immediately(bundle: Bundle, address: str, message: str) -> None:
    with pytest.raises(LookalikeError, match=message):
        RayWorkers(address, bundle)


def test_a_missing_ray_is_reported_with_the_command_to_install_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[ray\]"'):
        RayWorkers("local", bundle)
