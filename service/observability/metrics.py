"""What the service tells about itself: metrics for Prometheus, and spans where OpenTelemetry is set up.

With one process the metrics lie in memory. With several, each writes its own into files of a shared folder, and
whichever is asked adds them up; what concerns the gallery is read from the gallery, which all of them share.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from index._util.system import memory_limit
from index.embedding.bundle import BundleCard
from index.gallery import GalleryStats
from index.gallery.jobs import JobRecord, State
from service.observability.tracing import Tracing

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the shared folder; prometheus_client reads it when it is imported."""

Stage = Literal["decode", "wait", "embed", "search"]
Refusal = Literal["rate", "requests", "queue"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a third more lines that nobody reads


class Telemetry:
    """The meters of one application. Labels are words of ours, never of a request, so their number is bounded."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "lookalike_requests",
            "Requests answered; 499: the client left.",
            ["route", "method", "status"],
            registry=own,
        )
        self._seconds = Histogram(
            "lookalike_request_seconds",
            "From a request's first line to its answer's last byte.",
            ["route", "method"],
            buckets=_SECONDS,
            registry=own,
        )
        self._stages = Histogram(
            "lookalike_stage_seconds",
            "Parts of a search: decode, wait for the model, embed, search.",
            ["stage"],
            buckets=_SECONDS,
            registry=own,
        )
        self._batches = Histogram(
            "lookalike_batch_photos", "Photos that the model took at once.", buckets=_SIZES, registry=own
        )
        self._queue = Gauge(
            "lookalike_queue_photos",
            "Photos that wait for the model or are with it.",
            multiprocess_mode="livesum",
            registry=own,
        )
        self._working = Gauge(
            "lookalike_working_requests",
            "Requests that hold one of the permits to work.",
            multiprocess_mode="livesum",
            registry=own,
        )
        self._refused = Counter(
            "lookalike_refused",
            "Requests refused: the key's rate (429), all permits taken or the model's queue full (503).",
            ["reason"],
            registry=own,
        )
        self._seen = {
            what: Gauge(
                f"lookalike_gallery_{what}_seen_timestamp_seconds",
                f"When a process first saw the gallery's newest {what}.",
                multiprocess_mode="max",
                registry=own,
            )
            for what in ("change", "generation")
        }
        self._newest: dict[str, int | str | None] = {}

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts an answered request, by the template of its route."""
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, status).inc()
        self._seconds.labels(route, method).observe(seconds)

    def stage(self, name: Stage, seconds: float, *, ago: float = 0.0) -> None:
        """Notes a part of the running request that ended `ago` seconds before now."""
        self._stages.labels(name).observe(seconds)
        self.tracing.stage(name, seconds, ago)

    def batch(self, photos: int) -> None:
        """Notes the size of a batch."""
        self._batches.observe(photos)

    def refused(self, reason: Refusal) -> None:
        """Counts a request that was turned away to come again."""
        self._refused.labels(reason).inc()

    def saw(self, generation: str | None, change: int) -> None:
        """Notes the state of the gallery that an answer reflects; cheap when it is the one before."""
        for what, newest in (("change", change), ("generation", generation)):
            if newest is not None and self._newest.get(what) != newest:
                self._newest[what] = newest
                self._seen[what].set_to_current_time()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Around the time that a photo spends at the model."""
        with self._queue.track_inprogress():
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the time that a request holds a permit."""
        with self._working.track_inprogress():
            yield

    def exposition(
        self,
        stats: GalleryStats,
        card: BundleCard | None,
        provider: str | None,
        *,
        ready: bool,
        jobs: Sequence[JobRecord],
    ) -> bytes:
        """All metrics in Prometheus' text format; `jobs` are the newest."""
        self.saw(stats.generation, stats.change)
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            pages, processes = [generate_latest(self._registry)], [os.getpid()]
        else:
            processes = _living(Path(folder))
            shared = CollectorRegistry()
            MultiProcessCollector(shared, path=folder)  # type: ignore[no-untyped-call]
            pages = [generate_latest(shared)]
        rest = CollectorRegistry()
        rest.register(_Now(stats, card, provider, ready, jobs, processes))
        return b"".join([*pages, generate_latest(rest)])


def _living(folder: Path) -> list[int]:
    """The processes that write into the folder; what those that died were doing is forgotten."""
    processes = {int(file.stem.rpartition("_")[2]) for file in folder.glob("*.db")}
    living = [process for process in sorted(processes) if _is_alive(process)]
    for process in processes.difference(living):
        mark_process_dead(process, str(folder))  # type: ignore[no-untyped-call]
    return living


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class _Now(Collector):
    """What is read when it is asked for: the gallery, the bundle and the processes."""

    def __init__(
        self,
        stats: GalleryStats,
        card: BundleCard | None,
        provider: str | None,
        ready: bool,
        jobs: Sequence[JobRecord],
        processes: list[int],
    ) -> None:
        self._stats = stats
        self._card = card
        self._provider = provider
        self._ready = ready
        self._jobs = jobs
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        for name, value, told in (
            ("items", stats.items, "Items in the gallery."),
            ("images", stats.images, "Images in the gallery."),
            ("change", stats.change, "The number of the newest write."),
            ("generation_change", stats.generation_change, "The number of the write that the generation reflects."),
            ("pending_images", stats.pending, "Images that came or went since the generation was built."),
            ("recall", stats.recall, "Recall@10 of the generation against exact search, measured at its build."),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"lookalike_gallery_{name}", told, value=value)
        if self._card is not None:
            facts = {"id": self._card.id, "backbone": self._card.backbone, "loss": self._card.loss}
            told = "The model that compares."
            yield InfoMetricFamily("lookalike_bundle", told, value={**facts, "provider": str(self._provider)})
        yield GaugeMetricFamily("lookalike_ready", "1 while /readyz says that a search can be answered.", self._ready)
        yield self._of_jobs()
        told = "What the processes may use together: the container's limit, or else the machine's memory."
        yield GaugeMetricFamily("lookalike_memory_limit_bytes", told, value=memory_limit())
        yield from _of_processes(self._processes)

    def _of_jobs(self) -> Metric:
        """Every state is told, so that a rule can compare those that there were with those that there were not."""
        told = "When the newest job of this state ended or was last heard of; 0: there was none lately."
        family = GaugeMetricFamily("lookalike_job_updated_timestamp_seconds", told, labels=["state"])
        for state in get_args(State):
            newest = max((job.updated for job in self._jobs if job.state == state), default=0)
            family.add_metric([state], newest)
        return family


def _of_processes(processes: list[int]) -> Iterable[Metric]:
    """CPU, memory and files of each process, told apart by the label `pid`."""
    families: dict[str, Metric] = {}
    for process in processes:
        for metric in ProcessCollector(pid=partial(str, process), registry=CollectorRegistry()).collect():
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [sample._replace(labels={"pid": str(process)}) for sample in metric.samples]
    return families.values()
