"""More machines for a re-index: a Ray cluster reads, decodes and embeds; this process alone writes the gallery."""

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from index._util.system import usable_cores
from index.embedding.bundle import CARD_FILE, MODEL_FILE, Bundle
from index.errors import LookalikeError
from index.ingest.remote_files import Places, local_path, scheme_of
from index.ingest.sources import SourceImage
from index.ingest.workers import Known, LocalWorkers, Outcome

log = logging.getLogger(__name__)

_CORES = 1
"""Of a worker: so every core of any machine is of use, and a worker that dies loses one core's chunk."""
_PIECE = 32
"""Images of a chunk that a worker embeds while it decodes the next ones."""
_LIVES = 3
"""Workers that a chunk may cost, and that may die in a row before one is ready."""
_LOOK_SECONDS = 2.0
"""Between two looks at the cluster for machines that came."""
_REACH_SECONDS = 10.0
_START_SECONDS = 600.0
"""That a cluster may take to offer a core, since it may have to start a machine for it."""
_ADDRESSES = "Name one as host:port or ray://host:port, `auto` for one that this machine belongs to, or `local`."


class ClusterError(LookalikeError):
    """A Ray cluster that cannot be reached, or that loses its workers."""

    kind = "cluster"


class _Task:
    """A chunk on its way, and how many workers died over it."""

    def __init__(self, chunk: list[SourceImage], known: Known) -> None:
        self.chunk = chunk
        self.known = known
        self.deaths = 0
        self.outcomes: Future[list[Outcome]] = Future()


class _Answer(NamedTuple):
    """What a worker says, or that it says nothing any more."""

    worker: Any
    future: "Future[Any]"


