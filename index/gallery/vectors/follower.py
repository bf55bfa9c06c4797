"""Following the catalogue: what one process searches, always as new as the newest write."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from index.gallery.store.sqlite import Catalogue
from index.gallery.store.sqlite_reader import BundleRow
from index.gallery.vectors.faiss.generation import Generation, GenerationError, open_generation
from index.gallery.vectors.view import State

log = logging.getLogger(__name__)


class Follower:
    """Keeps one bundle's state as new as the catalogue; any thread may ask for it."""

    def __init__(self, catalogue: Catalogue, root: Path, bundle: BundleRow, on_damage: Callable[[], None]) -> None:
        self._catalogue = catalogue
        self._root = root
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._damaged: str | None = None
        self._version = -1
        self._state = self._start(bundle)

    def state(self, version: int) -> State:
        """The newest state; `version` is the catalogue's, looked at before."""
        if version == self._version:
            return self._state
        with self._lock:
            bundle = self._catalogue.watch.bundle(self._state.bundle.id) or self._state.bundle
            followed = self._caught_up(self._state) if self._is_still(bundle) else None
            while followed is None:
                followed = self._caught_up(self._start(bundle))
            self._state = followed
            if bundle.generation not in (None, self._state.generation.name, self._damaged):
                self._open_aside(bundle)
            self._version = version
            return self._state

    def _is_still(self, bundle: BundleRow) -> bool:
        """Whether the state is of these rows, and not of a bundle that was dropped and indexed anew, or emptied."""
        state = self._state
        return bundle.key == state.bundle.key and (bundle.generation is not None or state.generation.name is None)

    def _caught_up(self, state: State) -> State | None:
        """The state after all changes; none if it is too far behind: some removals are no longer listed."""
        changes = self._catalogue.watch.changes(state.bundle.key, state.change)
        return None if state.change < changes.forgotten else state.following(changes)

    def _start(self, bundle: BundleRow) -> State:
        """From the generation on disk, or else from the catalogue itself: slower to begin with, but exact."""
        while bundle.generation not in (None, self._damaged):
            try:
                return self._opened(bundle)
            except GenerationError as error:
                newer = self._catalogue.watch.bundle(bundle.id) or bundle
                if newer.generation == bundle.generation:
                    self._tell_damage(bundle, error)
                bundle = newer  # or else it was replaced while we looked
        with self._catalogue.reading() as reader:
            return State.of(bundle, Generation.in_memory(reader, bundle.key, bundle.dimension))

    def _opened(self, bundle: BundleRow) -> State:
        generation, _ = open_generation(self._root / str(bundle.generation))
        if generation.change < self._catalogue.watch.current().forgotten:
            raise GenerationError(
                f"The generation {generation.name} is older than the catalogue remembers removals.",
                "It can be made again: lookalike gallery compact.",
            )
        return State.of(bundle, generation)

    def _tell_damage(self, bundle: BundleRow, error: GenerationError) -> None:
        log.warning("%s Until then searches are exact, from the catalogue.", error)
        self._damaged = bundle.generation
        self._on_damage()

    def _open_aside(self, bundle: BundleRow) -> None:
        """Opens a newer generation beside the searches, which go on with the old one and the delta."""
        if self._opening is None:
            self._opening = threading.Thread(target=self._adopt, args=(bundle,), name="open-generation", daemon=True)
            self._opening.start()

    def _adopt(self, bundle: BundleRow) -> None:
        try:
            state = self._opened(bundle)
            with self._lock:
                # Behind already? Then the next search finds a newer one to open.
                self._state = self._caught_up(state) or self._state
        except GenerationError as error:
            if (self._catalogue.read.bundle(bundle.id) or bundle).generation == bundle.generation:
                self._tell_damage(bundle, error)
        finally:
            self._opening = None
            self._version = -1  # the next search looks again

    def settle(self) -> None:
        """Waits for a generation that is being opened."""
        opening = self._opening
        if opening:
            opening.join()
