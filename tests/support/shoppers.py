"""Clients of several replicas: they repeat what failed on another one, and check each answer by what they wrote."""

import io
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from PIL import Image

from index.items import Attribute
from service.client import Client, ServiceError, ServiceUnreachable
from service.schemas.search import SearchAnswer

T = TypeVar("T")
CATALOGUE, WRITTEN = {"kind": "catalogue"}, {"kind": "written"}
"""Filters by which searches see only what the job indexed, or only what these clients wrote."""
GIVE_UP_SECONDS = 90.0
"""Time within which a repetition must succeed."""
_REPEATED = (429, 502, 503, 507)


def photo_of(number: int) -> bytes:
    """Returns a photo of random colours, which no other number resembles."""
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


class Record:
    """What clients did and saw; all threads share it."""

    def __init__(self, photo: Callable[[int], bytes] = photo_of) -> None:
        """`photo` returns the photo with a number, of those that clients write."""
        self.photo = photo
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.stored: dict[str, int] = {}
        """Item to the number of its photo, of acknowledged writes."""
        self.deleted: dict[str, int] = {}
        self.unclear: set[str] = set()
        """Items with a write that was sent and not yet acknowledged."""
        self.answers: dict[tuple[str, int], Counter[tuple[tuple[str, float], ...]]] = {}
        """The different answers to each query of the catalogue, by bundle."""
        self.slowest = 0.0
        self.may_write = threading.Event()
        self.writing = 0
        """Clients that write now, or check what they wrote."""

    def pause_writes(self, seconds: float = 60) -> None:
        """Returns when no client writes any more, until `may_write` is set again."""
        self.may_write.clear()
        deadline = time.monotonic() + seconds
        while self.writing:
            assert time.monotonic() < deadline, "clients do not finish their writes"
            time.sleep(0.02)

    @contextmanager
    def write_place(self) -> Iterator[bool]:
        """Counts a client that writes during the context; yields false while writes are paused."""
        with self._lock:
            self.writing += 1
        try:
            yield self.may_write.is_set()
        finally:
            with self._lock:
                self.writing -= 1

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def violate(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)

    def saw(self, bundle: str, query: int, answer: tuple[tuple[str, float], ...]) -> None:
        with self._lock:
            self.answers.setdefault((bundle, query), Counter())[answer] += 1

    def took(self, seconds: float) -> None:
        with self._lock:
            self.slowest = max(self.slowest, seconds)