class RayWorkers:
    """The cores of a Ray cluster, with a worker on each. The chunk of a worker that dies goes to another.

    One thread owns the workers and the chunks, and learns through one queue of all that happens.
    """

    def __init__(self, address: str, bundle: Bundle) -> None:
        """Joins the cluster at `auto`, `host:port` or `ray://host:port`; `local` starts one on this machine."""
        self._ray = _joined(address)
        self._hired = self._ray.remote(num_cpus=_CORES)(_Worker)
        # Held by the cluster, which sends it once to each machine.
        self._files = self._ray.put({name: (bundle.directory / name).read_bytes() for name in (MODEL_FILE, CARD_FILE)})
        self._events: SimpleQueue[_Task | _Answer | None] = SimpleQueue()
        self._waiting: deque[_Task] = deque()
        self._asked: set[Any] = set()
        """Workers that have yet to say that they are ready."""
        self._idle: list[Any] = []
        self._busy: dict[Any, _Task] = {}
        self._deaths_in_a_row = 0
        self._looked = self._last_ready = time.monotonic()
        self._hire()
        self._thread = threading.Thread(target=self._dispatch, name="ray-dispatch", daemon=True)
        self._thread.start()

    @property
    def ahead(self) -> int:
        """A chunk for each worker, and one more each for whoever is done first."""
        return 2 * (len(self._asked) + len(self._idle) + len(self._busy))

    def submit(self, chunk: Sequence[SourceImage], known: Known) -> "Future[list[Outcome]]":
        task = _Task([_seen_from_anywhere(image) for image in chunk], known)
        self._events.put(task)
        return task.outcomes

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()
        # The workers end with the connection, and so does a cluster that was started for it.
        self._ray.shutdown()

    def _dispatch(self) -> None:
        try:
            self._hand_out_until_closed()
        except BaseException as error:  # of any kind: the job waits for its chunks in another thread
            for task in (*self._waiting, *self._busy.values()):
                task.outcomes.set_exception(error)
            while (event := self._events.get()) is not None:
                if isinstance(event, _Task):
                    event.outcomes.set_exception(error)

    def _hand_out_until_closed(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_LOOK_SECONDS)
            except Empty:
                pass
            else:
                if event is None:
                    return
                if isinstance(event, _Task):
                    self._waiting.append(event)
                else:
                    self._settle(event.worker, event.future)
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self._look()
            while self._idle and self._waiting:
                worker, task = self._idle.pop(), self._waiting.popleft()
                self._busy[worker] = task
                self._listen(worker, worker.work.remote(task.chunk, task.known))

    def _look(self) -> None:
        """Hires on machines that came; ends the wait for a cluster without a free core."""
        self._looked = time.monotonic()
        if self._idle or self._busy:
            self._last_ready = self._looked
        elif self._looked - self._last_ready > _START_SECONDS:
            raise ClusterError(
                f"The Ray cluster offered no free core for {_START_SECONDS:g} seconds.",
                "See `ray status`; free some cores or add machines, and run again: it goes on where it was.",
            )
        self._hire()

    def _hire(self) -> None:
        """As many workers as the cluster has cores for; one that is full or empty now starts them later."""
        cores = self._ray.cluster_resources().get("CPU", 0)
        staff = len(self._asked) + len(self._idle) + len(self._busy)
        for _ in range(max(1, int(cores) // _CORES) - staff):
            self._ask(self._hired.remote(self._files))

    def _ask(self, worker: Any) -> None:
        self._asked.add(worker)
        self._listen(worker, worker.ready.remote())

    def _listen(self, worker: Any, call: Any) -> None:
        call.future().add_done_callback(lambda future: self._events.put(_Answer(worker, future)))

    def _settle(self, worker: Any, future: "Future[Any]") -> None:
        error = future.exception()
        task = self._busy.pop(worker, None)
        self._asked.discard(worker)
        has_died = error is not None and not isinstance(error, self._ray.exceptions.RayTaskError)
        if not has_died:
            self._idle.append(worker)
            self._deaths_in_a_row = 0
        if task is None:
            if error is not None:
                self._note_stillborn(error)
        elif error is None:
            task.outcomes.set_result(future.result())
        elif has_died:
            self._replace(task, error)
        else:
            task.outcomes.set_exception(_cause(error))

    def _note_stillborn(self, error: BaseException) -> None:
        """A worker died before it was ready; where none ever is, more of them are of no use."""
        self._deaths_in_a_row += 1
        misbuilt = getattr(error, "actor_init_failed", False)
        if misbuilt or (self._deaths_in_a_row >= _LIVES and not (self._asked or self._idle or self._busy)):
            raise ClusterError(
                f"No worker can start on the Ray cluster: {_last_line(error)}.",
                'Run on each of its machines: pip install "lookalike[cpu,ray]", in the release that is used here.',
            ) from error

    def _replace(self, task: _Task, error: BaseException) -> None:
        """A worker died over its chunk: another gets it, unless it is the chunk that kills them."""
        task.deaths += 1
        first, count = task.chunk[0], len(task.chunk)
        if task.deaths == _LIVES:
            lost = ClusterError(
                f"{_LIVES} workers of the Ray cluster died over the {count} images from item {first.item.id}, "
                f"{first.place}, on; the last: {_last_line(error)}.",
                "Look for a huge or broken photo among them, or give the workers more memory; then run again.",
            )
            task.outcomes.set_exception(lost)
            return
        log.warning("a worker of the Ray cluster died; the images from item %s on go to another", first.item.id)
        self._waiting.appendleft(task)
        self._hire()
        # With their machine the idle ones died as well: they are to say that they live before they get a chunk.
        idle, self._idle = self._idle, []
        for worker in idle:
            self._ask(worker)


class _Worker:
    """The far side: what a core of the cluster runs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="lookalike-bundle-") as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            self._local = LocalWorkers(Places(), Bundle.load(folder), cores=_CORES)
            # Loads the model now, so that not even a worker that is killed leaves files behind.
            self._local.embedder()

    def ready(self) -> None:
        """Answers once the model is loaded."""

    def work(self, chunk: list[SourceImage], known: Known) -> list[Outcome]:
        pieces = [self._local.submit(chunk[start : start + _PIECE], known) for start in range(0, len(chunk), _PIECE)]
        return [outcome for piece in pieces for outcome in piece.result()]


def _joined(address: str) -> Any:
    """Ray, connected and quiet: nothing of it runs through the progress bar, and it reports to nobody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints what befalls its processes to standard output, where `log_to_driver` does not reach.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError as error:
        raise ClusterError(f"Ray cannot be imported ({error}).", 'Run: pip install "lookalike[ray]"') from None
    if address not in ("auto", "local"):
        _check_reachable(address)
    own = {"num_cpus": usable_cores(), "include_dashboard": False}
    options: dict[str, Any] = own if address == "local" else {}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # a missing cluster and another release of Ray are of several undocumented types
        raise ClusterError(
            f"The Ray cluster {address!r} cannot be joined: {_last_line(error)}.",
            f"{_ADDRESSES} One that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to be set.",
        ) from error
    finally:
        # Ray would end the process at once; the job ends after its batch.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself takes minutes to find that nobody answers, and then ends the process."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.scheme not in ("", "ray") or not parts.hostname or not parts.port:
            raise ClusterError(f"{address!r} names no Ray cluster.", _ADDRESSES)
        socket.create_connection((parts.hostname, parts.port), _REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"No Ray cluster answers at {address}: {error}.", _ADDRESSES) from error


def _seen_from_anywhere(image: SourceImage) -> SourceImage:
    """The same image by its whole path: a worker's working directory is another."""
    return image if scheme_of(image.place) else image._replace(place=str(local_path(image.place).absolute()))


def _cause(error: BaseException) -> BaseException:
    """What the worker raised, if that is meant for people, or else Ray's error with the worker's traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, LookalikeError) else error


def _last_line(error: BaseException) -> str:
    """Ray's messages are reports of many lines, with what happened at the end."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
