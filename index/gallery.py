"""The gallery: what index hands over. One interface; the address decides the engine behind it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from index.catalogue import NewImage
from index.errors import LookalikeError
from index.items import Found, Frozen, Item


class GalleryStats(Frozen):
    """What a gallery holds, and what its searches reflect."""

    items: int
    images: int
    change: int
    generation: str | None
    bundle_id: str | None
    dimension: int | None


class BundleMismatch(LookalikeError):
    """Query vectors of one bundle met a gallery of another."""

    kind = "bundle-mismatch"

    def __init__(self, gallery_bundle: str, query_bundle: str) -> None:
        super().__init__(
            f"The gallery was indexed with bundle {gallery_bundle}, not with {query_bundle}.",
            "Use the bundle that indexed the gallery, or run `lookalike reindex` with this one.",
        )


class Gallery(Protocol):
    """A store of items, their images and the vectors of one or more bundles, of which one is live."""

    def upsert(self, entries: Iterable[tuple[Item, Sequence[NewImage]]], bundle_id: str) -> int:
        """Stores items and images; answers the change number after the commit. Searched after `activate`."""

    def delete(self, item_ids: Iterable[str]) -> int:
        """Removes items; they are gone from the next search on."""

    def get(self, item_id: str) -> Item | None:
        """An item by its id."""

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        """Image id to content digest, for the item's images that have a vector of the bundle."""

    def thumbnail(self, digest: str) -> bytes | None:
        """A small JPEG of a stored image."""

    def activate(self, bundle_id: str) -> str:
        """Builds a generation of the bundle's vectors and makes it live; answers its name."""

    def search(self, vectors: NDArray[np.float32], *, bundle_id: str, top: int = 10) -> Found:
        """For each query vector the `top` most similar items, best first, each with its best image.

        The caller names the bundle that made the vectors: those of another one are never compared.
        """

    def stats(self) -> GalleryStats:
        """Counts, and the live generation with its bundle."""

    def close(self) -> None:
        """Releases files and connections."""


def open_gallery(address: str | Path, *, create: bool = False) -> Gallery:
    """Opens the gallery at an address, a folder for the embedded engine; `create` allows a new one."""
    from index.embedded import CATALOGUE_FILE, EmbeddedGallery

    directory = Path(address)
    if not (directory / CATALOGUE_FILE).is_file():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise LookalikeError(f"{directory} is not a gallery.", "Name an empty or a new folder, or a gallery.")
        if not create:
            raise LookalikeError(f"No gallery at {directory}.", "Make one with `lookalike reindex`.")
    return EmbeddedGallery(directory)
