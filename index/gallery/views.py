"""The views that searches read: of the active bundle, of the one before it, and of those that are rehearsed."""

import threading
from time import monotonic

from index.errors import LookalikeError
from index.gallery.errors import BundleMismatch, StoreUnavailable
from index.gallery.maintenance import Maintainer
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow, ItemStore, StoreReader
from index.gallery.vectors.base import VectorIndex
from index.gallery.vectors.follower import Follower
from index.gallery.vectors.view import View


class Views:
    """Follows the store, so that each search reads what the last write of any process has left.

    While the server of the store is gone, searches read what the last one did, for a limited time.
    """

    def __init__(
        self, store: ItemStore, index: VectorIndex, maintainer: Maintainer | None, settings: GallerySettings
    ) -> None:
        self._store = store
        self._index = index
        self._maintainer = maintainer
        self._settings = settings
        self._lock = threading.Lock()
        self._news = -1
        self._reached = monotonic()
        """When it was last asked whether there is news, of those times when the store responded."""
        self._is_unreachable = False
        self._active: str | None = None
        self._followers: dict[str, Follower] = {}
        self._rehearsals: dict[str, Follower] = {}
        self._opening: dict[str, threading.Lock] = {}

    def close(self) -> None:
        """Waits for indexes that are being opened."""
        for follower in (*self._followers.values(), *self._rehearsals.values()):
            follower.settle()

    # The active bundle

    def active_bundle(self) -> str | None:
        """Returns the id of the active bundle; None before the first one is activated."""
        try:
            self._look(self.ask_news())
        except StoreUnavailable as error:
            if self._active is None:
                raise
            self.check_age(error)
        return self._active

    def _look(self, news: int) -> None:
        """Reads which bundle is active; the previous one stays searchable for requests that started with it."""
        if news == self._news:
            return
        with self._lock:
            head = self._store.watch.head()
            self._active = head.bundle.id if head.bundle else None
            kept = {self._active, head.previous.id if head.previous else None}
            for name in self._followers.keys() - kept:
                del self._followers[name]
            self._news = news

    # Views

    def active(self) -> View | None:
        """Returns what a search with vectors of the active bundle reads; None if there is no bundle yet."""
        while True:
            active = self.active_bundle()
            if active is None:
                return None
            try:
                return self.get(active)[0]
            except BundleMismatch:
                continue  # another bundle was activated in between

    def get(self, bundle_id: str) -> tuple[View | None, float]:
        """Returns what a search reads and, unless that is as new as the newest write of any process, its age."""
        try:
            return self.newest(bundle_id), 0.0
        except StoreUnavailable as error:
            follower = self._followers.get(bundle_id)
            if follower is None:
                raise
            return follower.last_view, self.check_age(error)

    def newest(self, bundle_id: str) -> View | None:
        """Returns a view that is as new as the newest write of any process."""
        news = self.ask_news()
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

    def rehearsal(self, bundle_id: str) -> View:
        """Returns what a search reads with a bundle that need not be active."""
        return self._follow(self._rehearsals, bundle_id).view(self._store.watch.news())

    def end_rehearsal(self, bundle_id: str) -> None:
        with self._lock:
            self._rehearsals.pop(bundle_id, None)

    def reopen(self, view: View) -> View:
        """Returns the newest view of a bundle whose index has vanished; raises BundleMismatch if it was dropped."""
        for followers in (self._followers, self._rehearsals):
            follower = followers.get(view.bundle.id)
            if follower:
                return follower.reopen(view)
        raise BundleMismatch(self.active_bundle() or "", view.bundle.id)

    def _follow(self, followers: dict[str, Follower], bundle_id: str) -> Follower:
        with self._lock:
            opening = self._opening.setdefault(bundle_id, threading.Lock())
        with opening:  # not the common lock: searches of another bundle must not wait until this one is opened
            follower = followers.get(bundle_id)
            if follower is None:
                on_damage = self._maintainer.request if self._maintainer else lambda: None
                bundle = find_bundle(self._store.read, bundle_id)
                follower = Follower(self._store, self._index, bundle, self._settings, on_damage)
                with self._lock:
                    followers[bundle_id] = follower
            return follower

    # Whether the store responds

    def ask_news(self) -> int:
        """Returns a number that differs from the last one if anything was written."""
        asked = monotonic()
        try:
            news = self._store.watch.news()
        except StoreUnavailable:
            self._is_unreachable = True
            raise
        self._reached, self._is_unreachable = asked, False
        return news

    @property
    def stale_seconds(self) -> float:
        """The age of what searches return, if the server of the store could not be reached the last time; else 0."""
        return monotonic() - self._reached if self._is_unreachable else 0.0

    def check_age(self, error: StoreUnavailable) -> float:
        """Returns the age of what was last read from the store; raises the error if it is too old."""
        age = monotonic() - self._reached
        if age > self._settings.max_stale_seconds:
            raise error
        return age


def find_bundle(reader: StoreReader, bundle_id: str) -> BundleRow:
    """Returns a bundle that has vectors; raises an error that names those that have."""
    bundle = reader.bundle(bundle_id)
    if bundle is None:
        known = ", ".join(row.id for row in reader.bundles()) or "none"
        raise no_vectors(bundle_id, f"Index with `lookalike reindex` first; bundles with vectors: {known}.")
    return bundle


def no_vectors(bundle_id: str, remedy: str) -> LookalikeError:
    return LookalikeError(f"The gallery has no vectors of bundle {bundle_id}.", remedy)
