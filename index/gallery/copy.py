"""Copies a gallery into another one, of any engine, while the source is in use.

A copy is a synchronisation: it compares both galleries item by item, in the order of their ids, and writes what
differs. So it can be repeated, and continued after a kill at any point.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from index._util.models import Frozen
from index.errors import LookalikeError
from index.gallery.contents import Contents, ItemOutline, Summary, describe_version, read_outlines, summarize
from index.gallery.errors import StoreReadOnly
from index.gallery.item_sync import ItemSync, Plan, plan_item
from index.gallery.jobs import Job
from index.gallery.store.base import BundleRow, ItemStore, StoreReader
from index.rankings import StoredRanking

CopyProgress = Callable[[int, int, str], None]
"""Progress callback: (images done, images in total, what it does)."""


def no_progress(done: int, total: int, stage: str) -> None:
    """Ignores progress."""


BATCH = 500
"""Images, items or deletions that are written together."""
SETTLED_ITEMS = 500
"""A pass that wrote no more items is the last one, although the source has changed since."""


class CopyStopped(LookalikeError):
    """A copy was stopped by its user; the same command continues it."""

    kind = "copy-stopped"


class CopyReport(Frozen):
    """The result of a copy: what it wrote, and the contents of both galleries afterwards."""

    passes: int
    written: int
    """Items that were added or changed, and those that a later pass changed again."""
    deleted: int
    source: Contents
    target: Contents

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same content, and the same bundles are active and previous."""
        return self.source.is_equal_to(self.target)


def copy_gallery(
    source: ItemStore,
    target: ItemStore,
    *,
    address: str,
    activate: Callable[[str], object],
    drop: Callable[[str], None],
    replace: bool = False,
    on_start: Callable[[Job], None] = lambda job: None,
    on_progress: CopyProgress = no_progress,
) -> CopyReport:
    """Makes the target equal to the source, compares both, and then activates the source's active bundle.

    The target must be empty or the copy of an earlier call, unless `replace` is set. `address` names the source in the
    target's job history; `activate` builds the index of a bundle in the target and activates it, `drop`
    removes a bundle.
    """
    if target.is_read_only:
        raise StoreReadOnly("The target of the copy is read-only.", "Make it writable, or name another target.")
    label = f"copy of {_public_address(address)}"
    if not replace:
        _check_target(target, label)
    active = source.read.head().bundle
    job = target.jobs.begin(label, active.id if active else "none", exclusive=True)
    job.hold()
    try:
        _check_different(source, target, address, job)
        on_start(job)
        report = _Copy(source, target, job, on_progress, activate=activate, drop=drop).run()
    except BaseException as error:
        is_stop = isinstance(error, CopyStopped | KeyboardInterrupt)
        job.update(state="cancelled" if is_stop else "failed", message=str(error))
        raise
    job.update(
        state="done" if report.is_equal else "failed",
        revision=target.read.revision(),
        message=f"revision {report.source.revision} of the source" if report.is_equal else "the copy differs",
    )
    return report


def check_addresses(source: str, target: str) -> None:
    """Refuses to copy a gallery to itself."""
    are_folders = "://" not in source + target
    if source == target or (are_folders and Path(source).resolve() == Path(target).resolve()):
        raise LookalikeError(f"{source} is both the source and the target.", "Name another target.")


def compare_galleries(
    source: ItemStore, target: ItemStore, *, on_progress: CopyProgress = no_progress
) -> tuple[Contents, Contents]:
    """Reads everything that both galleries hold, each as of one instant."""
    with source.open_reader() as reader, target.open_reader() as copied:
        return _summarize(reader, "source", on_progress), _summarize(copied, "target", on_progress)


def _summarize(
    reader: StoreReader, name: str, on_progress: CopyProgress, *, bundles: Collection[str] | None = None
) -> Contents:
    total = reader.counts()[1]
    return summarize(reader, lambda done: on_progress(done, total, f"Verifying the {name}"), bundles=bundles)


def _public_address(address: str) -> str:
    """Returns an address without its passwords, and a folder with its full path."""
    if "://" not in address:
        return str(Path(address).resolve())
    return re.sub(r"://[^@/\s]*@", "://", address)


