"""A new model is activated while clients store items: every acknowledged item is found afterwards."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from index.embedding.bundle import Bundle
from tests.end_to_end.test_reindexing import next_progress, running, wait_for_end, write_many
from tests.support.processes import lookalike, run_server
from tests.support.tiny_bundle import make_tiny_bundle

WRITERS = 3


def photo_of(number: int) -> bytes:
    """Returns a photo of random colours, which no other number resembles."""
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


class Writers:
    """Clients that store items until they are stopped; they repeat what was refused, as a shop does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._next = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.acknowledged: list[int] = []
        self.refused: list[int] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while not self._stopped.is_set():
                with self._lock:
                    number = self._next
                    self._next += 1
                self._store(client, number)

    def _store(self, client: httpx.Client, number: int) -> None:
        path = f"/v1/items/new-{number}"
        photo = {"content": photo_of(number), "headers": {"Content-Type": "image/png"}}
        while (stored := client.put(path, json={"title": f"New {number}"})).status_code == 503:
            self.refused.append(number)
        assert stored.status_code == 201, stored.text
        while (stored := client.put(f"{path}/images/front", **photo)).status_code == 503:  # type: ignore[arg-type]
            self.refused.append(number)
        assert stored.status_code in (200, 201), stored.text
        self.acknowledged.append(number)

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def storing(address: str) -> Iterator[Writers]:
    """Stores items during the context."""
    writers = Writers(address)
    with ThreadPoolExecutor(WRITERS) as threads:
        runs = [threads.submit(writers.run) for _ in range(WRITERS)]
        try:
            yield writers
        finally:
            writers.stop()
        for one in runs:
            one.result()


def wait_for_items(writers: Writers, count: int) -> None:
    """Waits until so many more items are acknowledged."""
    wanted, deadline = len(writers.acknowledged) + count, time.monotonic() + 60
    while len(writers.acknowledged) < wanted:
        assert time.monotonic() < deadline, "the writers stand still"
        time.sleep(0.01)


def check_all_are_found(address: str, gallery: Path, writers: Writers, bundle_id: str) -> None:
    """Searches for each acknowledged item by its photo and by its id, with the bundle."""
    with httpx.Client(base_url=address, timeout=60) as client:
        deadline = time.monotonic() + 60
        while client.get("/v1/status").json()["bundle"]["id"] != bundle_id:
            assert time.monotonic() < deadline, "the service must follow"
        lost = []
        for number in writers.acknowledged:
            found = client.post("/v1/search?limit=1", files={"image": photo_of(number)}).json()
            assert found["bundle"] == bundle_id
            by_item = client.post("/v1/search?limit=1", json={"item_id": f"new-{number}"})
            if found["items"][0]["id"] != f"new-{number}" or by_item.status_code != 200:
                lost.append(number)
        assert lost == [], f"{len(lost)} of {len(writers.acknowledged)} acknowledged items are lost"
        assert client.get("/v1/status").json()["gallery"]["unsearchable"] == 0
    verified = lookalike("gallery", "verify", gallery)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_items_that_are_stored_during_a_swap_are_found_after_it(tmp_path: Path, workers: int) -> None:
    table, gallery = write_many(tmp_path / "source"), tmp_path / "gallery"
    old, new = make_tiny_bundle(tmp_path / "old"), make_tiny_bundle(tmp_path / "new", grid=8)
    first = lookalike("reindex", table, "--gallery", gallery, "--bundle", old, "--rejects", tmp_path / "rejects.csv")
    assert first.returncode == 0, first.stderr
    job = (table, "--gallery", gallery, "--bundle", new, "--rejects", tmp_path / "rejects.csv")
    with run_server("serve", "--gallery", gallery, "--workers", str(workers)) as address:
        with running(*job) as process:
            next_progress(process)  # items that are stored before a job begins must be in its source
            with storing(address) as writers:
                os.kill(process.pid, signal.SIGKILL)  # at once: the whole job takes a second
                wait_for_end(process)
                assert process.returncode == -signal.SIGKILL
                wait_for_items(writers, 10)  # between the killed job and its repetition
                repeated = lookalike("reindex", *job)
                wait_for_items(writers, 10)
        assert repeated.returncode == 0, repeated.stdout + repeated.stderr
        check_all_are_found(address, gallery, writers, Bundle.load(new).id)
