"""The embedded engine: a SQLite catalogue and FAISS generations in one folder."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index import generations
from index.catalogue import Catalogue, NewImage
from index.errors import LookalikeError
from index.gallery import BundleMismatch, GalleryStats
from index.generations import Generation
from index.items import Found, Hit, Item

CATALOGUE_FILE = "catalogue.sqlite"


class EmbeddedGallery:
    """A gallery on this machine's disk; several threads and processes may share it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._catalogue = Catalogue(directory / CATALOGUE_FILE)
        self._root = directory / "generations"
        self._lock = threading.Lock()
        self._generation: Generation | None = None

    def close(self) -> None:
        self._catalogue.close()

    def upsert(self, entries: Iterable[tuple[Item, Sequence[NewImage]]], bundle_id: str) -> int:
        return self._catalogue.upsert(entries, bundle_id)

    def delete(self, item_ids: Iterable[str]) -> int:
        return self._catalogue.delete(item_ids)

    def get(self, item_id: str) -> Item | None:
        return self._catalogue.get(item_id)

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        return self._catalogue.digests(item_id, bundle_id)

    def thumbnail(self, digest: str) -> bytes | None:
        return self._catalogue.thumbnail(digest)

    def activate(self, bundle_id: str) -> str:
        change, keys, vectors = self._catalogue.vectors(bundle_id)
        if not len(keys):
            raise LookalikeError(
                f"The gallery has no vectors of bundle {bundle_id}.",
                "Index images with `lookalike reindex` first.",
            )
        name = generations.write_generation(self._root, bundle_id=bundle_id, change=change, keys=keys, vectors=vectors)
        generations.switch(self._root, name)
        return name

    def search(self, vectors: NDArray[np.float32], *, bundle_id: str, top: int = 10) -> Found:
        generation = self._live()
        if generation is None:
            return Found(hits=[[] for _ in vectors], generation=None, change=self._catalogue.change())
        manifest = generation.manifest
        if manifest.bundle_id != bundle_id:
            raise BundleMismatch(manifest.bundle_id, bundle_id)
        hits = [self._search_one(generation, vector, top) for vector in vectors]
        return Found(hits=hits, generation=generation.name, change=manifest.change)

    def _search_one(self, generation: Generation, vector: NDArray[np.float32], top: int) -> list[Hit]:
        """Widens the search until enough distinct items are found: one product must not fill the list."""
        wanted = min(4 * top, generation.manifest.count)
        while True:
            scores, keys = generation.search(vector[None], wanted)
            found = {int(key): float(score) for key, score in zip(keys[0], scores[0], strict=True) if key >= 0}
            hits = self._catalogue.hits(found)
            if len(hits) >= top or wanted >= generation.manifest.count:
                return hits[:top]
            wanted = min(4 * wanted, generation.manifest.count)

    def stats(self) -> GalleryStats:
        items, images = self._catalogue.counts()
        generation = self._live()
        return GalleryStats(
            items=items,
            images=images,
            change=self._catalogue.change(),
            generation=generation.name if generation else None,
            bundle_id=generation.manifest.bundle_id if generation else None,
            dimension=generation.manifest.dimension if generation else None,
        )

    def _live(self) -> Generation | None:
        """The generation that CURRENT names now: another process may have activated a newer one."""
        name = generations.current(self._root)
        generation = self._generation
        if name is None or (generation and generation.name == name):
            return generation
        with self._lock:
            if self._generation is None or self._generation.name != name:
                self._generation = Generation.load(self._root / name)
            return self._generation
