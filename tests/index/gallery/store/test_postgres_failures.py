"""What happens to searches, writes and jobs while PostgreSQL is restarted, killed, paused or set back."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.errors import StoreUnavailable
from index.gallery.settings import GallerySettings
from index.gallery.store.postgres import PostgresStore
from index.gallery.store.postgres_connection import PostgresSettings
from index.gallery.types import Item
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.verify import find_lost_writes
from tests.index.gallery.reference import BUNDLE, TRIO
from tests.support.postgres import PostgresServer, run_postgres

QUERY = TRIO[0][1][0].vector[None]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of the test's own, which keeps what it has confirmed."""
    with run_postgres(durable=True) as running:
        yield running


def eventually(check: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_fresh(gallery: Gallery) -> bool:
    return not gallery.search(QUERY, bundle_id=BUNDLE).stale_seconds


def passes_check(gallery: Gallery) -> bool:
    try:
        gallery.check(BUNDLE)
    except StoreUnavailable:
        return False
    return True


def test_searches_continue_for_a_limited_time_while_the_server_is_gone(server: PostgresServer, tmp_path: Path) -> None:
    patient = open_gallery(server.url(), create=True, cache=tmp_path, maintain=True)
    patient.upsert(TRIO, BUNDLE)
    patient.activate(BUNDLE)
    impatient = open_gallery(server.url(), cache=tmp_path, settings=GallerySettings(max_stale_seconds=0))
    before = patient.search(QUERY, bundle_id=BUNDLE)
    assert before.stale_seconds == 0
    assert impatient.search(QUERY, bundle_id=BUNDLE).stale_seconds == 0
    server.stop()
    found = patient.search(QUERY, bundle_id=BUNDLE)
    assert [hit.item.id for hit in found.hits[0]] == [hit.item.id for hit in before.hits[0]]
    assert 0 < found.stale_seconds < 60
    assert patient.stale_seconds > 0
    patient.check(BUNDLE)
    assert patient.active_bundle() == BUNDLE
    with pytest.raises(StoreUnavailable, match="PostgreSQL"):
        impatient.search(QUERY, bundle_id=BUNDLE)
    with pytest.raises(StoreUnavailable):
        impatient.check(BUNDLE)
    for refused in (lambda: patient.upsert(TRIO, BUNDLE), lambda: patient.get_item("mug"), patient.stats):
        with pytest.raises(StoreUnavailable):
            refused()
    with pytest.raises(StoreUnavailable):
        open_gallery(server.url(), cache=tmp_path)
    server.start()
    eventually(lambda: is_fresh(patient))
    eventually(lambda: passes_check(impatient))
    assert patient.upsert([(Item(id="late"), [])], BUNDLE) == 2
    assert patient.stale_seconds == 0
    patient.close()
    impatient.close()


def test_a_server_that_hangs_delays_a_search_for_a_limited_time(server: PostgresServer, tmp_path: Path) -> None:
    with open_gallery(server.url(), create=True, cache=tmp_path) as gallery:
        gallery.upsert(TRIO, BUNDLE)
        assert is_fresh(gallery)
        server.pause()
        try:
            assert gallery.search(QUERY, bundle_id=BUNDLE).stale_seconds > 0
        finally:
            server.resume()
        eventually(lambda: is_fresh(gallery))


WRITER = """
import sys
from pathlib import Path
from index.gallery import open_gallery
from index.gallery.errors import StoreUnavailable
from index.gallery.types import Item
from tests.index.gallery.reference import BUNDLE, photo, unit

gallery = open_gallery(sys.argv[1], cache=Path(sys.argv[2]))
number = 0
while True:
    try:
        gallery.upsert([(Item(id=f"{sys.argv[3]}-{number}"), [photo("front", unit(1, number, 0))])], BUNDLE)
    except StoreUnavailable:
        continue
    print(number, flush=True)
    number += 1
"""


class WriterProcess:
    """A process that writes items one after the other, and prints the number of each that was acknowledged."""

    def __init__(self, url: str, cache: Path, name: str) -> None:
        self.name = name
        command = [sys.executable, "-c", WRITER, url, str(cache), name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.acknowledged = -1
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.acknowledged = int(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout
        self.process.stdout.close()

    def wait_for_more(self, count: int = 20) -> None:
        wanted = self.acknowledged + count
        eventually(lambda: self.acknowledged >= wanted, 60)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_while_the_server_and_writers_are_killed(
    server: PostgresServer, tmp_path: Path
) -> None:
    reader = open_gallery(server.url(), create=True, cache=tmp_path / "reader", maintain=True)
    reader.upsert(TRIO, BUNDLE)
    reader.activate(BUNDLE)
    writers = [WriterProcess(server.url(), tmp_path / name, name) for name in ("a", "b")]
    ended, failures, stale = Event(), list[Exception](), list[float]()

    def search() -> None:
        while not ended.is_set():
            try:
                stale.append(reader.search(QUERY, bundle_id=BUNDLE).stale_seconds)
            except Exception as error:
                failures.append(error)
            time.sleep(0.01)

    searching = Thread(target=search)
    searching.start()
    try:
        for kind in (signal.SIGINT, signal.SIGQUIT, signal.SIGINT):
            for writer in writers:
                writer.wait_for_more()
            server.stop(kind)
            time.sleep(0.5)
            server.start()
        killed = writers[0]
        killed.wait_for_more()
        killed.kill()  # probably within a transaction
        writers[1].wait_for_more()
        writers[1].kill()
    finally:
        ended.set()
        searching.join()
        for writer in writers:
            writer.process.kill()
    assert failures == []
    assert max(stale) > 0
    assert is_fresh(reader)
    for writer in writers:
        assert writer.acknowledged > 50
        for number in range(writer.acknowledged + 1):
            stored = reader.get_item(f"{writer.name}-{number}")
            assert stored and len(stored.images) == 1
    assert reader.verify() == []
    reader.close()


JOB = """
import sys, time
from pathlib import Path
from index.gallery import open_gallery

gallery = open_gallery(sys.argv[1], cache=Path(sys.argv[2]))
job = gallery.jobs.begin("catalogue", "b" * 16, exclusive=True)
job.hold()
print(job.record.id, flush=True)
while True:
    time.sleep(0.1)
    try:
        job.update(done=job.record.done + 1)
    except Exception as error:
        print(error, file=sys.stderr)
"""


def test_a_job_that_is_killed_shortly_after_the_server_started_is_interrupted(
    server: PostgresServer, tmp_path: Path
) -> None:
    open_gallery(server.url(), create=True, cache=tmp_path).close()
    with closing(PostgresStore(server.url(), tmp_path, shared_index=False)) as store:
        command = [sys.executable, "-c", JOB, server.url(), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout
            job_id = int(process.stdout.readline())
            assert store.jobs.get(job_id).state == "running"
            process.kill()
        eventually(lambda: store.jobs.get(job_id).state == "interrupted", 10)
        store.jobs.begin("catalogue", BUNDLE, exclusive=True)


@pytest.mark.slow
def test_a_job_survives_a_restart_of_the_server_and_is_interrupted_when_its_process_is_killed(
    server: PostgresServer, tmp_path: Path
) -> None:
    open_gallery(server.url(), create=True, cache=tmp_path).close()
    settings = PostgresSettings(claim_seconds=20)
    with closing(PostgresStore(server.url(), tmp_path, shared_index=False, postgres=settings)) as store:
        command = [sys.executable, "-c", JOB, server.url(), str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout
        job_id = int(process.stdout.readline())
        assert store.jobs.get(job_id).state == "running"
        server.stop()
        server.start()
        # Until then the server cannot know whether the process will claim the job again.
        started = time.monotonic()
        assert store.jobs.get(job_id).state == "running"
        done = store.jobs.get(job_id).done
        eventually(lambda: store.jobs.get(job_id).done > done + 2)
        eventually(lambda: time.monotonic() > started + settings.claim_seconds)
        assert store.jobs.get(job_id).state == "running"
        process.kill()
        process.wait()
        process.stdout.close()
        eventually(lambda: store.jobs.get(job_id).state == "interrupted")
        store.jobs.begin("catalogue", BUNDLE, exclusive=True)


def test_a_server_that_lost_writes_is_noticed(
    server: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gallery = open_gallery(server.url(), create=True, cache=tmp_path)
    gallery.upsert(TRIO[:1], BUNDLE)
    server.stop()
    copy = tmp_path / "copy"
    shutil.copytree(server.data, copy)
    server.start()
    eventually(lambda: is_fresh(gallery))
    gallery.upsert(TRIO[1:], BUNDLE)
    gallery.activate(BUNDLE)
    assert len(gallery.search(QUERY, bundle_id=BUNDLE).hits[0]) == 3
    server.stop()
    server.replace_data(copy)
    server.start()
    eventually(lambda: is_fresh(gallery))
    assert len(gallery.search(QUERY, bundle_id=BUNDLE).hits[0]) == 1
    # The one before the new index was taken up, the other one after.
    assert re.search("went back from revision 2 to 1|is newer than the store, which has lost writes", caplog.text)
    store = gallery._store
    assert isinstance(store, PostgresStore)
    assert "later writes were lost" in find_lost_writes(store, FaissIndex(store.cache, store))[0]
    gallery.upsert(TRIO[1:2], BUNDLE)
    assert len(gallery.search(QUERY, bundle_id=BUNDLE).hits[0]) == 2
    gallery.close()