def _check_target(target: ItemStore, label: str) -> None:
    """Refuses a target that a copy might damage: one with other content, or that was written to since its last copy."""
    if target.read.counts() == (0, 0) and not target.read.bundles() and not target.read.rankings():
        return
    last = next(iter(target.jobs.newest(1)), None)
    remedy = "Name a new gallery, or make it equal to the source with --replace."
    if last is None or last.source != label:
        raise LookalikeError("The target has other content than a copy of this source.", remedy)
    if last.state == "done" and last.revision != target.read.revision():
        raise LookalikeError("The target was written to since it was copied; these writes would be lost.", remedy)


def _check_different(source: ItemStore, target: ItemStore, address: str, job: Job) -> None:
    """Refuses a source that is the target under another address: it has the job that was just begun there."""
    if "://" in address and any(
        (one.id, one.started, one.source) == (job.record.id, job.record.started, job.record.source)
        for one in source.jobs.newest(1)
    ):
        raise LookalikeError("Source and target are the same gallery.", "Name another target.")


class _Pass(NamedTuple):
    """The result of a pass: items written and deleted, and the contents of both sides if it compared equal ones."""

    changes: int
    contents: tuple[Contents, Contents] | None


class _Copy:
    """One run of a copy."""

    def __init__(
        self,
        source: ItemStore,
        target: ItemStore,
        job: Job,
        on_progress: CopyProgress,
        *,
        activate: Callable[[str], object],
        drop: Callable[[str], None],
    ) -> None:
        self._source, self._target, self._job, self._on_progress = source, target, job, on_progress
        self._activate, self._drop = activate, drop
        self._passes = self._written = self._deleted = 0

    def run(self) -> CopyReport:
        last_changes = 0
        while True:
            with self._source.open_reader() as reader:
                changes, contents = self._run_pass(reader)
                # A source that changes faster than it is copied would be followed forever.
                is_settled = changes <= SETTLED_ITEMS or 0 < last_changes < 2 * changes
                if is_settled or self._source.read.revision() == reader.revision():
                    return self._finish(reader, *(contents or self._summarize(reader)))
            last_changes = changes

    def _run_pass(self, reader: StoreReader) -> _Pass:
        """Writes what differs from one instant of the source."""
        self._passes += 1
        before = self._written + self._deleted
        bundles = reader.bundles()
        ids = [row.id for row in bundles]
        sync = ItemSync(reader, self._target, bundles)
        self._keep_bundles(bundles)
        sync.add_bundles()
        revision, total = self._target.read.revision(), reader.counts()[1]
        self._job.update(stage="copying", total=total, done=0)
        wanted, found = Summary(ids), Summary(ids)
        for done, plans, surplus in _batches(reader, self._target.read, wanted, found, set(ids)):
            self._check_stop()
            sync.write(plans)
            if surplus:
                self._target.delete(surplus)
            self._written += len(plans)
            self._deleted += len(surplus)
            self._job.update(done=done, deleted=self._deleted)
            self._on_progress(done, total, self._stage())
        self._drop_others(ids)
        self._copy_rankings(reader)
        for summary, read in ((wanted, reader), (found, self._target.read)):
            summary.add_rankings(read.ranking_versions())
        head = self._target.read.head()
        # Nothing was written, also by others: what was read of the target is what it holds.
        is_equal = head.revision == revision
        contents = (wanted.contents(reader.head()), found.contents(head)) if is_equal else None
        return _Pass(self._written + self._deleted - before, contents)

    def _stage(self) -> str:
        record = self._job.record
        seconds = max(time.time() - record.started, 0.001)
        return f"Pass {self._passes}, {self._written:,} items written, {self._written / seconds:,.0f}/s"

    def _check_stop(self) -> None:
        if self._job.stopping:
            raise CopyStopped("The copy was stopped before its end.", "Repeat the command to continue it.")

    def _keep_bundles(self, bundles: Iterable[BundleRow]) -> None:
        for row in bundles:
            if self._source.has_bundle(row.id) and not self._target.has_bundle(row.id):
                try:
                    kept = self._source.load_bundle(row.id)
                except LookalikeError:
                    if self._source.read.bundle(row.id):
                        raise
                    continue  # dropped since the pass began: the next one does not see it
                self._target.keep_bundle(kept)

    def _copy_rankings(self, reader: StoreReader) -> None:
        """Makes the versions of all rankings equal; those of one that differs are written again."""
        wanted, found = (_versions_by_name(read.ranking_versions()) for read in (reader, self._target.read))
        for name in wanted.keys() | found.keys():
            versions, copied = wanted.get(name, []), found.get(name, [])
            if list(map(describe_version, versions)) != list(map(describe_version, copied)):
                self._target.delete_ranking(name)
                for one in versions:
                    self._target.put_ranking(name, one.ranking, stored=one.stored)

    def _drop_others(self, wanted: Collection[str]) -> None:
        active = self._target.read.head().bundle
        for row in self._target.read.bundles():
            if row.id not in wanted and (active is None or row.id != active.id):
                self._drop(row.id)

    def _summarize(self, reader: StoreReader) -> tuple[Contents, Contents]:
        self._job.update(stage="verifying")

        def show(done: int, total: int, stage: str) -> None:
            self._check_stop()
            self._on_progress(done, total, stage)

        source = _summarize(reader, "source", show)
        with self._target.open_reader() as copied:
            # Another bundle may still be active in the target; it is dropped after the source's is activated.
            return source, _summarize(copied, "target", show, bundles=source.vectors.keys())

    def _finish(self, reader: StoreReader, source: Contents, target: Contents) -> CopyReport:
        if source.has_content_of(target):
            self._job.update(stage="building")
            self._activate_as(reader)
            self._drop_others(source.vectors.keys())
            head = self._target.read.head()
            active, previous = (row.id if row else None for row in (head.bundle, head.previous))
            target = target.model_copy(update={"active": active, "previous": previous})
        return CopyReport(
            passes=self._passes, written=self._written, deleted=self._deleted, source=source, target=target
        )

    def _activate_as(self, reader: StoreReader) -> None:
        """Activates what is active in the source, after what was active before it, and builds the indexes of both."""
        wanted, found = reader.head(), self._target.read.head()
        is_same = _ids(wanted.bundle, wanted.previous) == _ids(found.bundle, found.previous)
        rows = [wanted.bundle] if is_same else [wanted.previous, wanted.bundle]
        for row in rows:
            if row is None:
                continue
            if reader.image_count(row.key):
                total = reader.image_count(row.key)
                self._on_progress(0, total, f"Building the index of {row.id}")
                self._activate(row.id)
            elif (empty := self._target.read.bundle(row.id)) is not None:
                self._target.set_active(empty)


