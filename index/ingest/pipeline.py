"""Re-indexing: writes a source into a gallery, embeds only what is new, and activates a new bundle without a gap."""

import csv
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import ImageError, load_pixels
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.jobs import Job
from index.gallery.types import Item, NewImage
from index.ingest.embedding_plan import EmbeddingPlan, Outcome, PlannedChunk, Reject
from index.ingest.options import ReindexOptions
from index.ingest.ray_workers import RayWorkers
from index.ingest.sources import Source, SourceImage
from index.ingest.workers import LocalWorkers, Workers
from index.jobs import JobRecord

log = logging.getLogger(__name__)

Progress = Callable[[JobRecord], None]
"""Progress callback of a job: receives its record whenever it has changed."""


class PipelineSettings(NamedTuple):
    """Sizes that trade memory for speed."""

    chunk_size: int = 128
    """Images per transaction: enough to fill batches, few enough to hold in memory and to lose when killed."""
    scan_size: int = 1024
    """Items that are read from the gallery at a time, and whose digests are cached."""
    query_batch: int = 64
    """Labelled queries that are embedded and searched at a time."""


DEFAULT_SETTINGS = PipelineSettings()


class ReindexError(LookalikeError):
    """A job that failed one of its checks. What it wrote is kept; no bundle was activated."""

    kind = "reindex"


class Cancelled(LookalikeError):
    """The job was cancelled."""

    kind = "cancelled"

    def __init__(self) -> None:
        super().__init__(
            "The job was stopped; what it embedded is kept.", "Run the same command again: it continues from there."
        )


def run_reindex(
    options: ReindexOptions,
    *,
    job_id: int | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_progress: Progress = lambda record: None,
    settings: PipelineSettings = DEFAULT_SETTINGS,
) -> JobRecord:
    """Runs a job from start to end: opens the gallery, keeps the job's record, starts the workers, and closes them all.

    `job_id` is a record that another process created for this job. `on_start` receives the job, to be able to stop it.
    """
    source, bundle = _open_source(options), Bundle.load(options.bundle)
    with open_gallery(options.gallery, create=True) as gallery:
        job = gallery.jobs.begin(source.name, bundle.id) if job_id is None else gallery.jobs.adopt(job_id)
        job.hold()
        on_start(job)
        try:
            workers = LocalWorkers(bundle) if options.ray is None else RayWorkers(options.ray, bundle)
        except LookalikeError as error:
            job.update(state="failed", message=str(error))
            raise
        try:
            return _Run(options, source, gallery, bundle, workers, job, on_progress, settings).run()
        finally:
            workers.close()


def _open_source(options: ReindexOptions) -> Source:
    return Source(options.source, columns=options.columns, attributes=options.attributes, images=options.images)


class _Submitted(NamedTuple):
    chunk: PlannedChunk
    outcomes: "Future[list[Outcome]]"


