"""The embedded engine: a SQLite catalogue and FAISS generations in one folder."""

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import BundleMismatch, GalleryStats, ItemMissing, Scanned
from index.gallery import search as searching
from index.gallery.filters import Filter
from index.gallery.search import Ask, Page, SearchError
from index.gallery.store.sqlite import Catalogue
from index.gallery.store.sqlite_reader import BundleRow
from index.gallery.types import MAX_TOP, Found, Item, NewImage, StoredItem
from index.gallery.vectors.faiss.columns import Facet
from index.gallery.vectors.faiss.compaction import (
    CATALOGUE_FILE,
    GENERATIONS,
    RECALL_TARGET,
    Progress,
    clean,
    compact,
    compaction_lock,
    is_due,
)
from index.gallery.vectors.faiss.generation import Manifest, read_manifest
from index.gallery.vectors.follower import Follower
from index.gallery.vectors.view import State

log = logging.getLogger(__name__)

BUNDLES = "bundles"
_PAUSE = 60.0
"""Seconds before a compaction that failed is tried again."""
_REST = 3.0
"""Seconds after one that did not: searches need a moment to open what it wrote."""


class EmbeddedGallery:
    """A gallery on this machine's disk; several threads and processes may share it."""

    def __init__(self, directory: Path, *, maintain: bool = False, recall_target: float = RECALL_TARGET) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._catalogue = Catalogue(directory / CATALOGUE_FILE)
        self._recall_target = recall_target
        self._maintainer = _Maintainer(directory) if maintain else None
        self._lock = threading.Lock()
        self._version = -1
        self._live: str | None = None
        self._followers: dict[str, Follower] = {}
        self._rehearsals: dict[str, Follower] = {}

    def close(self) -> None:
        for follower in (*self._followers.values(), *self._rehearsals.values()):
            follower.settle()
        if self._maintainer:
            self._maintainer.close()
        self._catalogue.close()

    # Writing

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] | None = None,
        without: Mapping[str, Iterable[str]] | None = None,
    ) -> int:
        return self._catalogue.upsert(entries, bundle_id, expected or {}, without or {})

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] | None = None) -> int:
        return self._catalogue.delete(item_ids, expected or {})

    def delete_images(
        self, item_id: str, image_ids: Iterable[str], *, expected: Mapping[str, int | None] | None = None
    ) -> int:
        return self._catalogue.delete_images(item_id, image_ids, expected or {})

    def prepare(self, bundle_id: str, *, on_progress: Progress = lambda done, total: None) -> Manifest:
        bundle = self._catalogue.read.bundle(bundle_id)
        name = None
        if bundle:
            with compaction_lock(self._directory, wait=True):
                name = self._compact(bundle, on_progress=on_progress)
        if name is None:
            raise LookalikeError(
                f"The gallery has no vectors of bundle {bundle_id}.", "Index images with `lookalike reindex` first."
            )
        return read_manifest(self._directory / GENERATIONS / name)

    def activate(self, bundle_id: str, *, on_progress: Progress = lambda done, total: None) -> str:
        manifest = self.prepare(bundle_id, on_progress=on_progress)
        self._catalogue.set_current(self._known_bundle(bundle_id).key)
        return manifest.name

    def rollback(self) -> str:
        previous = self._catalogue.read.current().previous
        if previous is None:
            raise LookalikeError(
                "The gallery has no bundle to return to.", "Index with another bundle by `lookalike reindex`."
            )
        self.activate(previous.id)
        return previous.id

    def drop_bundle(self, bundle_id: str) -> None:
        with compaction_lock(self._directory, wait=True):
            bundle, live = self._known_bundle(bundle_id), self._catalogue.read.current().bundle
            if live and live.id == bundle_id:
                raise LookalikeError(f"Bundle {bundle_id} is live.", "Activate another one first.")
            self._catalogue.drop_bundle(bundle.key)
            clean(self._directory / GENERATIONS, self._catalogue)
        shutil.rmtree(self._directory / BUNDLES / bundle_id, ignore_errors=True)

    def _known_bundle(self, bundle_id: str) -> BundleRow:
        bundle = self._catalogue.read.bundle(bundle_id)
        if bundle is None:
            known = ", ".join(row.id for row in self._catalogue.read.bundles()) or "none"
            raise LookalikeError(f"The gallery has no vectors of bundle {bundle_id}.", f"It has those of: {known}.")
        return bundle

    def compact(self, *, rebuild: bool = False, on_progress: Progress = lambda done, total: None) -> str | None:
        with compaction_lock(self._directory, wait=True):
            bundle = self._catalogue.read.current().bundle
            return self._compact(bundle, rebuild=rebuild, on_progress=on_progress) if bundle else None

    def _compact(self, bundle: BundleRow, *, rebuild: bool = False, on_progress: Progress) -> str | None:
        return compact(
            self._directory,
            self._catalogue,
            bundle,
            target=self._recall_target,
            rebuild=rebuild,
            on_progress=on_progress,
        )

    # Bundles

    def keep_bundle(self, bundle: Bundle) -> None:
        bundle.copy_to(self._directory / BUNDLES / bundle.id)

    def kept_bundle(self, bundle_id: str) -> Bundle:
        return Bundle.load(self._directory / BUNDLES / bundle_id)

    # Reading

    def get(self, item_id: str) -> Item | None:
        return self._catalogue.read.item(item_id)

    def stored(self, item_id: str) -> StoredItem | None:
        return self._catalogue.read.stored(item_id)

    def item_vectors(self, item_id: str, bundle_id: str) -> dict[str, NDArray[np.float32]]:
        bundle = self._catalogue.read.bundle(bundle_id)
        return self._catalogue.read.item_vectors(item_id, bundle.key) if bundle else {}

    def facets(self, count: int = 20) -> list[Facet]:
        state = self._live_state()
        return state.generation.columns.facets(count) if state else []

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        return self._catalogue.read.digests(item_id, bundle_id)

    def known(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        return self._catalogue.read.known(list(item_ids), bundle_id)

    def image_ids(self) -> Iterator[tuple[str, str]]:
        with self._catalogue.reading() as reader:
            yield from reader.image_ids()

    def images_without(self, bundle_id: str) -> int:
        return self._catalogue.read.images_without(bundle_id)

    def thumbnail(self, digest: str) -> bytes | None:
        return self._catalogue.read.thumbnail(digest)

    def scan(self, *, filter: Filter | None = None, after: str = "", count: int = 100) -> Scanned:
        if count < 1:
            raise SearchError(f"{count} items were asked for.", "Ask for at least one.")
        found: list[Item] = []
        while len(found) <= count:
            block = self._catalogue.read.items_after(after, 4 * count)
            found += [item for item in block if filter is None or filter.matches(item.attributes)]
            if len(block) < 4 * count:
                break
            after = block[-1].id
        return Scanned(found[:count], found[count - 1].id if len(found) > count else None)

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
    ) -> Found:
        state = self._rehearsed(bundle_id) if rehearsal else self._state(bundle_id)
        if state is None:
            return Found([[] for _ in vectors], bundle_id, None, self._catalogue.read.change())
        if vectors.ndim != 2 or vectors.shape[1] != state.bundle.dimension or not isfinite(vectors.sum()):
            raise SearchError(
                f"Query vectors of shape {vectors.shape} were given; bundle {bundle_id} makes finite ones of "
                f"{state.bundle.dimension} numbers.",
                "Embed the query with the gallery's bundle.",
            )
        if cursor and len(vectors) > 1:
            raise SearchError(f"A cursor came with {len(vectors)} queries.", "Ask for the next page of one at a time.")
        groups = [vectors[row : row + 1] for row in range(len(vectors))]
        return self._find(state, groups, top, filter, min_score, exclude, cursor)

    def search_item(
        self,
        item_id: str,
        *,
        top: int = 10,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
        cursor: str | None = None,
    ) -> Found:
        state = self._live_state()
        vectors = self._catalogue.read.item_vectors(item_id, state.bundle.key) if state else {}
        if not state or not vectors:
            raise ItemMissing(item_id)
        group = np.stack(list(vectors.values()))
        return self._find(state, [group], top, filter, min_score, [item_id, *exclude], cursor)

    def _find(
        self,
        state: State,
        groups: list[NDArray[np.float32]],
        top: int,
        filter: Filter | None,
        min_score: float | None,
        exclude: Sequence[str],
        cursor: str | None,
    ) -> Found:
        if not 1 <= top <= MAX_TOP:
            raise SearchError(f"{top} items were asked for.", f"Ask for 1 to {MAX_TOP}, and for more by cursor.")
        if min_score is not None and not isfinite(min_score):
            raise SearchError(f"{min_score} was given as the least score.", "Give a number from -1 to 1, or none.")
        excluded = frozenset(self._catalogue.read.item_keys(exclude)) if exclude else frozenset()
        ask = Ask(top, filter, min_score, excluded)
        name = partial(searching.query_name, groups[0], filter, min_score, exclude) if len(groups) == 1 else None
        if cursor and name:
            ask = ask._replace(after=searching.decode_page(cursor, name()))
        answers = searching.find(state, groups, ask) if groups else []
        page = answers[0][1] if name else None
        following = partial(_cursor, page, name) if page and name else None
        return Found([hits for hits, _ in answers], state.bundle.id, state.generation.name, state.change, following)

    def stats(self) -> GalleryStats:
        current = self._catalogue.read.current()
        items, images = self._catalogue.read.counts()
        state = self._live_state()
        plan = state.generation.searcher.plan if state else None
        return GalleryStats(
            items=items,
            images=images,
            change=current.change,
            bundle_id=state.bundle.id if state else None,
            previous_bundle_id=current.previous.id if current.previous else None,
            dimension=state.bundle.dimension if state else None,
            generation=state.generation.name if state else None,
            generation_change=state.generation.change if state else None,
            pending=state.pending if state else 0,
            kind=plan.kind if plan else None,
            recall=plan.recall if plan else None,
        )

    # Following

    def live_bundle(self) -> str | None:
        version = self._catalogue.watch.version()
        if version != self._version:
            self._look(version)
        return self._live

    def _live_state(self) -> State | None:
        """What a search with vectors of the live bundle looks at; none in a gallery that never held an image."""
        while True:
            self._look(self._catalogue.watch.version())
            if self._live is None:
                return None
            try:
                return self._state(self._live)
            except BundleMismatch:
                continue  # another bundle was activated just now

    def _state(self, bundle_id: str) -> State | None:
        """What a search with vectors of the bundle looks at: as new as the newest write of any process."""
        version = self._catalogue.watch.version()
        if version != self._version:
            self._look(version)
        follower = self._followers.get(bundle_id)
        if follower is None:
            if self._live is None:
                return None
            if bundle_id != self._live:
                raise BundleMismatch(self._live, bundle_id)
            follower = self._follow(bundle_id)
        state = follower.state(version)
        if self._maintainer and bundle_id == self._live:
            self._maintainer.consider(state)
        return state

    def _rehearsed(self, bundle_id: str) -> State:
        """The vectors of a bundle that is not live, for its tests."""
        follower = self._rehearsals.get(bundle_id)
        if follower is None:
            follower = self._rehearsals[bundle_id] = self._new_follower(self._known_bundle(bundle_id))
        return follower.state(self._catalogue.watch.version())

    def _look(self, version: int) -> None:
        """Learns which bundle is live; the one before is answered on for those who began with it."""
        with self._lock:
            current = self._catalogue.watch.current()
            self._live = current.bundle.id if current.bundle else None
            kept = {self._live, current.previous.id if current.previous else None}
            self._followers = {name: follower for name, follower in self._followers.items() if name in kept}
            self._version = version

    def _follow(self, bundle_id: str) -> Follower:
        with self._lock:
            if bundle_id not in self._followers:
                self._followers[bundle_id] = self._new_follower(self._known_bundle(bundle_id))
            return self._followers[bundle_id]

    def _new_follower(self, bundle: BundleRow) -> Follower:
        damaged = self._maintainer.start if self._maintainer else lambda: None
        return Follower(self._catalogue, self._directory / GENERATIONS, bundle, damaged)


