"""Metrics for Prometheus, and spans where OpenTelemetry is set up.

With one process the metrics are kept in memory. With several, each writes its own into files of a shared folder, and
the one that is scraped adds them up. Figures of the gallery are read from the gallery, which all of them share.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from index._util.system import is_running, memory_limit
from index.embedding.bundle import BundleCard
from index.jobs import JobRecord, JobState
from service.admission import Refusal
from service.observability.tracing import Tracing
from service.schemas.status import GalleryStatus

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the shared folder; prometheus_client reads the variable when it is imported."""

Stage = Literal["decode", "wait", "embed", "search"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32)
log = logging.getLogger(__name__)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

disable_created_metrics()  # type: ignore[no-untyped-call]  # they add a third more lines


class Telemetry:
    """The metrics of one application. Labels never come from a request, so their number is bounded."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._registry = own = CollectorRegistry()
        counter = partial(Counter, registry=own)
        histogram = partial(Histogram, registry=own)
        running = partial(Gauge, registry=own, multiprocess_mode="livesum")
        newest = partial(Gauge, registry=own, multiprocess_mode="max")
        text = "Requests answered; status 499: the client left."
        self._requests = counter("lookalike_requests", text, ["route", "method", "status"])
        text = "Time from a request's first line to its answer's last byte."
        self._seconds = histogram("lookalike_request_seconds", text, ["route", "method"], buckets=_SECONDS)
        text = "Time of the stages of a search: decode, wait for the model, embed, search."
        self._stages = histogram("lookalike_stage_seconds", text, ["stage"], buckets=_SECONDS)
        self._batches = histogram("lookalike_batch_photos", "Photos per batch of the model.", buckets=_SIZES)
        text = "Photos that wait for the model or are being embedded."
        self._queue = running("lookalike_queue_photos", text)
        self._working = running("lookalike_working_requests", "Searches and writes that are running.")
        text = "Requests refused, by the limit that they met: the key's rate (429), or one of the service (503)."
        self._refused = counter("lookalike_refused", text, ["reason"])
        text = "Images stored without a vector of a bundle that a job prepares, because its model could not be used."
        self._unprepared = counter("lookalike_unprepared_images", text)
        text = "When a process first saw the gallery's latest revision."
        self._revision_seen = newest("lookalike_gallery_revision_seen_timestamp_seconds", text)
        text = "Age of what the last search looked at, while the gallery's server cannot be reached; else 0."
        self._stale = newest("lookalike_gallery_stale_seconds", text)
        self._was_stale = False
        text = "When a process first saw the current index."
        self._index_seen = newest("lookalike_index_seen_timestamp_seconds", text)
        self._revision: int | None = None
        self._index: str | None = None

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts an answered request, by the template of its route."""
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, status).inc()
        self._seconds.labels(route, method).observe(seconds)

    def stage(self, name: Stage, seconds: float, *, ago: float = 0.0) -> None:
        """Records a stage of the running request that ended `ago` seconds before now."""
        self._stages.labels(name).observe(seconds)
        self.tracing.stage(name, seconds, ago)

    def batch(self, photos: int) -> None:
        """Records the size of a batch."""
        self._batches.observe(photos)

    def refused(self, reason: Refusal) -> None:
        """Counts a request that was refused and may be repeated later."""
        self._refused.labels(reason).inc()

    def unprepared(self, images: int) -> None:
        """Counts images that searches will not find after the activation of the bundle that a job prepares."""
        self._unprepared.inc(images)

    def saw_revision(self, revision: int) -> None:
        """Records the revision that an answer reflects; cheap when it is the previous one."""
        if revision != self._revision:
            self._revision = revision
            self._revision_seen.set_to_current_time()

    def saw_age(self, seconds: float) -> None:
        """Records the age of what a search looked at; logs when searches become stale, and when they are no longer."""
        if seconds or self._was_stale:
            self._stale.set(seconds)
            if bool(seconds) != self._was_stale:
                self._was_stale = bool(seconds)
                if seconds:
                    log.warning("searches are stale: the gallery's server cannot be reached")
                else:
                    log.info("searches reflect every write again")

    def _saw_index(self, name: str | None) -> None:
        if name is not None and name != self._index:
            self._index = name
            self._index_seen.set_to_current_time()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Counts a photo while it waits for the model or is being embedded."""
        with self._queue.track_inprogress():
            yield

    def working(self, change: int) -> None:
        """Adds to the number of requests that are running."""
        self._working.inc(change)

    def exposition(
        self,
        gallery: GalleryStatus | None,
        card: BundleCard | None,
        provider: str | None,
        *,
        ready: bool,
        jobs: Sequence[JobRecord],
    ) -> bytes:
        """Returns all metrics in Prometheus' text format; `jobs` are the newest, and `gallery` may be missing."""
        if gallery:
            self.saw_revision(gallery.revision)
            self._saw_index(gallery.index.name)
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            pages, processes = [generate_latest(self._registry)], [os.getpid()]
        else:
            processes = _living_processes(Path(folder))
            shared = CollectorRegistry()
            MultiProcessCollector(shared, path=folder)  # type: ignore[no-untyped-call]
            pages = [generate_latest(shared)]
        rest = CollectorRegistry()
        rest.register(_CurrentState(gallery, card, provider, ready, jobs, processes))
        return b"".join([*pages, generate_latest(rest)])