@dataclass(frozen=True)
class _Run:
    """A running job. This process alone writes to the gallery; the workers read, decode and embed."""

    options: ReindexOptions
    source: Source
    gallery: Gallery
    bundle: Bundle
    workers: Workers
    job: Job
    on_progress: Progress
    settings: PipelineSettings

    def run(self) -> JobRecord:
        """Runs every stage, and records how the job ended."""
        try:
            self._run_stages()
        except (Cancelled, KeyboardInterrupt):
            self._report_end("cancelled", str(Cancelled()))
            raise
        except LookalikeError as error:
            self._report_end("failed", str(error))
            raise
        except BaseException as error:
            self._report_end("failed", f"{type(error).__name__}: {error}")
            raise
        return self.job.record

    def _report_end(self, state: str, message: str) -> None:
        """Records the end; the reason of the failure, such as a full disk, may also prevent that."""
        try:
            self.report(state=state, message=message)
        except LookalikeError as error:
            log.error("the end of job %s could not be recorded: %s", self.job.record.id, error)

    def _run_stages(self) -> None:
        self.enter("checking")
        queries = Source([self.options.queries]) if self.options.queries is not None else None
        if queries is not None:
            queries.check()
        self.report(total=self.source.check().images)
        self.gallery.keep_bundle(self.bundle)
        rejects = _RejectsFile(self.options.rejects)
        with EmbeddingPlan(self._read_digests, cached_items=self.settings.scan_size) as plan:
            self.enter("embedding")
            self._embed_all(plan, rejects)
            if self.options.delete_missing:
                self.enter("deleting")
                self._delete_missing(plan)
        self.enter("building")
        revision = self._activate(queries)
        self.report(state="partial" if self.job.record.rejected else "done", revision=revision)

    def report(self, **values: object) -> None:
        """Updates the job's record and calls the progress callback."""
        self.job.update(**values)
        self.on_progress(self.job.record)

    def enter(self, stage: str) -> None:
        self.check_cancelled()
        self.report(stage=stage)

    def check_cancelled(self) -> None:
        if self.job.stopping:
            raise Cancelled

    # Embedding

    def _embed_all(self, plan: EmbeddingPlan, rejects: "_RejectsFile") -> None:
        """Embeds and writes the source chunk by chunk; between two chunks it can be cancelled or killed."""
        embedded = unchanged = rejected = 0
        total, allowed = self.job.record.total, self.options.max_rejects
        for images, outcomes in self._work_ahead(plan):
            self._write(images, outcomes)
            bad = [outcome for outcome in outcomes if isinstance(outcome, Reject)]
            rejects.write(bad)
            new = sum(isinstance(outcome, NewImage) for outcome in outcomes)
            embedded, rejected = embedded + new, rejected + len(bad)
            unchanged += len(outcomes) - new - len(bad)
            self.report(done=embedded + unchanged + rejected, embedded=embedded, unchanged=unchanged, rejected=rejected)
            if rejected > allowed * total:
                raise ReindexError(
                    f"{rejected} of {total} images were rejected, more than {allowed:.0%}.",
                    f"See {rejects.path} for the reasons; allow more with --max-rejects.",
                )
        if not embedded + unchanged:
            raise ReindexError(
                f"None of the {total} images of {self.source.name} could be indexed.",
                f"See {rejects.path} for the reasons.",
            )

    def _work_ahead(self, plan: EmbeddingPlan) -> Iterator[tuple[list[SourceImage], list[Outcome]]]:
        """Yields the images of each chunk with their outcomes, in order, while workers process the next chunks."""
        submitted: deque[_Submitted] = deque()
        images = iter(self.source)
        while True:
            self.check_cancelled()
            while len(submitted) <= self.workers.ahead and (rows := list(islice(images, self.settings.chunk_size))):
                chunk = plan.add(rows)
                submitted.append(_Submitted(chunk, self.workers.submit(chunk.images, chunk.known)))
            if not submitted:
                return
            chunk, outcomes = submitted.popleft()
            yield (
                [*chunk.images, *(repeat.image for repeat in chunk.repeats)],
                [*outcomes.result(), *(repeat.outcome for repeat in chunk.repeats)],
            )

    def _read_digests(self, item_id: str) -> dict[str, str]:
        return self.gallery.digests(item_id, self.bundle.id)

    def _write(self, images: list[SourceImage], outcomes: list[Outcome]) -> None:
        """Writes the items and new images of a chunk in one transaction."""
        pairs = [pair for pair in zip(images, outcomes, strict=True) if not isinstance(pair[1], Reject)]
        entries = [
            (item, [outcome for _, outcome in group if isinstance(outcome, NewImage)])
            for item, group in groupby(pairs, key=lambda pair: pair[0].item)
        ]
        if entries:
            self.gallery.upsert(entries, self.bundle.id)

    # Deleting

    def _delete_missing(self, plan: EmbeddingPlan) -> None:
        """Removes what is no longer in the source, unless that is suspiciously much.

        An item without images counts as one image.
        """
        missing = [pair for pair in self.gallery.image_ids() if not plan.has_image(*pair)]
        images = {
            item_id: [image for _, image in group] for item_id, group in groupby(missing, key=lambda pair: pair[0])
        }
        empty: dict[str, list[str]] = {
            item.id: [] for item in self._items() if item.id not in images and not plan.has_item(item.id)
        }
        count, total = len(missing) + len(empty), self.gallery.stats().images + len(empty)
        if count > self.options.max_delete * total:
            raise ReindexError(
                f"{count} of {total} images{' and items without images' if empty else ''} are not in the source, "
                f"more than {self.options.max_delete:.0%}; nothing was deleted or activated.",
                "Check the source; if it is right, run again with a larger --max-delete.",
            )
        batches, deleted = iter((images | empty).items()), 0
        while batch := dict(islice(batches, self.settings.chunk_size)):
            self.check_cancelled()
            items = [item_id for item_id in batch if not plan.has_item(item_id)]
            self.gallery.delete(items)
            self.gallery.upsert([], self.bundle.id, without={key: batch[key] for key in batch.keys() - set(items)})
            deleted += sum(len(image_ids) or 1 for image_ids in batch.values())
            self.report(deleted=deleted)

    def _items(self) -> Iterator[Item]:
        """Yields every item of the gallery."""
        after: str | None = ""
        while after is not None:
            self.check_cancelled()
            items, after = self.gallery.scan(after=after, count=self.settings.scan_size)
            yield from items

    # Activating

    def _activate(self, queries: Source | None) -> int:
        """Builds the index, checks a bundle that is not active yet, and activates it."""
        is_new = self.gallery.active_bundle() != self.bundle.id
        if is_new:
            self._check_completeness()
        report = self.gallery.prepare(self.bundle.id)
        if is_new and report.scans and not self.options.allow_slow_index:
            raise ReindexError(
                f"The new index does not reach a recall@10 of {report.target:.4f} at any effort; it was not activated.",
                "Check the model: its vectors have no structure. To search all vectors instead, slowly, run again with "
                "--allow-slow-index.",
            )
        if queries is not None:
            self._check_recall(queries, is_new)
        self.check_cancelled()
        return self.gallery.activate(self.bundle.id)

    def _check_completeness(self) -> None:
        """Fails if many images lack a vector of the new bundle and would disappear from searches; reports a few."""
        missing, images = self.gallery.images_without(self.bundle.id), self.gallery.stats().images
        problem = f"{missing} of the gallery's {images} images have no vector of bundle {self.bundle.id}"
        if missing > self.options.max_delete * images:
            raise ReindexError(
                f"{problem} and would disappear from searches; it was not activated.",
                "Give a source with all items, or run again with a larger --max-delete.",
            )
        if missing:
            self.report(message=f"{problem} and are no longer found.")

    def _check_recall(self, queries: Source, is_new: bool) -> None:
        recall, expected = self._measure_recall(queries), self.options.expect_recall or 0.0
        self.report(message=f"{self.job.record.message} Recall@1 of the labelled queries is {recall:.4f}.".strip())
        if recall < expected:
            raise ReindexError(
                f"Recall@1 of the labelled queries is {recall:.4f}, below {expected:.4f}; "
                + ("the bundle was not activated." if is_new else "the bundle was active before and still is."),
                "Train a better model, or lower --expect-recall.",
            )

    def _measure_recall(self, queries: Source) -> float:
        """Returns the share of labelled photos for which a search of the new vectors ranks their own item first."""
        embedder, right, total = Embedder(self.bundle), 0, 0
        images = iter(queries)
        while block := list(islice(images, self.settings.query_batch)):
            vectors = embedder.embed(np.stack([self._load_query(queries, image.place) for image in block]))
            found = self.gallery.search(vectors, bundle_id=self.bundle.id, top=1, rehearsal=True)
            right += sum(
                hits[0].item.id == image.item.id for hits, image in zip(found.hits, block, strict=True) if hits
            )
            total += len(block)
        return right / total

    def _load_query(self, queries: Source, place: str) -> NDArray[np.uint8]:
        try:
            return load_pixels(queries.read(place), self.bundle.preprocessing)
        except ImageError as error:
            raise ReindexError(
                f"The labelled query {place} cannot be used: {error.problem}", "Fix or remove it, and run again."
            ) from error


class _RejectsFile:
    """A CSV file with the rejects of the last run; it is removed when there are none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = [Reject._fields]
        try:
            path.open("a").close()
            # A device is kept, and so is a link, which may be /dev/stdout.
            if path.is_file() and not path.is_symlink():
                _check_rejects(path)
                path.unlink()
        except OSError as error:
            raise ReindexError(
                f"Rejects cannot be written to {path}: {error.strerror}.", "Name another file with --rejects."
            ) from error

    def write(self, rejects: Sequence[Reject]) -> None:
        """Appends rejects; the header is written before the first."""
        if rejects:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*self._header, *(map(_escape_formula, reject) for reject in rejects)])
            self._header = []


def _check_rejects(path: Path) -> None:
    """Refuses to replace a file that is not the rejects of an earlier run, such as the catalogue."""
    with path.open("rb") as file:
        first = file.readline(1000).strip()
    if first and first != ",".join(Reject._fields).encode():
        raise ReindexError(f"{path} exists and is not a file of rejects.", "Name another file with --rejects.")


def _escape_formula(cell: str) -> str:
    """Quotes a cell that a spreadsheet would run as a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
