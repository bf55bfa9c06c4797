"""Re-indexing: a source into a gallery, embedding only what is new, and making a new model live without a gap."""

import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
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
from index.jobs import JobRecord
from index.ingest.seen_images import Again, Seen
from index.ingest.sources import Source, SourceImage
from index.ingest.workers import LocalWorkers, Outcome, Reject, Workers

_CHUNK = 128
"""Images of one transaction: large enough to fill batches, small enough to hold in memory and to lose to a kill."""
_KNOWN_ITEMS = 1024
"""Items whose photos' digests are remembered."""
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
    hire: Callable[[Source, Bundle], Workers] = LocalWorkers,
    job_id: int | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_progress: Callable[[JobRecord], None] = lambda record: None,
) -> JobRecord:
    """A whole job: opens the gallery, keeps the job's record, and closes all at the end.

    `hire` finds who reads and embeds; this process alone writes. `job_id` names a record that was begun for this job;
    `on_start` is handed the job, to stop it.
    """
    opened = open_gallery(gallery, create=True)
    try:
        job = opened.jobs.begin(source.name, bundle.id) if job_id is None else opened.jobs.adopt(job_id)
        job.hold()
        on_start(job)
        try:
            workers = hire(source, bundle)
        except LookalikeError as error:
            job.update(state="failed", message=str(error))
            raise
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
        run.enter("checking")
        if rules.queries is not None:
            rules.queries.check()
        run.tell(total=source.check().images)
        gallery.keep_bundle(bundle)
        with Seen() as seen:
            _embed_all(run, seen, _RejectsFile(rejects_file))
            if rules.delete_missing:
                run.enter("deleting")
                _delete_missing(run, seen)
        run.enter("building")
        revision = _go_live(run)
        rejected = job.record.rejected
        run.tell(state="partial" if rejected else "done", revision=revision)
    except Cancelled as end:
        run.tell(state="cancelled", message=str(end))
        raise
    except KeyboardInterrupt:
        run.tell(state="cancelled", message=str(Cancelled()))
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

    def enter(self, stage: str) -> None:
        self.go_on()
        self.tell(stage=stage)

    def go_on(self) -> None:
        if self.job.stopping:
            raise Cancelled


def _embed_all(run: _Run, seen: Seen, rejects: "_RejectsFile") -> None:
    """Embeds and writes the whole source, chunk by chunk; between two chunks it can be stopped or killed."""
    record = run.job.record
    embedded = unchanged = rejected = 0
    run.enter("embedding")
    for chunk, outcomes in _worked(run, seen):
        _store(run, chunk, outcomes)
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
                f"See {rejects.path} for each; allow more with --max-rejects.",
            )
    if not embedded + unchanged:
        raise ReindexError(
            f"None of the {run.job.record.total} images of {record.source} could be indexed.",
            f"See {rejects.path} for each.",
        )


class _Waiting(NamedTuple):
    new: list[SourceImage]
    again: list[Again]
    outcomes: Future[list[Outcome]]


def _worked(run: _Run, seen: Seen) -> Iterator[tuple[list[SourceImage], list[Outcome]]]:
    """The chunks with what became of them, in order, some of them worked on ahead."""
    waiting: deque[_Waiting] = deque()
    images = iter(run.source)
    # The rows of an item mostly lie together, but an item may have many photos all over a table.
    known_of = lru_cache(_KNOWN_ITEMS)(lambda item_id: run.gallery.digests(item_id, run.bundle.id))
    while True:
        run.go_on()
        while len(waiting) <= run.workers.ahead and (chunk := list(islice(images, _CHUNK))):
            new, again = seen.sorted_out(chunk)
            pairs = [(image.item.id, image.image_id) for image in new]
            known = {pair: digest for pair in pairs if (digest := known_of(pair[0]).get(pair[1]))}
            waiting.append(_Waiting(new, again, run.workers.submit(new, known)))
        if not waiting:
            return
        new, again, outcomes = waiting.popleft()
        yield [*new, *(image for image, _ in again)], [*outcomes.result(), *(outcome for _, outcome in again)]


def _store(run: _Run, chunk: list[SourceImage], outcomes: list[Outcome]) -> None:
    """Writes the items and new images of a chunk in one transaction."""
    entries: list[tuple[Item, list[NewImage]]] = []
    usable = (
        (image, outcome) for image, outcome in zip(chunk, outcomes, strict=True) if not isinstance(outcome, Reject)
    )
    for item, group in groupby(usable, key=lambda pair: pair[0].item):
        entries.append((item, [outcome for _, outcome in group if isinstance(outcome, NewImage)]))
    if entries:
        run.gallery.upsert(entries, run.bundle.id)


