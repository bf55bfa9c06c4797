"""Re-indexing: a source into a gallery, embedding only what is new, and making a new model live without a gap."""

import csv
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from index.bundle import Bundle
from index.embedder import Embedder
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.images import load_pixels
from index.items import Item, NewImage
from index.jobs import Job, JobRecord, opened_jobs
from index.sources import Source, SourceImage
from index.workers import LocalWorkers, Outcome, Reject, Workers

_CHUNK = 128
"""Images of one transaction: large enough to fill batches, small enough to hold in memory and to lose to a kill."""
_AHEAD = 3
"""Chunks that are read and embedded before the oldest is written."""
_QUERIES = 64


class Rules(NamedTuple):
    """What a job may do, and when it must fail instead."""

    delete_missing: bool = False
    """Removes the items and images that the source no longer names."""
    most_deleted: float = 0.2
    """Share of the gallery's images beyond which nothing is deleted, and no bundle without them goes live."""
    force: bool = False
    """Goes beyond that share, and below the recall that was aimed at."""
    most_rejected: float = 1.0
    """Share of the source's images beyond which the job fails."""
    queries: Source | None = None
    """Photos with the item that a search must answer first, to test a bundle with before it goes live."""
    expected_recall: float = 0.0


PLAIN = Rules()


class ReindexError(LookalikeError):
    """A job that must not go on; all that it wrote stays, and nothing went live."""

    kind = "reindex"


class Cancelled(LookalikeError):
    """The job was asked to end."""

    kind = "cancelled"

    def __init__(self) -> None:
        super().__init__(
            "The job was stopped; what it embedded is kept.", "Run the same command again: it goes on where it was."
        )


def run_reindex(
    source: Source,
    *,
    gallery: str | Path,
    bundle: Bundle,
    rejects_file: Path,
    rules: Rules = PLAIN,
    job_id: int | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_progress: Callable[[JobRecord], None] = lambda record: None,
) -> JobRecord:
    """A whole job on this machine: opens the gallery, keeps the job's record, and closes all at the end.

    `job_id` names a record that was begun for this job; `on_start` is handed the job, to stop it.
    """
    opened = open_gallery(gallery, create=True)
    try:
        with opened_jobs(Path(gallery)) as log:
            job = log.begin(source.name, bundle.id) if job_id is None else log.adopt(job_id)
            on_start(job)
            workers = LocalWorkers(source, Embedder(bundle))
            try:
                return reindex(
                    source,
                    gallery=opened,
                    bundle=bundle,
                    workers=workers,
                    job=job,
                    rejects_file=rejects_file,
                    rules=rules,
                    on_progress=on_progress,
                )
            finally:
                workers.close()
    finally:
        opened.close()


def reindex(
    source: Source,
    *,
    gallery: Gallery,
    bundle: Bundle,
    workers: Workers,
    job: Job,
    rejects_file: Path,
    rules: Rules = PLAIN,
    on_progress: Callable[[JobRecord], None] = lambda record: None,
) -> JobRecord:
    """Indexes a source, tests the result and makes it live; tells the job how far it is and how it ended."""
    run = _Run(source, gallery, bundle, workers, job, rules, on_progress)
    try:
        run.tell(stage="checking")
        run.tell(total=source.check().images)
        gallery.keep_bundle(bundle)
        with _Seen() as seen:
            _embed_all(run, seen, rejects_file)
            if rules.delete_missing:
                run.tell(stage="deleting")
                run.tell(deleted=_delete_missing(run, seen))
        run.tell(stage="building")
        generation = _go_live(run)
        rejected = job.record.rejected
        run.tell(state="partial" if rejected else "done", generation=generation)
    except Cancelled as end:
        run.tell(state="cancelled", message=str(end))
        raise
    except LookalikeError as error:
        run.tell(state="failed", message=str(error))
        raise
    except BaseException as error:
        run.tell(state="failed", message=f"{type(error).__name__}: {error}")
        raise
    return job.record


class _Run(NamedTuple):
    """What every step of a job needs."""

    source: Source
    gallery: Gallery
    bundle: Bundle
    workers: Workers
    job: Job
    rules: Rules
    on_progress: Callable[[JobRecord], None]

    def tell(self, **values: object) -> None:
        self.job.update(**values)
        self.on_progress(self.job.record)


def _embed_all(run: _Run, seen: "_Seen", rejects_file: Path) -> None:
    """Embeds and writes the whole source, chunk by chunk; between two chunks it can be stopped or killed."""
    record = run.job.record
    embedded = unchanged = rejected = 0
    run.tell(stage="embedding")
    rejects = _RejectsFile(rejects_file)
    for chunk, outcomes in _worked(run):
        _store(run, chunk, outcomes)
        seen.add((image.item.id, image.image_id) for image in chunk)
        bad = [outcome for outcome in outcomes if isinstance(outcome, Reject)]
        rejects.write(bad)
        rejected += len(bad)
        fresh = sum(isinstance(outcome, NewImage) for outcome in outcomes)
        embedded += fresh
        unchanged += len(outcomes) - fresh - len(bad)
        run.tell(done=embedded + unchanged + rejected, embedded=embedded, unchanged=unchanged, rejected=rejected)
        if rejected > run.rules.most_rejected * run.job.record.total:
            raise ReindexError(
                f"{rejected} of {run.job.record.total} images were rejected, more than {run.rules.most_rejected:.0%}.",
                f"See {rejects_file} for each; allow more with --max-rejects.",
            )
    if not embedded + unchanged:
        raise ReindexError(
            f"None of the {run.job.record.total} images of {record.source} could be indexed.",
            f"See {rejects_file} for each.",
        )


