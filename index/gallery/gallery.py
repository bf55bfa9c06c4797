"""The gallery: one class over an item store and a vector index."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self, Unpack

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import backup, copy, export, verify
from index.gallery.addresses import redact
from index.gallery.bundle_stats import BundleStats, list_bundles
from index.gallery.contents import Contents
from index.gallery.errors import (
    ItemMissing,
    SearchError,
    StoreError,
    StoreUnavailable,
)
from index.gallery.examples import Example, check_examples
from index.gallery.examples import combine as combine_examples
from index.gallery.expiry import current_instant, hide_expired, is_expired
from index.gallery.filters import Filter
from index.gallery.hints import find_mismatches
from index.gallery.jobs import Job, JobHistory, needed_bundles
from index.gallery.maintenance import ExpiredItems, Maintainer, RepeatedTask
from index.gallery.ranking.rules import Rules
from index.gallery.searches import Searches, check_vectors
from index.gallery.settings import GallerySettings
from index.gallery.store.base import ItemStore
from index.gallery.types import (
    Bounds,
    BuildReport,
    Facet,
    GalleryStats,
    IndexStats,
    Item,
    ItemPage,
    NeededBundles,
    NewImage,
    Progress,
    SearchResult,
    StoredItem,
    no_progress,
)
from index.gallery.vectors.base import VectorIndex
from index.gallery.views import Views, find_bundle, no_vectors
from index.items import EXPIRES_AT
from index.rankings import RANKING_NAME, Combination, Ranking, StoredRanking

log = logging.getLogger(__name__)

Versions = Mapping[str, int | None]
_ITEM_BLOCK = 512
"""Items that are read at a time."""


class Gallery:
    """Items, their images, and the vectors of one or more bundles, of which one is active.

    A write is acknowledged after its commit, and from then on visible to every search of every process. Writes return
    the gallery's revision after them, which grows with each write that changed something. `expected` maps item ids to
    the versions that a write is based on, None for an item that must not exist; if one differs, nothing is written and
    VersionConflict is raised. Any number of threads may use a gallery.
    """

    def __init__(
        self,
        store: ItemStore,
        index: VectorIndex,
        *,
        address: str,
        maintain: bool = False,
        cache: Path | None = None,
        settings: GallerySettings | None = None,
    ) -> None:
        """`maintain` follows writes and compacts in the background: for a process that keeps running.

        `address` and `cache` are what a process that compacts opens.
        """
        self.address = redact(address)
        """For messages: without passwords."""
        self._store = store
        self._index = index
        self._settings = settings or GallerySettings()
        self._maintainer = (
            Maintainer(address, index, self._settings, cache=cache) if maintain and store.can_record_indexes else None
        )
        self._views = Views(store, index, self._maintainer, self._settings)
        self._searches = Searches(store, self._views)
        for problem in verify.find_lost_writes(store, index):
            log.error("%s: %s; see `lookalike gallery verify`", self.address, problem)
        self._expired = ExpiredItems(store, self._settings)
        self._keeping_up_to = -1
        self._background = RepeatedTask(self._keep_up, self._settings.follow_seconds, "follow") if maintain else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases files, connections and threads."""
        if self._background:
            self._background.close()
        self._views.close()
        if self._maintainer:
            self._maintainer.close()
        self._index.close()
        self._store.close()

    @property
    def fault(self) -> LookalikeError | None:
        """Why searches may fail or be outdated, as found in the background; None without `maintain`."""
        return self._background.error if self._background else None

    # Writes

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Versions | None = None,
        without: Mapping[str, Iterable[str]] | None = None,
        activate_first: bool = True,
    ) -> int:
        """Stores items and images with their vectors; other images of an item stay, except those in `without`.

        If the gallery has no active bundle, this one becomes it unless `activate_first` is false.
        """
        return self._store.upsert(
            entries, bundle_id, expected=expected or {}, without=without or {}, activate_first=activate_first
        )

    def delete(self, item_ids: Iterable[str], *, expected: Versions | None = None) -> int:
        """Removes items with their images; unknown ids are ignored."""
        return self._store.delete(item_ids, expected=expected or {})

    def delete_images(self, item_id: str, image_ids: Iterable[str], *, expected: Versions | None = None) -> int:
        """Removes some images of an item; unknown ids are ignored."""
        return self._store.upsert([], "", expected=expected or {}, without={item_id: image_ids})

    # Bundles

    def active_bundle(self) -> str | None:
        """Returns the id of the active bundle; None before the first one is activated."""
        return self._views.active_bundle()

    def needed_bundles(self) -> NeededBundles:
        """Returns the bundles of which a new image needs a vector: the active one and those that jobs prepare.

        A prepared bundle has a copy in the gallery; dropping it ends its preparation.
        """
        return needed_bundles(self.jobs, self.active_bundle, self._store.has_bundle)

    def bundles(self) -> list[BundleStats]:
        """Returns every bundle with vectors, its origin and its use, the active one first."""
        return list_bundles(self._store, self.needed_bundles())

    def keep_bundle(self, bundle: Bundle) -> None:
        """Keeps a copy of a bundle, so that whoever opens the gallery can embed queries for it."""
        self._store.keep_bundle(bundle)

    def has_bundle(self, bundle_id: str) -> bool:
        """Whether there is a copy of a bundle; dropping the bundle removes it."""
        return self._store.has_bundle(bundle_id)

    def load_bundle(self, bundle_id: str) -> Bundle:
        """Returns the copy of a bundle."""
        return self._store.load_bundle(bundle_id)

    def prepare(self, bundle_id: str, *, on_progress: Progress = no_progress) -> BuildReport:
        """Builds the index of a bundle's vectors without activating it, and returns what was measured."""
        find_bundle(self._store.read, bundle_id)
        report = self._index.build(bundle_id, on_progress=on_progress)
        if report is None:
            raise no_vectors(bundle_id, "Index images with `lookalike reindex` first.")
        return report

    def activate(self, bundle_id: str, *, on_progress: Progress = no_progress) -> int:
        """Makes a bundle the active one, after bringing its index up to date; returns the gallery's revision."""
        bundle = find_bundle(self._store.read, bundle_id)
        # Also when nothing was written since: this reads every byte of the index, and rebuilds a damaged one.
        revision = self.prepare(bundle_id, on_progress=on_progress).revision
        self._store.set_active(bundle)
        self._views.end_rehearsal(bundle_id)
        return revision

    def rollback(self) -> str:
        """Activates the bundle that was active before; returns its id."""
        previous = self._store.read.head().previous
        if previous is None:
            raise LookalikeError(
                "The gallery has no previous bundle to return to.", "Index with another bundle: lookalike reindex."
            )
        self.activate(previous.id)
        return previous.id

    def drop_bundle(self, bundle_id: str) -> None:
        """Removes the vectors of a bundle that is not active, its index and its copy."""
        self._store.drop_bundle(find_bundle(self._store.read, bundle_id))
        self._views.end_rehearsal(bundle_id)
        self._index.clean()

    def compact(
        self, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = no_progress
    ) -> BuildReport | None:
        """Removes expired items and brings the active bundle's index up to date; returns None if there are no images.

        Without `wait` it builds nothing, and returns None, while another process is building.
        """
        self.remove_expired()
        bundle = self._store.read.head().bundle
        return bundle and self._index.build(bundle.id, rebuild=rebuild, wait=wait, on_progress=on_progress)

    def remove_expired(self) -> int:
        """Removes the items that have expired, some at a time; returns their number."""
        return self._expired.remove()

    # Reads

    @property
    def jobs(self) -> JobHistory:
        """The history of re-indexing jobs."""
        return self._store.jobs

    def get_item(self, item_id: str, *, with_expired: bool = False) -> StoredItem | None:
        """Returns an item with its images and its version; one that has expired only if asked."""
        stored = self._store.read.get_item(item_id)
        if stored and not with_expired and is_expired(stored.item.attributes, current_instant()):
            return None
        return stored

    def item_vectors(self, item_id: str, bundle_id: str) -> dict[str, NDArray[np.float32]]:
        """Returns image id to vector, of the item's images that have one of the bundle."""
        bundle = self._store.read.bundle(bundle_id)
        return self._store.read.item_vectors(item_id, bundle.key) if bundle else {}

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        """Returns image id to content digest, of the item's images that have a vector of the bundle."""
        found = self._store.read.digests([item_id], bundle_id)
        return {image_id: digest for (_, image_id), digest in found.items()}

    def image_ids(self) -> Iterator[tuple[str, str]]:
        """Yields item and image id of every image, by item."""
        with self._store.open_reader() as reader:
            yield from reader.image_ids()

    def images_without(self, bundle_id: str, *, through: int | None = None) -> int:
        """Returns the number of images that a search with the bundle cannot find.

        `through` leaves out images that were stored after the one with this key.
        """
        return self._store.read.images_without(bundle_id, through=through)

    def newest_image(self) -> int:
        """Returns the key of the image that was stored last; keys grow."""
        return self._store.read.newest_image()

    def thumbnail(self, digest: str) -> bytes | None:
        """Returns a small JPEG of a stored image."""
        return self._store.read.thumbnail(digest)

    def facets(
        self, count: int = 20, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        """Yields attributes of items, each with its `count` most frequent values, as of the last compaction.

        Without `names` they are those that most items have, at most MAX_FACETS. Counts the items that match a filter,
        and of their values those that contain a text in any case.
        """
        view = self._views.active()
        if view is None:
            return
        expired = view.newest_expiry(current_instant())
        wanted = filter if expired is None else hide_expired(filter, expired)
        for facet in view.index.facets(count, names, filter=wanted, contains=contains):
            if names or facet.name != EXPIRES_AT:
                yield facet

    def filter_hints(self, filter: Filter) -> list[str]:
        """Returns what in a filter keeps it from matching: attributes or types of values that no item has."""
        view = self._views.active()
        return find_mismatches(filter, view) if view else []

    def scan(self, *, filter: Filter | None = None, after: str = "", count: int = 100) -> ItemPage:
        """Returns the first `count` items after an id that match a filter."""
        if count < 1:
            raise SearchError(f"count is {count}.", "Ask for at least one item.")
        found = list(islice(self.iter_items(filter=filter, after=after), count + 1))
        return ItemPage(found[:count], found[count - 1].id if len(found) > count else None)

    def iter_items(self, *, filter: Filter | None = None, after: str = "") -> Iterator[Item]:
        """Yields the items after an id that match a filter, in the order of their ids; reads some at a time.

        Leaves out those that had expired when it began.
        """
        wanted = hide_expired(filter, current_instant())
        while block := self._store.read.items_after(after, _ITEM_BLOCK):
            yield from (item for item in block if wanted.matches(item.attributes))
            after = block[-1].id

    def stats(self) -> GalleryStats:
        """Returns counts, the active bundle and the state of its index."""
        head, (items, images) = self._store.read.head(), self._store.read.counts()
        view = self._views.active()
        return GalleryStats(
            items=items,
            images=images,
            unsearchable=self._store.read.images_without(view.bundle.id) if view else 0,
            revision=head.revision,
            bundle_id=view.bundle.id if view else None,
            previous_bundle_id=head.previous.id if head.previous else None,
            dimension=view.bundle.dimension if view else None,
            store_bytes=self._store.size(),
            index=view.index.stats(view.pending) if view else IndexStats(engine=self._index.engine),
        )

    def check(self, bundle_id: str) -> None:
        """Raises an error unless vectors of the bundle can be searched now; cheap, and waits for no other read."""
        try:
            self._store.probe()
        except StoreUnavailable as error:
            self._views.check_age(error)  # searches continue
        view = self._views.get(bundle_id)[0]
        if view:
            vector = np.ones((1, view.bundle.dimension), np.float32)
            for hit in self._searches.run(view, [vector], top=1).hits[0]:
                assert hit.item.id

    # Rankings

    def rankings(self) -> list[StoredRanking]:
        """Returns the newest version of each stored ranking, by name."""
        return self._store.read.rankings()

    def get_ranking(self, name: str, *, version: int | None = None) -> StoredRanking | None:
        """Returns a version of a stored ranking, by default the newest."""
        return self._store.read.ranking(name, version)

    def ranking_versions(self, name: str) -> list[StoredRanking]:
        """Returns the versions of a stored ranking that are kept, the newest first."""
        return self._store.read.ranking_versions(name)

    def put_ranking(self, name: str, ranking: Ranking, *, expected: Versions | None = None) -> StoredRanking:
        """Stores a new version of a ranking, unless the newest one is equal; from then on searches use it."""
        if not re.fullmatch(RANKING_NAME, name):
            raise SearchError(
                f"{name[:80]!r} is not a valid name of a ranking.",
                "Use up to 100 letters, digits, dots, dashes and underscores, beginning with a letter or digit.",
            )
        Rules(ranking)  # refuses invalid filters
        return self._store.put_ranking(name, ranking, expected=expected or {})

    def delete_ranking(self, name: str, *, expected: Versions | None = None) -> bool:
        """Removes a stored ranking with all its versions; returns whether there was one."""
        return self._store.delete_ranking(name, expected=expected or {})

    # Files

    def snapshot(self, file: Path, *, force: bool = False) -> backup.Snapshot:
        """Writes everything the gallery holds at one instant into a file, atomically, while others read and write."""
        return backup.write_snapshot(self._store, self._index, file, force=force)

    def export(
        self, file: Path, *, bundle_id: str | None = None, force: bool = False, on_progress: Progress = no_progress
    ) -> int:
        """Writes items, images and vectors of a bundle, by default the active one, to a Parquet file."""
        return export.write_parquet(self._store, file, bundle_id=bundle_id, force=force, on_progress=on_progress)

    def copy_to(
        self,
        target: "Gallery",
        *,
        replace: bool = False,
        on_start: Callable[[Job], None] = lambda job: None,
        on_progress: copy.CopyProgress = copy.no_progress,
    ) -> copy.CopyReport:
        """Makes another gallery equal to this one, while others read and write this one; can be repeated.

        The target must be empty or an unchanged copy of this gallery, unless `replace` is set. `on_start` receives the
        job by which the copy can be stopped.
        """
        copy.check_addresses(self.address, target.address)
        return copy.copy_gallery(
            self._store,
            target._store,
            address=self.address,
            activate=target.activate,
            drop=target.drop_bundle,
            replace=replace,
            on_start=on_start,
            on_progress=on_progress,
        )

    def compare(self, other: "Gallery", *, on_progress: copy.CopyProgress = copy.no_progress) -> tuple[Contents, ...]:
        """Returns counts and a digest of all that this and another gallery hold, each as of one instant."""
        return copy.compare_galleries(self._store, other._store, on_progress=on_progress)

    def verify(self, *, on_progress: Progress = no_progress) -> list[verify.Fault]:
        """Compares every image that searches can return with the store, and checks every byte of both."""
        return verify.find_faults(
            self._store, self._index, self._settings, address=self.address, on_progress=on_progress
        )

    # Searches

    def search(
        self, vectors: NDArray[np.float32], *, bundle_id: str, rehearsal: bool = False, **bounds: Unpack[Bounds]
    ) -> SearchResult:
        """Returns the most similar items for each query vector, each with its best image, in the order of the ranking.

        The caller names the bundle that made the vectors: those of another one are never compared. A `rehearsal`
        searches the vectors of a bundle that is not active yet.
        """
        view, stale = (self._views.rehearsal(bundle_id), 0.0) if rehearsal else self._views.get(bundle_id)
        if view is None:
            return SearchResult([[] for _ in vectors], bundle_id, self._store.read.revision())
        check_vectors(vectors, view.bundle)
        if bounds.get("cursor") and len(vectors) > 1:
            raise SearchError(f"A cursor was passed with {len(vectors)} queries.", "Page through one query at a time.")
        groups = [vectors[row : row + 1] for row in range(len(vectors))]
        found = self._searches.run(view, groups, **bounds)
        return replace(found, stale_seconds=stale) if stale else found

    def search_item(self, item_id: str, **bounds: Unpack[Bounds]) -> SearchResult:
        """Returns the items most similar to a stored one, without itself, by whichever of its images is nearest."""
        view = self._views.active()
        if view is None:
            raise ItemMissing(item_id)
        group = self._searches.item_vectors(view, item_id)
        bounds["exclude"] = [item_id, *bounds.get("exclude", ())]
        return self._searches.run(view, [group], **bounds)

    def search_examples(
        self,
        examples: Sequence[Example],
        *,
        bundle_id: str | None = None,
        combine: Combination = "mean",
        **bounds: Unpack[Bounds],
    ) -> SearchResult:
        """Returns the items that are like several photos or stored items, and unlike those of negative weight.

        Items that are examples are left out. `bundle_id` names the bundle that made the vectors of photos.
        """
        check_examples(examples)
        view, stale = self._views.get(bundle_id) if bundle_id else (self._views.active(), 0.0)
        item_ids = [one.item_id for one in examples if one.item_id is not None]
        if view is None:
            for item_id in item_ids:
                raise ItemMissing(item_id)
            return SearchResult([[]], bundle_id or "", self._store.read.revision())
        query = combine_examples([self._searches.load_example(view, example) for example in examples], combine)
        bounds["exclude"] = [*item_ids, *bounds.get("exclude", ())]
        found = self._searches.run(view, [query.group], query.negatives, **bounds)
        return replace(found, stale_seconds=stale) if stale else found

    # Following the store

    @property
    def stale_seconds(self) -> float:
        """The age of what searches return, if the server of the store could not be reached the last time; else 0."""
        return self._views.stale_seconds

    def _keep_up(self) -> None:
        """Follows the store while nobody searches, so that no search has to catch up with many writes."""
        self._store.check()
        news = self._views.ask_news()
        idle = news == self._keeping_up_to
        if not idle:
            self._views.active()
            self._keeping_up_to = news
        try:
            self._store.checkpoint(idle=idle)
            self._expired.remove_if_due()
        except StoreError as error:  # such as a full disk: searches and reads continue
            log.warning("%s: %s", self.address, error)
