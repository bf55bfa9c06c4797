"""Follows the store: keeps what one process searches as new as the newest write."""

import logging
import threading
from collections.abc import Callable

from index.gallery.errors import BundleMismatch, IndexDamaged, IndexUnavailable, StoreError
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow, ItemStore, StoreReader
from index.gallery.vectors.base import BuiltIndex, VectorIndex
from index.gallery.vectors.view import View

log = logging.getLogger(__name__)


class _WentBack(Exception):
    """The store is at an earlier revision than before, as after a failover to a server that was behind."""


class Follower:
    """Keeps the view of one bundle up to date; any thread may ask for it."""

    def __init__(
        self,
        store: ItemStore,
        index: VectorIndex,
        bundle: BundleRow,
        settings: GallerySettings,
        on_damage: Callable[[], None],
    ) -> None:
        self._store = store
        self._index = index
        self._settings = settings
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._damaged: str | None = None
        self._news = -1
        self._view = self._start(bundle)
        self._reported = self._view.index.name

    @property
    def last_view(self) -> View:
        """The view of the last search, which may be older than the store."""
        return self._view

    def view(self, news: int) -> View:
        """Returns the newest view; `news` is the store's number, read before."""
        if news == self._news:
            return self._view
        with self._lock:
            bundle = self._store.watch.bundle(self._view.bundle.id) or self._view.bundle
            try:
                self._view = self._catch_up(self._view if self._is_same(bundle) else self._start(bundle))
            except _WentBack as error:
                log.error("%s; searches start again from the store", error)
                self._view = self._catch_up(self._start(bundle))
            if bundle.index_name not in (None, self._view.index.name, self._damaged):
                self._open_in_background(bundle)
            self._news = news
            self._report_index(self._view)
            return self._view

    def reopen(self, view: View) -> View:
        """Returns another view than one whose index has vanished, or was found damaged, during a search."""
        with self._lock:
            if self._view.index is view.index or self._view.index.name == view.index.name:
                bundle = self._store.watch.bundle(view.bundle.id) or view.bundle
                self._view = self._catch_up(self._start(bundle))
            return self._view

    def _is_same(self, bundle: BundleRow) -> bool:
        """Returns false for a bundle that was dropped and indexed again, or emptied."""
        view = self._view
        return bundle.key == view.bundle.key and (bundle.index_name is not None or view.index.name is None)

    def _catch_up(self, view: View) -> View:
        """Returns the view after all changes, which are read in batches."""
        while True:
            batch, whole_items = self._settings.follow_batch, view.index.whole_items
            changes = self._store.watch.changes(view.bundle.key, view.revision, batch, whole_items=whole_items)
            if changes.revision < view.revision:
                revisions = f"{view.revision:,} to {changes.revision:,}"
                raise _WentBack(f"the store went back from revision {revisions}: later writes were lost")
            if view.revision < changes.forgotten:
                with self._store.open_reader() as reader:  # more is read, which must be of one instant
                    return view.catch_up(reader)
            view = view.apply(changes)
            if changes.is_last:  # only this view is of one instant
                return view

    def _start(self, bundle: BundleRow) -> View:
        """Starts from the built index or, without one, from the store itself: slower to start, but exact."""
        while bundle.index_name not in (None, self._damaged):
            try:
                return self._open(bundle)
            except IndexDamaged as error:
                newer = _current(self._store.watch, bundle)
                if newer.index_name == bundle.index_name:
                    self._report_damage(bundle, error)
                bundle = newer  # otherwise it was replaced in the meantime
        with self._store.open_reader() as reader:
            current = _current(reader, bundle)
            bundle = bundle if current.key == bundle.key else current
            return self._view_of(bundle, self._index.load(reader, bundle))

    def _open(self, bundle: BundleRow) -> View:
        return self._view_of(bundle, self._index.open(bundle))

    def _view_of(self, bundle: BundleRow, built: BuiltIndex) -> View:
        return View(bundle, built, built.revision, self._settings)

    def _report_index(self, view: View) -> None:
        """Logs an index that replaces another one, once; vectors that are read from the store have no name."""
        if view.index.name not in (None, self._reported):
            self._reported = view.index.name
            log.info("bundle %s is searched with the new index %s", view.bundle.id, view.index.name)

    def _report_damage(self, bundle: BundleRow, error: IndexDamaged) -> None:
        log.warning("%s Until then searches scan the store's vectors.", error)
        self._damaged = bundle.index_name
        self._on_damage()

    def _open_in_background(self, bundle: BundleRow) -> None:
        """Opens a newer index while searches continue with the old one and the delta."""
        if self._opening is None:
            self._opening = threading.Thread(target=self._adopt, args=(bundle,), name="open-index", daemon=True)
            self._opening.start()

    def _adopt(self, bundle: BundleRow) -> None:
        try:
            view = self._open(bundle)
            with self._lock:
                if bundle.key == self._view.bundle.key:  # else it was dropped and indexed again
                    self._view = self._catch_up(view)
                    self._report_index(self._view)
        except IndexDamaged as error:
            current = self._store.read.bundle(bundle.id)
            if current and current.index_name == bundle.index_name:
                self._report_damage(bundle, error)
        except (StoreError, IndexUnavailable, _WentBack) as error:
            log.error("the index %s could not be opened: %s", bundle.index_name, error)
        finally:
            self._opening = None
            self._news = -1  # so that the next search checks again

    def settle(self) -> None:
        """Waits for an index that is being opened."""
        opening = self._opening
        if opening:
            opening.join()


def _current(reader: StoreReader, bundle: BundleRow) -> BundleRow:
    """Returns the bundle as the store has it now; its search fails if it was dropped, instead of finding nothing."""
    current, active = reader.bundle(bundle.id), reader.head().bundle
    if current is None:
        raise BundleMismatch(active.id if active else "", bundle.id)
    return current
