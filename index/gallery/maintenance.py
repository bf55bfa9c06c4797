"""Background work of a process that keeps a gallery open: following writes, removing what expires, and compaction.

The active bundle is compacted in a process of its own: it takes neither the interpreter lock nor the memory of the
process that serves searches.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic

from index.errors import LookalikeError
from index.gallery.addresses import redact
from index.gallery.expiry import current_instant
from index.gallery.settings import GallerySettings
from index.gallery.store.base import ItemStore
from index.gallery.vectors.base import VectorIndex

_COMMAND = "import sys; from index.gallery.maintenance import main; main(sys.stdin.read())"

log = logging.getLogger(__name__)


class RepeatedTask:
    """Repeats something in a thread until it is closed; what fails is tried again."""

    def __init__(self, task: Callable[[], None], seconds: float, name: str) -> None:
        self._task = task
        self._seconds = seconds
        self._closing = threading.Event()
        self.error: LookalikeError | None = None
        """Why the last attempt failed."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                self._task()
                self.error = None
            except LookalikeError as error:
                if str(error) != str(self.error):
                    log.error("%s: %s", self._thread.name, error)
                self.error = error
            except Exception:  # a bug must not end the following for good
                log.exception("%s failed", self._thread.name)

    def close(self) -> None:
        """Waits for a running attempt."""
        self._closing.set()
        self._thread.join()


class ExpiredItems:
    """Removes items that have expired: nobody sees them any more, so that it need not be soon."""

    def __init__(self, store: ItemStore, settings: GallerySettings) -> None:
        self._store = store
        self._settings = settings
        self._removed = -inf
        """When they were last removed; minus infinity if some are left."""

    def remove(self) -> int:
        """Removes what has expired until now, some items at a time; returns their number."""
        instant, removed = current_instant(), 0
        while True:
            count = self._remove_some(instant)
            removed += count
            if count < self._settings.expiry_batch:
                return removed

    def remove_if_due(self) -> None:
        """Removes some items that have expired, unless all of them were removed a short time ago.

        Not all at once: in between, the process follows writes, and can be stopped.
        """
        if monotonic() - self._removed >= self._settings.expiry_seconds:
            self._removed = monotonic()  # also if it fails, as with a full disk
            if self._remove_some(current_instant()) == self._settings.expiry_batch:
                self._removed = -inf

    def _remove_some(self, instant: int) -> int:
        return 0 if self._store.is_read_only else self._store.delete_expired(instant, self._settings.expiry_batch)


class Maintainer:
    """Starts one compaction at a time when a follower has found that one is due."""

    def __init__(
        self, address: str, index: VectorIndex, settings: GallerySettings, *, cache: Path | None = None
    ) -> None:
        self._address = address
        self._cache = cache
        self._index = index
        self._settings = settings
        self._requested = threading.Event()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Asks for a compaction; returns immediately, so that a search never waits for a lock or a process."""
        self._requested.set()

    def _run(self) -> None:
        while True:
            self._requested.wait()
            if self._closing.is_set():
                return
            try:
                code = 0 if self._index.is_building() else self._compact()
            except (OSError, LookalikeError) as error:  # no space, read-only, no locks, no more processes
                log.error("a compaction of %s could not be started: %s", redact(self._address), error)
                code = 1
            self._closing.wait(self._settings.retry_seconds if code else self._settings.rest_seconds)
            # Requests until now came from searches that had not yet opened the new index.
            if not self._closing.is_set():
                self._requested.clear()

    def _compact(self) -> int:
        # -P: the working folder may have a file with the name of one of our packages.
        command = [sys.executable, "-P", "-c", _COMMAND]
        with self._lock:
            if self._closing.is_set():
                return 0
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert self._process.stdin
            # Not among the arguments, which every user of the machine sees: the address may have a password.
            task = {"address": self._address, "cache": str(self._cache) if self._cache else None}
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(task).encode())
        code = self._process.wait()
        if code and not self._closing.is_set():
            name = redact(self._address)
            log.error("a compaction of %s failed with exit code %s; see its message above", name, code)
        return code

    def close(self) -> None:
        """Stops a running compaction, which then changes nothing."""
        with self._lock:
            self._closing.set()
            self._requested.set()
            if self._process:
                self._process.terminate()
        self._thread.join()


def main(task: str) -> None:
    """Compacts the active bundle, unless another process is doing so."""
    from index.gallery import open_gallery

    values = json.loads(task)
    cache = Path(values["cache"]) if values["cache"] else None

    os.nice(10)
    try:
        with open_gallery(values["address"], cache=cache) as gallery:
            gallery.compact(wait=False)
    except LookalikeError as error:
        sys.exit(str(error))