def _versions_by_name(versions: Iterable[StoredRanking]) -> dict[str, list[StoredRanking]]:
    """Returns the versions of each ranking, the oldest first."""
    found: dict[str, list[StoredRanking]] = {}
    for one in versions:
        found.setdefault(one.name, []).insert(0, one)
    return found


def _ids(*rows: BundleRow | None) -> list[str | None]:
    return [row.id if row else None for row in rows]


def _batches(
    reader: StoreReader, copied: StoreReader, left: Summary, right: Summary, bundles: Collection[str]
) -> Iterator[tuple[int, list[Plan], list[str]]]:
    """Yields images compared so far, items to write and ids to delete, some hundreds at a time.

    Adds all items of both sides to their summaries.
    """
    done = seen = images = 0
    plans: list[Plan] = []
    surplus: list[str] = []
    for wanted, found in _pair(read_outlines(reader), read_outlines(copied)):
        seen += 1
        if found:
            right.add(found)
        if wanted:
            left.add(wanted)
        if wanted is None:
            assert found
            surplus.append(found.item.id)
        else:
            done += len(wanted.images)
            plan = plan_item(wanted, found, bundles)
            if plan:
                plans.append(plan)
                images += len(plan.image_ids)
        if max(len(plans), images, len(surplus), seen // 8) >= BATCH:
            yield done, plans, surplus
            plans, surplus, seen, images = [], [], 0, 0
    yield done, plans, surplus


def _pair(
    wanted: Iterator[ItemOutline], found: Iterator[ItemOutline]
) -> Iterator[tuple[ItemOutline | None, ItemOutline | None]]:
    """Yields the items of both galleries in the order of their ids, equal ids together."""
    left, right = next(wanted, None), next(found, None)
    while left or right:
        if right is None or (left and left.item.id < right.item.id):
            yield left, None
            left = next(wanted, None)
        elif left is None or right.item.id < left.item.id:
            yield None, right
            right = next(found, None)
        else:
            # Read ahead before the caller writes: items that it adds lie before the next one of the target.
            pair, right = (left, right), next(found, None)
            yield pair
            left = next(wanted, None)