def _living_processes(folder: Path) -> list[int]:
    """Returns the processes that write into the folder, and removes the live metrics of those that died."""
    processes = {int(file.stem.rpartition("_")[2]) for file in folder.glob("*.db")}
    living = [process for process in sorted(processes) if is_running(process)]
    for process in processes.difference(living):
        mark_process_dead(process, str(folder))  # type: ignore[no-untyped-call]
    return living


@dataclass(frozen=True, eq=False)  # hashed by identity, as the registry requires
class _CurrentState(Collector):
    """Collects what is read at each scrape: the gallery, the bundle, the jobs and the processes."""

    gallery: GalleryStatus | None
    card: BundleCard | None
    provider: str | None
    ready: bool
    jobs: Sequence[JobRecord]
    processes: list[int]

    def collect(self) -> Iterable[Metric]:
        yield from self._gallery_metrics() if self.gallery else ()
        if self.card is not None:
            labels = {"id": self.card.id, "backbone": self.card.backbone, "loss": self.card.loss}
            text = "The bundle that embeds queries."
            yield InfoMetricFamily("lookalike_bundle", text, value={**labels, "provider": str(self.provider)})
        text = "1 while /readyz reports that searches can be answered."
        yield GaugeMetricFamily("lookalike_ready", text, self.ready)
        yield self._job_metric()
        text = "Memory that all processes may use together: the limit of the container, or the memory of the machine."
        yield GaugeMetricFamily("lookalike_memory_limit_bytes", text, value=memory_limit())
        yield from _process_metrics(self.processes)

    def _gallery_metrics(self) -> Iterable[Metric]:
        assert self.gallery
        gallery, index = self.gallery, self.gallery.index
        for name, value, text in (
            ("gallery_items", gallery.items, "Items in the gallery."),
            ("gallery_images", gallery.images, "Images in the gallery."),
            ("gallery_unsearchable_images", gallery.unsearchable, "Images without a vector of the active bundle."),
            ("gallery_revision", gallery.revision, "Number of the last committed write."),
            ("index_revision", index.revision, "The revision that the index reflects."),
            ("index_pending_images", index.pending, "Images added or removed since the index was built."),
            ("index_recall", index.recall, "Recall@10 of the index against exact search, measured when it was built."),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"lookalike_{name}", text, value=value)
        labels = {"engine": index.engine, "kind": str(index.kind), "device": index.device or ""}
        yield InfoMetricFamily("lookalike_index", "The index that is searched, and what compares its vectors.", labels)

    def _job_metric(self) -> Metric:
        """Returns a sample for every state, so that a rule can compare states that occurred with those that did not."""
        text = "When the newest job of this state ended or last reported progress; 0: no recent job."
        family = GaugeMetricFamily("lookalike_job_updated_timestamp_seconds", text, labels=["state"])
        for state in get_args(JobState):
            newest = max((job.updated for job in self.jobs if job.state == state), default=0)
            family.add_metric([state], newest)
        return family


def _process_metrics(processes: list[int]) -> Iterable[Metric]:
    """Returns CPU, memory and open files of each process, with the label `pid`."""
    families: dict[str, Metric] = {}
    for process in processes:
        for metric in ProcessCollector(pid=partial(str, process), registry=CollectorRegistry()).collect():
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [sample._replace(labels={"pid": str(process)}) for sample in metric.samples]
    return families.values()