def _delete_missing(run: _Run, seen: Seen) -> None:
    """Removes what left the source, unless that is suspiciously much; an item without images counts as one."""
    total, missing = 0, []
    for pair in run.gallery.image_ids():
        total += 1
        if pair not in seen:
            missing.append(pair)
    lost = {item_id: [image for _, image in group] for item_id, group in groupby(missing, key=lambda pair: pair[0])}
    bare: dict[str, list[str]] = {
        item.id: [] for item in _items(run) if item.id not in lost and not seen.has_item(item.id)
    }
    count, total = len(missing) + len(bare), total + len(bare)
    if count > run.rules.most_deleted * total and not run.rules.force:
        raise ReindexError(
            f"{count} of {total} images{' and items without any' if bare else ''} left the source, "
            f"more than {run.rules.most_deleted:.0%}; nothing was deleted and nothing went live.",
            "Check the source; if it is right, run again with --force or a larger --max-delete.",
        )
    left = iter((lost | bare).items())
    deleted = 0
    while batch := dict(islice(left, _CHUNK)):
        run.go_on()
        gone = [item_id for item_id in batch if not seen.has_item(item_id)]
        run.gallery.delete(gone)
        run.gallery.upsert([], run.bundle.id, without={key: batch[key] for key in batch.keys() - set(gone)})
        deleted += sum(len(images) or 1 for images in batch.values())
        run.tell(deleted=deleted)


def _items(run: _Run) -> Iterator[Item]:
    """Every item of the gallery."""
    after: str | None = ""
    while after is not None:
        run.go_on()
        items, after = run.gallery.scan(after=after, count=_KNOWN_ITEMS)
        yield from items


def _go_live(run: _Run) -> int:
    """Builds the generation, and when the bundle is not yet the live one tests it before it is."""
    gallery, bundle, rules = run.gallery, run.bundle, run.rules
    is_new = gallery.active_bundle() != bundle.id
    if is_new:
        _check_completeness(run)
        plan = gallery.prepare(bundle.id)
        if plan.scans and not rules.force:
            raise ReindexError(
                f"No effort of the new generation's index reaches a recall@10 of {plan.target:.4f}, so that searches "
                "would compare with every vector, slowly; it did not go live.",
                "Look at the model: its vectors have no structure. If it is right, run again with --force.",
            )
    if rules.queries is not None:
        recall = _labelled_recall(run, rules.queries)
        run.tell(message=f"{run.job.record.message} Recall@1 of the labelled queries is {recall:.4f}.".strip())
        if recall < rules.expected_recall and not rules.force:
            raise ReindexError(
                f"Recall@1 of the labelled queries is {recall:.4f}, below {rules.expected_recall:.4f}; "
                + ("the bundle did not go live." if is_new else "the bundle was live before, and is still."),
                "Train a better model, or expect less.",
            )
    run.go_on()
    return gallery.activate(bundle.id)


def _check_completeness(run: _Run) -> None:
    """Refuses to let many images vanish from the searches, and tells of a few."""
    missing = run.gallery.images_without(run.bundle.id)
    images = sum(1 for _ in run.gallery.image_ids())
    told = f"{missing} of the gallery's {images} images have no vector of bundle {run.bundle.id}"
    if missing > run.rules.most_deleted * images and not run.rules.force:
        raise ReindexError(
            f"{told} and would vanish from the searches; it did not go live.",
            "Give a source with all items, or run again with --force.",
        )
    if missing:
        run.tell(message=f"{told} and are no longer found.")


def _labelled_recall(run: _Run, queries: Source) -> float:
    """The share of labelled photos whose own item a search of the new vectors answers first."""
    embedder, right, total = Embedder(run.bundle), 0, 0
    images = iter(queries)
    while block := list(islice(images, _QUERIES)):
        vectors = embedder.embed(np.stack([_query_pixels(run, queries, image.place) for image in block]))
        found = run.gallery.search(vectors, bundle_id=run.bundle.id, top=1, rehearsal=True)
        right += sum(hits[0].item.id == image.item.id for hits, image in zip(found.hits, block, strict=True) if hits)
        total += len(block)
    return right / total


def _query_pixels(run: _Run, queries: Source, place: str) -> NDArray[np.uint8]:
    try:
        return load_pixels(queries.read(place), run.bundle.preprocessing)
    except ImageError as error:
        raise ReindexError(
            f"The labelled query {place} cannot be used: {error.problem}", "Mend or remove it, and run again."
        ) from error


class _RejectsFile:
    """The rejects of the last run, one a line as they come; no file when there were none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = [Reject._fields]
        try:
            path.open("a").close()
            # A device stays, and so does a link, which may be /dev/stdout.
            if path.is_file() and not path.is_symlink():
                path.unlink()
        except OSError as error:
            raise ReindexError(
                f"Rejects cannot be written to {path}: {error.strerror}.", "Name another file with --rejects."
            ) from error

    def write(self, rejects: Sequence[Reject]) -> None:
        if rejects:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*self._header, *rejects])
            self._header = []