class Shopper:
    """One client; sends a request to the next replica until one answers it."""

    def __init__(self, addresses: Sequence[str], record: Record, number: int, queries: Sequence[bytes]) -> None:
        self._clients = [Client(address, retries=0, timeout=20) for address in addresses]
        self._record = record
        self._random = random.Random(number)
        self._number = number
        self._queries = queries
        self._items = 0
        self._photos = 0

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                # Every third one only searches: refused writes must not keep all of them.
                if self._number % 3 == 0 or self._random.random() < 0.4:
                    self._search()
                    continue
                with self._record.write_place() as may_write:
                    if may_write:
                        self._random.choice([self._store, self._replace, self._delete])()
                if not may_write:
                    self._search()
        finally:
            for client in self._clients:
                client.close()

    def send(self, kind: str, request: Callable[[Client], T], *, first: int | None = None) -> T:
        """Sends a request, first to one replica, and then in turn to all; fails if repetitions do not help."""
        at = self._random.randrange(len(self._clients)) if first is None else first
        started = time.monotonic()
        while True:
            try:
                result = request(self._clients[at % len(self._clients)])
                break
            except ServiceUnreachable:
                self._record.count(f"{kind}: no response")
            except ServiceError as error:
                self._record.count(f"{kind}: {error.status} {error.type}")
                if error.status not in _REPEATED:
                    self._record.violate(f"{kind}: {error.status} {error}")
                    raise
            if time.monotonic() - started > GIVE_UP_SECONDS:
                self._record.violate(f"{kind} was not answered within {GIVE_UP_SECONDS:g} s")
                raise TimeoutError(kind)
            at += 1
            time.sleep(0.1)
        self._record.count(kind)
        self._record.took(time.monotonic() - started)
        return result

    def _search(self) -> None:
        query = self._random.randrange(len(self._queries))
        answer = self.send("search", lambda client: client.search(self._queries[query], limit=5, filter=CATALOGUE))
        if answer.stale_seconds:
            self._record.count("stale search")
        self._record.saw(answer.bundle, query, tuple((hit.id, round(hit.score, 3)) for hit in answer.items))

    def _find(self, photo: int, first: int) -> SearchAnswer:
        return self.send(
            "check", lambda client: client.search(self._record.photo(photo), limit=3, filter=WRITTEN), first=first
        )

    def _write(self, item: str, request: Callable[[Client], object]) -> int:
        """Sends a write to any replica; returns the number of another one."""
        at = self._random.randrange(len(self._clients))
        self._record.unclear.add(item)
        self.send("write", request, first=at)
        self._record.unclear.discard(item)
        return at + 1

    def _put(self, item: str) -> None:
        self._photos += 1
        number = 1_000_000 * (self._number + 1) + self._photos
        old = self._record.stored.get(item)
        images = {"front": self._record.photo(number)}
        attributes: dict[str, Attribute] = {**WRITTEN, "photo": number}
        other = self._write(item, lambda client: client.put_item(item, images=images, attributes=attributes))
        self._record.stored[item] = number
        answer = self._find(number, other)
        best = answer.items[0] if answer.items else None
        if answer.stale_seconds:
            self._record.count("stale check")
        elif best is None or best.id != item or best.score < 0.999 or best.attributes["photo"] != number:
            self._record.violate(f"{item} with photo {number} is not found on another replica: {answer}")
        if old is not None:
            self._check_gone(item, old, other)

    def _check_gone(self, item: str, photo: int, first: int) -> None:
        answer = self._find(photo, first)
        if answer.stale_seconds:
            self._record.count("stale check")
        elif any(hit.id == item and hit.score > 0.999 for hit in answer.items):
            self._record.violate(f"photo {photo} of {item} is found although it was removed: {answer}")

    def _own(self) -> list[str]:
        return [item for item in self._record.stored if item.startswith(f"new-{self._number}-")]

    def _store(self) -> None:
        self._items += 1
        self._put(f"new-{self._number}-{self._items}")

    def _replace(self) -> None:
        if own := self._own():
            self._put(self._random.choice(own))

    def _delete(self) -> None:
        own = self._own()
        if len(own) < 3:
            return
        item = self._random.choice(own)
        other = self._write(item, lambda client: client.delete_item(item))
        photo = self._record.deleted[item] = self._record.stored.pop(item)
        self._check_gone(item, photo, other)


@contextmanager
def shopping(
    addresses: Sequence[str], queries: Sequence[bytes], count: int = 3, photo: Callable[[int], bytes] = photo_of
) -> Iterator[Record]:
    """Lets clients search during the context, and write as soon as the record's `may_write` is set."""
    record, stop = Record(photo), threading.Event()
    with ThreadPoolExecutor(count) as threads:
        shoppers = [Shopper(addresses, record, number, queries) for number in range(count)]
        runs = [threads.submit(shopper.run, stop) for shopper in shoppers]
        try:
            yield record
        finally:
            stop.set()
        for one in runs:
            one.result()


def wait_for(record: Record, name: str, count: int, seconds: float = 60) -> None:
    """Waits until the clients have counted something so many more times."""
    wanted, deadline = record.counts[name] + count, time.monotonic() + seconds
    while record.counts[name] < wanted:
        assert time.monotonic() < deadline, f"no more of {name!r}: {record.counts}, {record.problems}"
        time.sleep(0.02)


def find_lost(address: str, record: Record) -> list[str]:
    """Returns the acknowledged items that a replica does not have, or not with their photo, and deleted ones it has."""
    with Client(address) as client:
        present = {item.id: item for item in client.scan(WRITTEN, limit=1000)}
        lost = [item for item in record.stored.keys() - present.keys() if item not in record.unclear]
        wrong = [
            f"{item}: {present[item].attributes} instead of {photo}"
            for item, photo in record.stored.items()
            if item in present and item not in record.unclear and present[item].attributes["photo"] != photo
        ]
        back = [item for item in record.deleted.keys() & present.keys() if item not in record.unclear]
        for item, photo in record.stored.items():
            found = client.search(record.photo(photo), limit=1, filter=WRITTEN).items
            if item not in record.unclear and (not found or found[0].id != item or found[0].score < 0.999):
                wrong.append(f"{item} is not found: {found}")
    return [*lost, *wrong, *back]