def _worked(run: _Run) -> Iterator[tuple[list[SourceImage], list[Outcome]]]:
    """The chunks in order with what became of them, some of them worked on ahead."""
    waiting: deque[tuple[list[SourceImage], Callable[[], list[Outcome]]]] = deque()
    images = iter(run.source)
    while True:
        if run.job.stopping:
            raise Cancelled
        while len(waiting) <= _AHEAD and (chunk := list(islice(images, _CHUNK))):
            known = run.gallery.known(dict.fromkeys(image.item.id for image in chunk), run.bundle.id)
            waiting.append((chunk, run.workers.submit(chunk, known).result))
        if not waiting:
            return
        chunk, outcomes = waiting.popleft()
        yield chunk, outcomes()


def _store(run: _Run, chunk: list[SourceImage], outcomes: list[Outcome]) -> None:
    """Writes the items and new images of a chunk in one transaction."""
    entries: list[tuple[Item, list[NewImage]]] = []
    usable = (
        (image, outcome) for image, outcome in zip(chunk, outcomes, strict=True) if not isinstance(outcome, Reject)
    )
    for _, group in groupby(usable, key=lambda pair: pair[0].item.id):
        pairs = list(group)
        new = [outcome for _, outcome in pairs if isinstance(outcome, NewImage)]
        entries.append((pairs[-1][0].item, new))
    if entries:
        run.gallery.upsert(entries, run.bundle.id)


def _delete_missing(run: _Run, seen: "_Seen") -> int:
    """Removes what left the source, unless that is suspiciously much."""
    images = run.gallery.stats().images
    missing = [pair for pair in run.gallery.image_ids() if pair not in seen]
    if len(missing) > run.rules.most_deleted * images and not run.rules.force:
        raise ReindexError(
            f"{len(missing)} of {images} images left the source, more than {run.rules.most_deleted:.0%}; "
            "nothing was deleted and nothing went live.",
            "Check the source; if it is right, run again with --force or a larger --max-delete.",
        )
    by_item = {item_id: [image for _, image in group] for item_id, group in groupby(missing, key=lambda pair: pair[0])}
    gone = [item_id for item_id, ids in by_item.items() if not seen.has_item(item_id)]
    run.gallery.delete(gone)
    for item_id in by_item.keys() - set(gone):
        run.gallery.delete_images(item_id, by_item[item_id])
    return len(missing)


def _go_live(run: _Run) -> str:
    """Builds the generation, and when the bundle is not yet the live one tests it before it is."""
    gallery, bundle, rules = run.gallery, run.bundle, run.rules
    stats = gallery.stats()
    tested = stats.bundle_id != bundle.id or rules.queries is not None
    if tested:
        missing = gallery.images_without(bundle.id)
        if missing > rules.most_deleted * stats.images and not rules.force:
            raise ReindexError(
                f"{missing} of the gallery's {stats.images} images have no vector of bundle {bundle.id} and would "
                "vanish from the searches; it did not go live.",
                "Give a source with all items, or run again with --force.",
            )
    built = gallery.prepare(bundle.id)
    if tested and built.plan.recall < built.plan.target and not rules.force:
        raise ReindexError(
            f"The new generation's recall@10 is {built.plan.recall:.4f}, below {built.plan.target:.4f}; "
            "it did not go live.",
            "Lower the gallery's target, or run again with --force.",
        )
    if rules.queries is not None:
        recall = _labelled_recall(run, rules.queries)
        run.tell(message=f"Recall@1 of the labelled queries is {recall:.4f}.")
        if recall < rules.expected_recall:
            raise ReindexError(
                f"Recall@1 of the labelled queries is {recall:.4f}, below {rules.expected_recall:.4f}; the bundle did "
                "not go live.",
                "Train a better model, or expect less.",
            )
    return gallery.activate(bundle.id)


def _labelled_recall(run: _Run, queries: Source) -> float:
    """The share of labelled photos whose own item a search of the new vectors answers first."""
    embedder, right, total = Embedder(run.bundle), 0, 0
    images = iter(queries)
    while block := list(islice(images, _QUERIES)):
        pixels = [load_pixels(queries.read(image.place), run.bundle.preprocessing) for image in block]
        found = run.gallery.search(embedder.embed(np.stack(pixels)), bundle_id=run.bundle.id, top=1, rehearsal=True)
        right += sum(hits[0].item.id == image.item.id for hits, image in zip(found.hits, block, strict=True) if hits)
        total += len(block)
    return right / max(total, 1)


class _Seen:
    """Which images the source named; on disk, since a source may name more than memory holds."""

    def __enter__(self) -> "_Seen":
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE seen (item TEXT, image TEXT, PRIMARY KEY (item, image)) WITHOUT ROWID")
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def add(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", pairs)
        self._db.execute("COMMIT")

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return self._db.execute("SELECT 1 FROM seen WHERE item = ? AND image = ?", pair).fetchone() is not None

    def has_item(self, item_id: str) -> bool:
        return self._db.execute("SELECT 1 FROM seen WHERE item = ?", (item_id,)).fetchone() is not None


class _RejectsFile:
    """The rejects of the last run, one a line as they come; no file when there were none."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path

    def write(self, rejects: Sequence[Reject]) -> None:
        if rejects:
            header = [] if self._path.exists() else [Reject._fields]
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*header, *rejects])
