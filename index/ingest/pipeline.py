"""Re-indexing: writes a source into a gallery, embeds only what is new, and activates a new bundle without a gap."""

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from shlex import quote
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.files import is_disk_full
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import ImageError, load_pixels
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.errors import JobRunning, LimitExceeded, StorageFull
from index.gallery.jobs import Job
from index.gallery.types import Item, NewImage
from index.ingest.embedding_plan import EmbeddingPlan, Outcome, PlannedChunk, Reject
from index.ingest.options import ReindexOptions
from index.ingest.places import AllowedPlaces
from index.ingest.ray_workers import RayWorkers
from index.ingest.rejects import RejectsFile
from index.ingest.sources import BadRow, Source, SourceImage, rows_error
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
    grace_seconds: float = 5.0
    """How long to wait for the next vector that a service adds to an image of its own before a bundle is activated."""
    poll_seconds: float = 0.1
    """How often to look for such vectors."""
    wait_seconds: float = 2.0
    """How often to look whether another job has ended."""


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


@contextmanager
def _full_disk_errors() -> Iterator[None]:
    """Raises StorageFull when a file of the job could not be written for lack of space."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, OSError) and is_disk_full(error):
            problem = f"No space to write {error.filename or 'a file'}: {error.strerror}."
        elif getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":  # the temporary database of the plan
            problem = f"No space to write temporary files: {error}."
        else:
            raise
        raise StorageFull(problem, "Free space on its disk, and run again: the job continues from there.") from error


@_full_disk_errors()
def run_reindex(
    options: ReindexOptions,
    *,
    job_id: int | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_progress: Progress = lambda record: None,
    wait: bool = False,
    settings: PipelineSettings = DEFAULT_SETTINGS,
) -> JobRecord:
    """Runs a job from start to end: opens the gallery, keeps the job's record, starts the workers, and closes them all.

    `job_id` is a record that another process created for this job. `on_start` receives the job, to be able to stop it.
    Raises JobRunning while another job of the gallery runs, unless it should `wait` for its end.
    """
    allowed = AllowedPlaces.of(options.allow_folder, options.allow_address)
    source, bundle = _open_source(options, allowed), Bundle.load(options.bundle)
    with open_gallery(options.gallery, create=True) as gallery:
        if job_id is None:
            job = _begin(gallery, source.name, bundle.id, settings.wait_seconds if wait else None)
        else:
            job = gallery.jobs.adopt(job_id)
        job.hold()
        on_start(job)
        try:
            with _full_disk_errors():
                # Before the source is read: an item is in it, or services that store it embed for this bundle too.
                gallery.keep_bundle(bundle)
            workers = _start_workers(options, bundle, allowed)
        except (LookalikeError, OSError) as error:
            job.update(state="failed", message=str(error))
            raise
        try:
            return _Run(options, source, gallery, bundle, workers, job, on_progress, settings).run()
        finally:
            workers.close()


def _begin(gallery: Gallery, source: str, bundle_id: str, wait_seconds: float | None) -> Job:
    """Starts the record of the only running job of a gallery; two would embed the same photos."""
    while True:
        try:
            return gallery.jobs.begin(source, bundle_id, exclusive=True)
        except JobRunning as error:
            if wait_seconds is None:
                problem = f"Job {error.job_id} is running on {gallery.address}."
                remedy = f"Wait for its end with --wait, or stop it: lookalike jobs {quote(gallery.address)} --cancel"
                raise ReindexError(problem, f"{remedy} {error.job_id}.") from None
            log.warning("waiting for the end of job %s", error.job_id)
            time.sleep(wait_seconds)


def _open_source(options: ReindexOptions, allowed: AllowedPlaces) -> Source:
    return Source(
        options.source,
        columns=options.columns,
        attributes=options.attributes,
        lists=options.lists,
        images=options.images,
        format=options.format,
        mirrors=options.mirror,
        allowed=allowed,
    )


def _start_workers(options: ReindexOptions, bundle: Bundle, allowed: AllowedPlaces) -> Workers:
    return LocalWorkers(bundle, allowed=allowed) if options.ray is None else RayWorkers(options.ray, bundle, allowed)


class _Submitted(NamedTuple):
    chunk: PlannedChunk
    outcomes: "Future[list[Outcome]]"
    rejects: list[Reject]


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

    @_full_disk_errors()
    def _run_stages(self) -> None:
        self.enter("checking")
        newest = self.gallery.newest_image()
        named = self.options.queries
        queries = None if named is None else self._open_queries(named)
        summary = self.source.check()
        self.report(total=summary.images + summary.bad_rows)
        if summary.bad_rows > self.options.max_rejects * self.job.record.total:
            raise rows_error(summary)
        for warning in summary.warnings:
            self._add_message(warning)
        rejects = RejectsFile(self.options.rejects, [*self.source.places(), *(queries.places() if queries else ())])
        with EmbeddingPlan(self._read_digests, cached_items=self.settings.scan_size) as plan:
            self.enter("embedding")
            self._embed_all(plan, rejects)
            if self.options.delete_missing:
                self.enter("deleting")
                self._delete_missing(plan)
        self.enter("building")
        revision = self._activate(queries, newest)
        is_partial = self.job.record.rejected or self.job.record.missing
        self.report(state="partial" if is_partial else "done", revision=revision)

    def _open_queries(self, named: str) -> Source:
        queries = Source(
            [named],
            fallback_images=self.options.images,
            mirrors=self.options.mirror,
            allowed=self.source.allowed,
        )
        if (summary := queries.check()).bad_rows:
            raise rows_error(summary)
        return queries

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

    def _embed_all(self, plan: EmbeddingPlan, rejects: "RejectsFile") -> None:
        """Embeds and writes the source chunk by chunk; between two chunks it can be cancelled or killed."""
        embedded = unchanged = rejected = 0
        total, allowed = self.job.record.total, self.options.max_rejects
        for images, results, rows in self._work_ahead(plan):
            outcomes = self._write(images, results)
            bad = [outcome for outcome in outcomes if isinstance(outcome, Reject)]
            rejects.write([*bad, *rows])
            new = sum(isinstance(outcome, NewImage) for outcome in outcomes)
            embedded, rejected = embedded + new, rejected + len(bad) + len(rows)
            unchanged += len(outcomes) - new - len(bad)
            self.report(done=embedded + unchanged + rejected, embedded=embedded, unchanged=unchanged, rejected=rejected)
            if rejected > allowed * total:
                raise ReindexError(
                    f"{rejected} of {total} images were rejected, more than {allowed:.0%}.",
                    f"See {rejects.path} for the reasons; allow more with --max-rejects.",
                )
        if not embedded + unchanged:
            raise ReindexError(
                f"None of the {total} images of {self.job.record.source} could be indexed.",
                f"See {rejects.path} for the reasons.",
            )

    def _work_ahead(self, plan: EmbeddingPlan) -> Iterator[tuple[list[SourceImage], list[Outcome], list[Reject]]]:
        """Yields the images of each chunk with their outcomes, in order, while workers process the next chunks.

        The third are the rejects of the rows among them that could not be read.
        """
        submitted: deque[_Submitted] = deque()
        rows = self.source.rows()
        while True:
            self.check_cancelled()
            while len(submitted) <= self.workers.ahead and (block := list(islice(rows, self.settings.chunk_size))):
                bad = [row for row in block if isinstance(row, BadRow)]
                for row in bad:
                    plan.keep_item(row.item_id)
                chunk = plan.add([row for row in block if isinstance(row, SourceImage)])
                outcomes = self.workers.submit(chunk.images, chunk.known)
                submitted.append(_Submitted(chunk, outcomes, [Reject.of_row(row) for row in bad]))
            if not submitted:
                return
            chunk, outcomes, rejects = submitted.popleft()
            yield (
                [*chunk.images, *(settled.image for settled in chunk.settled)],
                [*outcomes.result(), *(settled.outcome for settled in chunk.settled)],
                rejects,
            )

    def _read_digests(self, item_id: str) -> dict[str, str]:
        return self.gallery.digests(item_id, self.bundle.id)

    def _write(self, images: list[SourceImage], outcomes: list[Outcome]) -> list[Outcome]:
        """Writes the items and new images of a chunk in one transaction; rejects those that exceed a limit."""
        while True:
            try:
                self._upsert(images, outcomes)
                return outcomes
            except LimitExceeded as error:
                outcomes = [
                    Reject.of(image, "limit", str(error)) if _is_refused(image, outcome, error) else outcome
                    for image, outcome in zip(images, outcomes, strict=True)
                ]

    def _upsert(self, images: list[SourceImage], outcomes: list[Outcome]) -> None:
        pairs = [pair for pair in zip(images, outcomes, strict=True) if not isinstance(pair[1], Reject)]
        entries = [
            (item, [outcome for _, outcome in group if isinstance(outcome, NewImage)])
            for item, group in groupby(pairs, key=lambda pair: pair[0].item)
        ]
        if entries:
            # The first bundle of a gallery must pass the same checks as any other before it is activated.
            self.gallery.upsert(entries, self.bundle.id, activate_first=False)

    # Deleting

    def _delete_missing(self, plan: EmbeddingPlan) -> None:
        """Removes what is no longer in the source, unless that is suspiciously much.

        An item without images counts as one image. A row that does not name its item may be any item's, so that
        nothing is removed.
        """
        if plan.has_item(""):
            self._add_message("Nothing was deleted, because a row of the source does not name its item.")
            return
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

    def _activate(self, queries: Source | None, newest: int) -> int:
        """Builds the index, checks a bundle that is not active yet, and activates it.

        `newest` is the key of the newest image when the job began.
        """
        is_new = self.gallery.active_bundle() != self.bundle.id
        if is_new:
            self._check_completeness(newest)
        report = self.gallery.prepare(self.bundle.id)
        if is_new and report.scans and not self.options.allow_slow_index:
            raise ReindexError(
                f"The new index does not reach a recall@10 of {report.target:.4f} at any effort; it was not activated.",
                "Check the model: its vectors have no structure. To search all vectors instead, slowly, run again with "
                "--allow-slow-index.",
            )
        if queries is not None:
            self._check_recall(queries, is_new)
        if is_new:
            missing = self._check_completeness(newest)  # again: the build may have taken hours
            if missing:
                self.report(missing=missing)
                self._add_message(
                    f"{missing} images have no vector of bundle {self.bundle.id} and are no longer found."
                )
        self.check_cancelled()
        return self.gallery.activate(self.bundle.id)

    def _check_completeness(self, newest: int) -> int:
        """Returns how many images lack a vector of the new bundle, and would disappear from searches; fails if many."""
        missing, images = self._count_missing(newest), self.gallery.stats().images
        if missing > self.options.max_delete * images:
            raise ReindexError(
                f"{missing} of the gallery's {images} images have no vector of bundle {self.bundle.id} and would "
                "disappear from searches; it was not activated.",
                "Give a source with all items, or run again with a larger --max-delete.",
            )
        return missing

    def _count_missing(self, newest: int) -> int:
        """Returns the number of images without a vector of the bundle, once services have added theirs.

        A service stores an image with the vector of the active bundle first. So those that came after `newest` may
        still get a vector, and are waited for. Images that arrive meanwhile are not counted: services add their
        vectors even after the activation.
        """
        last, lacking = self.gallery.newest_image(), partial(self.gallery.images_without, self.bundle.id)
        missing, deadline = lacking(through=last), time.monotonic() + self.settings.grace_seconds
        while missing > lacking(through=newest) and time.monotonic() < deadline:
            self.check_cancelled()
            time.sleep(self.settings.poll_seconds)
            before, missing = missing, lacking(through=last)
            if missing < before:
                deadline = time.monotonic() + self.settings.grace_seconds
        return missing

    def _add_message(self, text: str) -> None:
        self.report(message=f"{self.job.record.message} {text}".strip())

    def _check_recall(self, queries: Source, is_new: bool) -> None:
        recall, expected = self._measure_recall(queries), self.options.expect_recall or 0.0
        self._add_message(f"Recall@1 of the labelled queries is {recall:.4f}.")
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
            vectors = embedder.embed(np.stack([self._load_query(queries, image) for image in block]))
            found = self.gallery.search(vectors, bundle_id=self.bundle.id, top=1, rehearsal=True)
            right += sum(
                hits[0].item.id == image.item.id for hits, image in zip(found.hits, block, strict=True) if hits
            )
            total += len(block)
        return right / total

    def _load_query(self, queries: Source, image: SourceImage) -> NDArray[np.uint8]:
        try:
            return load_pixels(queries.read(image), self.bundle.preprocessing)
        except ImageError as error:
            raise ReindexError(
                f"The labelled query {image.place} cannot be used: {error.problem}", "Fix or remove it, and run again."
            ) from error


def _is_refused(image: SourceImage, outcome: Outcome, error: LimitExceeded) -> bool:
    if image.item.id != error.item_id or isinstance(outcome, Reject):
        return False
    return not error.image_ids or image.image_id in error.image_ids
