"""Workers on a Ray cluster: its machines read, decode and embed; the job's own process writes the gallery.

Each chunk is a Ray task, so that Ray places it on a free core, repeats it when a worker or a machine is lost, and uses
machines that join. Ray's ActorPool does less: its actors hold their cores for the whole job and their number is fixed,
and when a machine was removed under it, the pool raised ActorUnavailableError despite Ray's own retries.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from index._util.imports import require
from index._util.system import usable_cores
from index.embedding.bundle import CARD_FILE, MODEL_FILE, Bundle
from index.errors import LookalikeError
from index.ingest.embedding_plan import KnownDigests, Outcome
from index.ingest.places import OWN_FOLDER, AllowedPlaces, absolute_place
from index.ingest.sources import SourceImage
from index.ingest.workers import LocalWorkers

_PIECE = 32
"""Images of a chunk that a worker embeds while it decodes the next ones."""
_ADDRESSES = "Use host:port or ray://host:port, `auto` for the cluster that this machine belongs to, or `local`."


class RaySettings(NamedTuple):
    """How long to wait for a cluster, and how often to repeat a chunk."""

    attempts: int = 3
    """Workers that may die over a chunk before the job fails."""
    connect_seconds: float = 10.0
    start_seconds: float = 600.0
    """For the first worker to be ready: the cluster may have to start a machine first."""


DEFAULT_SETTINGS = RaySettings()


class ClusterError(LookalikeError):
    """A Ray cluster that cannot be reached, or whose workers die."""

    kind = "cluster"


class _Model(NamedTuple):
    """What a worker process loads: a bundle, to embed photos of allowed places."""

    bundle_id: str
    allowed: AllowedPlaces


class RayWorkers:
    """Workers on the cores of a Ray cluster."""

    def __init__(
        self,
        address: str,
        bundle: Bundle,
        allowed: AllowedPlaces = OWN_FOLDER,
        settings: RaySettings = DEFAULT_SETTINGS,
    ) -> None:
        """Joins the cluster at `auto`, `host:port` or `ray://host:port`; `local` starts one on this machine."""
        self._ray = _connect(address, settings)
        self._attempts = settings.attempts
        remote = self._ray.remote(num_cpus=1, max_retries=settings.attempts - 1)
        self._load, self._embed = remote(_load_model), remote(_embed_chunk)
        self._model = _Model(bundle.id, allowed)
        files = {name: (bundle.directory / name).read_bytes() for name in (MODEL_FILE, CARD_FILE)}
        # In a list Ray leaves the reference as it is: a worker fetches the files once, not for every chunk.
        self._files = [self._ray.put(files)]
        try:
            self._wait_for_worker(settings.start_seconds)
        except BaseException:
            self.close()
            raise

    def _wait_for_worker(self, seconds: float) -> None:
        try:
            self._ray.get(self._load.remote(self._model, self._files), timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise ClusterError(
                f"The Ray cluster offered no free core for {seconds:g} seconds.",
                "See `ray status`; free some cores or add machines, and run again.",
            ) from None
        except self._ray.exceptions.RayError as error:
            raise ClusterError(
                f"No worker can start on the Ray cluster: {_last_line(error)}.",
                'Run on each of its machines: pip install "lookalike[cpu,ray]", in the release that is used here.',
            ) from error

    @property
    def ahead(self) -> int:
        """Two chunks for each core of the cluster, as many as it has now."""
        return 2 * max(1, int(self._ray.cluster_resources().get("CPU", 0)))

    def submit(self, chunk: Sequence[SourceImage], known: KnownDigests) -> "Future[list[Outcome]]":
        images = [_with_absolute_paths(image) for image in chunk]
        outcomes: Future[list[Outcome]] = Future()
        task = self._embed.remote(self._model, self._files, images, known)
        task.future().add_done_callback(lambda done: self._settle(done, images, outcomes))
        return outcomes

    def close(self) -> None:
        # The tasks end with the connection, and so does a cluster that was started for it.
        self._ray.shutdown()

    def _settle(self, done: "Future[Any]", images: list[SourceImage], outcomes: "Future[list[Outcome]]") -> None:
        """Passes the result of a task on, or its error as one for users."""
        error = done.exception()
        if error is None:
            outcomes.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # raised by our own code in a worker
            cause = getattr(error, "cause", None)
            outcomes.set_exception(cause if isinstance(cause, LookalikeError) else error)
        else:
            first = images[0]
            lost = ClusterError(
                f"{self._attempts} workers of the Ray cluster died over the {len(images)} images from item "
                f"{first.item.id}, {first.place}, on; the last: {_last_line(error)}.",
                "Look for a huge or broken photo among them, or give the workers more memory; then run again.",
            )
            lost.__cause__ = error
            outcomes.set_exception(lost)


# On the cluster

_loaded: dict[_Model, LocalWorkers] = {}
"""The workers of this process: created for the first chunk and kept for the next ones."""


def _load_model(model: _Model, files: list[Any]) -> None:
    """Loads the bundle in this worker process, unless it is loaded already."""
    if model in _loaded:
        return
    import ray

    with tempfile.TemporaryDirectory(prefix="lookalike-bundle-") as folder:
        for name, data in ray.get(files[0]).items():
            (Path(folder) / name).write_bytes(data)
        workers = LocalWorkers(Bundle.load(folder), allowed=model.allowed, cores=1)
        # Loads the model now, so that the files are removed even if the worker is killed later.
        workers.embedder()
    _loaded.clear()
    _loaded[model] = workers


def _embed_chunk(model: _Model, files: list[Any], images: list[SourceImage], known: KnownDigests) -> list[Outcome]:
    _load_model(model, files)
    workers = _loaded[model]
    pieces = [workers.submit(images[start : start + _PIECE], known) for start in range(0, len(images), _PIECE)]
    return [outcome for piece in pieces for outcome in piece.result()]


# Connecting


def _connect(address: str, settings: RaySettings) -> Any:
    """Returns Ray, connected to the cluster, with its output and its usage reports switched off."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints events of its processes to standard output, which `log_to_driver` does not prevent.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    ray = require("ray", extra="ray")
    if address not in ("auto", "local"):
        _check_reachable(address, settings.connect_seconds)
    own = {"num_cpus": usable_cores(), "include_dashboard": False}
    options: dict[str, Any] = own if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # a missing cluster and another release of Ray raise several undocumented types
        raise ClusterError(
            f"Cannot join the Ray cluster {address!r}: {_last_line(error)}.",
            f"{_ADDRESSES} If it requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH.",
        ) from error
    finally:
        # Ray's handler ends the process immediately; the job must end after its batch.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return ray


def _check_reachable(address: str, seconds: float) -> None:
    """Fails fast: Ray takes minutes to give up on an address without a server, and then ends the process."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.scheme not in ("", "ray") or not parts.hostname or not parts.port:
            raise ClusterError(f"{address!r} is not a valid address of a Ray cluster.", _ADDRESSES)
        socket.create_connection((parts.hostname, parts.port), seconds).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"No Ray cluster answers at {address}: {error}.", _ADDRESSES) from error


def _with_absolute_paths(image: SourceImage) -> SourceImage:
    """Returns the image with absolute paths: a worker has another working directory."""
    return image._replace(place=absolute_place(image.place), folder=absolute_place(image.folder))


def _last_line(error: BaseException) -> str:
    """Returns the last line of Ray's message, which holds the cause at the end of a long report."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
