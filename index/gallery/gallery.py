"""The gallery: one class over an item store and a vector index."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import backup, export, verify
from index.gallery.errors import BundleMismatch, ItemMissing, SearchError
from index.gallery.filters import Filter
from index.gallery.jobs import JobHistory
from index.gallery.maintenance import Maintainer
from index.gallery.search import Query, decode_cursor, encode_cursor, hash_query, search_view
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow, ItemStore
from index.gallery.types import (
    BuildReport,
    Facet,
    GalleryStats,
    IndexStats,
    Item,
    ItemPage,
    NewImage,
    Progress,
    SearchResult,
    StoredItem,
    no_progress,
)
from index.gallery.vectors.base import VectorIndex
from index.gallery.vectors.follower import Follower
from index.gallery.vectors.view import View
from index.items import MAX_TOP

Versions = Mapping[str, int | None]


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
        settings: GallerySettings | None = None,
    ) -> None:
        """`maintain` compacts in the background: for a process that keeps running."""
        self.address = address
        self._store = store
        self._index = index
        self._settings = settings or GallerySettings()
        self._maintainer = Maintainer(address, index, self._settings) if maintain else None
        self._lock = threading.Lock()
        self._news = -1
        self._active: str | None = None
        self._followers: dict[str, Follower] = {}
        self._rehearsals: dict[str, Follower] = {}
        self._opening: dict[str, threading.Lock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases files, connections and threads."""
        for follower in (*self._followers.values(), *self._rehearsals.values()):
            follower.settle()
        if self._maintainer:
            self._maintainer.close()
        self._store.close()

    # Writes

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Versions | None = None,
        without: Mapping[str, Iterable[str]] | None = None,
    ) -> int:
        """Stores items and images with their vectors; the first bundle of a gallery becomes the active one.

        Other images of an item stay, except those that `without` names for it.
        """
        return self._store.upsert(entries, bundle_id, expected=expected or {}, without=without or {})

    def delete(self, item_ids: Iterable[str], *, expected: Versions | None = None) -> int:
        """Removes items with their images; unknown ids are ignored."""
        return self._store.delete(item_ids, expected=expected or {})

    def delete_images(self, item_id: str, image_ids: Iterable[str], *, expected: Versions | None = None) -> int:
        """Removes some images of an item; unknown ids are ignored."""
        return self._store.upsert([], "", expected=expected or {}, without={item_id: image_ids})

    # Bundles

    def active_bundle(self) -> str | None:
        """Returns the id of the active bundle; None in a gallery that never held an image."""
        news = self._store.watch.news()
        if news != self._news:
            self._look(news)
        return self._active

    def keep_bundle(self, bundle: Bundle) -> None:
        """Keeps a copy of a bundle, so that whoever opens the gallery can embed queries for it."""
        self._store.keep_bundle(bundle)

    def load_bundle(self, bundle_id: str) -> Bundle:
        """Returns the copy of a bundle."""
        return self._store.load_bundle(bundle_id)

    def prepare(self, bundle_id: str, *, on_progress: Progress = no_progress) -> BuildReport:
        """Builds the index of a bundle's vectors without activating it, and returns what was measured."""
        self._known_bundle(bundle_id)
        report = self._index.build(bundle_id, on_progress=on_progress)
        if report is None:
            raise _no_vectors(bundle_id, "Index images with `lookalike reindex` first.")
        return report

    def activate(self, bundle_id: str, *, on_progress: Progress = no_progress) -> int:
        """Makes a bundle the active one, after bringing its index up to date; returns the gallery's revision."""
        bundle = self._known_bundle(bundle_id)
        # Also when nothing was written since: this reads every byte of the index, and rebuilds a damaged one.
        revision = self.prepare(bundle_id, on_progress=on_progress).revision
        self._store.set_active(bundle)
        with self._lock:
            self._rehearsals.pop(bundle_id, None)
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
        self._store.drop_bundle(self._known_bundle(bundle_id))
        with self._lock:
            self._rehearsals.pop(bundle_id, None)
        self._index.clean()

    def compact(
        self, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = no_progress
    ) -> BuildReport | None:
        """Brings the active bundle's index up to date; returns None if there are no images.

        Without `wait` it does nothing, and returns None, while another process is building.
        """
        bundle = self._store.read.head().bundle
        return bundle and self._index.build(bundle.id, rebuild=rebuild, wait=wait, on_progress=on_progress)

    def _known_bundle(self, bundle_id: str) -> BundleRow:
        bundle = self._store.read.bundle(bundle_id)
        if bundle is None:
            known = ", ".join(row.id for row in self._store.read.bundles()) or "none"
            raise _no_vectors(bundle_id, f"Index with `lookalike reindex` first; bundles with vectors: {known}.")
        return bundle

    # Reads

    @property
    def jobs(self) -> JobHistory:
        """The history of re-indexing jobs."""
        return self._store.jobs

    def get_item(self, item_id: str) -> StoredItem | None:
        """Returns an item with its images and its version."""
        return self._store.read.get_item(item_id)

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

    def images_without(self, bundle_id: str) -> int:
        """Returns the number of images that a search with the bundle cannot find."""
        return self._store.read.images_without(bundle_id)

    def thumbnail(self, digest: str) -> bytes | None:
        """Returns a small JPEG of a stored image."""
        return self._store.read.thumbnail(digest)

    def facets(self, count: int = 20) -> list[Facet]:
        """Returns the attributes of items, each with its most frequent values, as of the last compaction."""
        view = self._active_view()
        return view.index.facets(count) if view else []

    def scan(self, *, filter: Filter | None = None, after: str = "", count: int = 100) -> ItemPage:
        """Returns the first `count` items after an id that match a filter."""
        if count < 1:
            raise SearchError(f"count is {count}.", "Ask for at least one item.")
        found: list[Item] = []
        while len(found) <= count:
            block = self._store.read.items_after(after, 4 * count)
            found += [item for item in block if filter is None or filter.matches(item.attributes)]
            if len(block) < 4 * count:
                break
            after = block[-1].id
        return ItemPage(found[:count], found[count - 1].id if len(found) > count else None)

    def stats(self) -> GalleryStats:
        """Returns counts, the active bundle and the state of its index."""
        head, (items, images) = self._store.read.head(), self._store.read.counts()
        view = self._active_view()
        return GalleryStats(
            items=items,
            images=images,
            revision=head.revision,
            bundle_id=view.bundle.id if view else None,
            previous_bundle_id=head.previous.id if head.previous else None,
            dimension=view.bundle.dimension if view else None,
            store_bytes=self._store.size(),
            index=view.index.stats(view.pending) if view else IndexStats(engine=self._index.engine),
        )

    # Files

    def snapshot(self, file: Path, *, force: bool = False) -> backup.Snapshot:
        """Writes everything the gallery holds at one instant into a file, atomically, while others read and write."""
        return backup.write_snapshot(self._store, self._index, file, force=force)

    def export(
        self, file: Path, *, bundle_id: str | None = None, force: bool = False, on_progress: Progress = no_progress
    ) -> int:
        """Writes items, images and vectors of a bundle, by default the active one, to a Parquet file."""
        return export.write_parquet(self._store, file, bundle_id=bundle_id, force=force, on_progress=on_progress)

    def verify(self, *, on_progress: Progress = no_progress) -> list[verify.Fault]:
        """Compares every image that searches can return with the store, and checks every byte of both."""
        return verify.find_faults(
            self._store, self._index, self._settings, address=self.address, on_progress=on_progress
        )

    # Searches

    def search(
        self,
        vectors: NDArray[np.float32],
        *,
        bundle_id: str,
        top: int = 10,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
        cursor: str | None = None,
        rehearsal: bool = False,
    ) -> SearchResult:
        """Returns the `top` most similar items for each query vector, best first, each with its best image.

        The caller names the bundle that made the vectors: those of another one are never compared. Items in `exclude`
        are left out; the `cursor` of a result continues a single query. A `rehearsal` searches the vectors of a bundle
        that is not active yet.
        """
        view = self._rehearsal_view(bundle_id) if rehearsal else self._view(bundle_id)
        if view is None:
            return SearchResult([[] for _ in vectors], bundle_id, self._store.read.revision())
        if vectors.ndim != 2 or vectors.shape[1] != view.bundle.dimension or not isfinite(vectors.sum()):
            raise SearchError(
                f"Query vectors of shape {vectors.shape} do not fit bundle {bundle_id}: it makes finite vectors of "
                f"{view.bundle.dimension} numbers.",
                "Embed the query with the gallery's bundle.",
            )
        if cursor and len(vectors) > 1:
            raise SearchError(f"A cursor was passed with {len(vectors)} queries.", "Page through one query at a time.")
        groups = [vectors[row : row + 1] for row in range(len(vectors))]
        return self._search(view, groups, top, filter, min_score, exclude, cursor)

    def search_item(
        self,
        item_id: str,
        *,
        top: int = 10,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
        cursor: str | None = None,
    ) -> SearchResult:
        """Returns the items most similar to a stored one, without itself, by whichever of its images is nearest."""
        view = self._active_view()
        vectors = self._store.read.item_vectors(item_id, view.bundle.key) if view else {}
        if not view or not vectors:
            raise ItemMissing(item_id)
        group = np.stack(list(vectors.values()))
        return self._search(view, [group], top, filter, min_score, [item_id, *exclude], cursor)

    def _search(
        self,
        view: View,
        groups: list[NDArray[np.float32]],
        top: int,
        filter: Filter | None,
        min_score: float | None,
        exclude: Sequence[str],
        cursor: str | None,
    ) -> SearchResult:
        if not 1 <= top <= MAX_TOP:
            raise SearchError(f"top is {top}.", f"Ask for 1 to {MAX_TOP} items, and for more by cursor.")
        if min_score is not None and not isfinite(min_score):
            raise SearchError(f"min_score is {min_score}.", "Pass a number from -1 to 1, or none.")
        excluded = frozenset(self._store.read.item_keys(exclude)) if exclude else frozenset()
        query = Query(top, filter, min_score, excluded)
        # Computed only when a cursor is passed or asked for.
        query_hash = partial(hash_query, groups[0], filter, min_score, exclude) if len(groups) == 1 else None
        if cursor and query_hash:
            query = query._replace(start=decode_cursor(cursor, query_hash()))
        answers = search_view(view, groups, query) if groups else []
        following = answers[0][1] if query_hash else None
        return SearchResult(
            [hits for hits, _ in answers],
            view.bundle.id,
            view.revision,
            (lambda: encode_cursor(following, query_hash())) if following and query_hash else None,
        )

    # Following the store

    def _active_view(self) -> View | None:
        """Returns what a search with vectors of the active bundle looks at; None if there is no bundle yet."""
        while True:
            self._look(self._store.watch.news())
            if self._active is None:
                return None
            try:
                return self._view(self._active)
            except BundleMismatch:
                continue  # another bundle was activated in between

    def _view(self, bundle_id: str) -> View | None:
        """Returns what a search with vectors of a bundle looks at, as new as the newest write of any process."""
        news = self._store.watch.news()
        if news != self._news:
            self._look(news)
        follower = self._followers.get(bundle_id)
        if follower is None:
            if self._active is None:
                return None
            if bundle_id != self._active:
                raise BundleMismatch(self._active, bundle_id)
            follower = self._follow(self._followers, bundle_id)
        view = follower.view(news)
        if self._maintainer and bundle_id == self._active and view.is_compaction_due:
            self._maintainer.request()
        return view

    def _rehearsal_view(self, bundle_id: str) -> View:
        return self._follow(self._rehearsals, bundle_id).view(self._store.watch.news())

    def _look(self, news: int) -> None:
        """Reads which bundle is active; the previous one stays searchable for requests that started with it."""
        with self._lock:
            head = self._store.watch.head()
            self._active = head.bundle.id if head.bundle else None
            kept = {self._active, head.previous.id if head.previous else None}
            for name in self._followers.keys() - kept:
                del self._followers[name]
            self._news = news

    def _follow(self, followers: dict[str, Follower], bundle_id: str) -> Follower:
        with self._lock:
            opening = self._opening.setdefault(bundle_id, threading.Lock())
        with opening:  # not the gallery's lock: searches of another bundle must not wait until this one is opened
            follower = followers.get(bundle_id)
            if follower is None:
                on_damage = self._maintainer.request if self._maintainer else lambda: None
                bundle = self._known_bundle(bundle_id)
                follower = Follower(self._store, self._index, bundle, self._settings, on_damage)
                with self._lock:
                    followers[bundle_id] = follower
            return follower


def _no_vectors(bundle_id: str, remedy: str) -> LookalikeError:
    return LookalikeError(f"The gallery has no vectors of bundle {bundle_id}.", remedy)