def _cursor(page: Page, query: Callable[[], str]) -> str:
    return searching.encode_page(page, query())


class _Maintainer:
    """Runs compactions of a gallery in processes of their own, one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._considered: State | None = None
        self._due = False

    def consider(self, state: State) -> None:
        """Starts a compaction when searches would gain from it."""
        if state is not self._considered:
            images = len(state.generation.keys)
            # Without a name it stands in for a generation that is damaged, or was never built.
            missing = state.generation.name is None and (state.bundle.generation is not None or is_due(0, images))
            self._considered, self._due = state, missing or is_due(images, state.pending)
        if self._due:  # still, if another compaction was just ending when it was found
            self.start()

    def start(self) -> None:
        with self._lock:
            if self._process:
                code = self._process.poll()
                if code is None:
                    return
                if code:
                    log.error("a compaction of %s ended with code %s; see its message above", self._directory, code)
                self._not_before = monotonic() + (_PAUSE if code else _REST)
                self._process = None
            if monotonic() < self._not_before:
                return
            with compaction_lock(self._directory, wait=False) as free:
                self._not_before = monotonic() + _REST
            if free:  # or else another process is at it
                # Not from the working folder, where some file might have the name of a package of ours.
                command = [sys.executable, "-P", "-m", "index.gallery.vectors.faiss.compaction", str(self._directory)]
                self._process = subprocess.Popen(command)

    def close(self) -> None:
        """A compaction that is stopped has changed nothing."""
        with self._lock:
            if self._process:
                self._process.terminate()
                self._process.wait()
