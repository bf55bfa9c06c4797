"""The gallery: what index hands over. One interface; the address decides the engine behind it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index._util.models import Frozen
from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.filters import Filter
from index.gallery.types import Found, Item, NewImage, StoredItem
from index.gallery.vectors.faiss.columns import Facet
from index.gallery.vectors.faiss.generation import Manifest

Progress = Callable[[int, int], None]
"""Told what is done, of how much."""


class GalleryStats(Frozen):
    """What a gallery holds, and what its searches reflect."""

    items: int
    images: int
    change: int = Field(description="the number of the newest write")
    bundle_id: str | None = Field(description="the live bundle; none in a gallery that never held an image")
    previous_bundle_id: str | None = Field(description="the bundle before it, which can be returned to")
    dimension: int | None
    generation: str | None = Field(description="the generation that searches use; none while they are exact without")
    generation_change: int | None = Field(description="the change that the generation reflects; the rest is its delta")
    pending: int = Field(description="images that came or went since the generation was built")
    kind: str | None = Field(description="of the generation's index: exact, hnsw or ivf")
    recall: float | None = Field(description="recall@10 against exact search, measured when the generation was built")


class Scanned(NamedTuple):
    """Items in the order of their ids, and the id after which the next ones begin; none after the last."""

    items: list[Item]
    after: str | None


class ItemMissing(LookalikeError):
    """A search for things like an item that is not there, or has no image to compare."""

    kind = "item-missing"

    def __init__(self, item_id: str) -> None:
        super().__init__(
            f"The gallery has no item {item_id!r} with an image of the live bundle.", "Check the id, or add an image."
        )


class BundleMismatch(LookalikeError):
    """Query vectors of one bundle met a gallery of another."""

    kind = "bundle-mismatch"

    def __init__(self, gallery_bundle: str, query_bundle: str) -> None:
        super().__init__(
            f"The gallery was indexed with bundle {gallery_bundle}, not with {query_bundle}.",
            "Use the bundle that indexed the gallery, or run `lookalike reindex` with this one.",
        )


class Gallery(Protocol):
    """A store of items, their images and the vectors of one or more bundles, of which one is live.

    A write is acknowledged after its commit, and from then on visible to every search of every process. Writes answer
    the change number, which grows with each one that changed something.
    """

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] | None = None,
        without: Mapping[str, Iterable[str]] | None = None,
    ) -> int:
        """Stores items and images with their vectors; the first bundle of a gallery becomes the live one.

        Other images of an item stay, save those that `without` names for it. `expected` names the versions of items
        that the write rests on, none for one that must be new; when one differs nothing is written and VersionConflict
        is raised. The same holds for the deletions.
        """

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] | None = None) -> int:
        """Removes items with their images."""

    def delete_images(
        self, item_id: str, image_ids: Iterable[str], *, expected: Mapping[str, int | None] | None = None
    ) -> int:
        """Removes some images of an item."""

    def live_bundle(self) -> str | None:
        """The id of the live bundle; cheap enough to ask for every request."""

    def keep_bundle(self, bundle: Bundle) -> None:
        """Keeps a copy of the bundle with its vectors, so that whoever opens the gallery can embed queries for it."""

    def kept_bundle(self, bundle_id: str) -> Bundle:
        """The copy that was kept."""

    def get(self, item_id: str) -> Item | None:
        """An item by its id."""

    def stored(self, item_id: str) -> StoredItem | None:
        """An item with its images and its version."""

    def item_vectors(self, item_id: str, bundle_id: str) -> dict[str, NDArray[np.float32]]:
        """Image id to vector, of the item's images that have one of the bundle."""

    def facets(self, count: int = 20) -> list[Facet]:
        """The attributes that items have, each with its most frequent values, as of the last compaction."""

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        """Image id to content digest, for the item's images that have a vector of the bundle."""

    def thumbnail(self, digest: str) -> bytes | None:
        """A small JPEG of a stored image."""

    def scan(self, *, filter: Filter | None = None, after: str = "", count: int = 100) -> Scanned:
        """The first `count` items behind an id that match a filter."""

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
        """For each query vector the `top` most similar items, best first, each with its best image.

        The caller names the bundle that made the vectors: those of another one are never compared. Items in `exclude`
        are left out; the `cursor` of an answer to one query continues it. A `rehearsal` searches the vectors of a
        bundle before it is live.
        """

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
        """The items most similar to a stored one, itself left out, by whichever of its images is nearest."""

    def known(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        """Item and image id to content digest, for those images of the items that have a vector of the bundle."""

    def image_ids(self) -> Iterator[tuple[str, str]]:
        """Item and image id of every image, by item."""

    def images_without(self, bundle_id: str) -> int:
        """How many images a search with the bundle could not find."""

    def prepare(self, bundle_id: str, *, on_progress: Progress = ...) -> Manifest:
        """Builds the generation of a bundle's vectors without making it live, and tells what was measured."""

    def rollback(self) -> str:
        """Makes the bundle before the live one live again; answers its id."""

    def drop_bundle(self, bundle_id: str) -> None:
        """Removes the vectors of a bundle that is not live, its generation and its copy."""

    def activate(self, bundle_id: str, *, on_progress: Progress = ...) -> str:
        """Builds the generation of a bundle's vectors and makes both live together; answers its name."""

    def compact(self, *, rebuild: bool = False, on_progress: Progress = ...) -> str | None:
        """Moves all changes into a new generation now; answers its name, or none in an empty gallery."""

    def stats(self) -> GalleryStats:
        """Counts, and the live generation with its bundle."""

    def close(self) -> None:
        """Releases files and connections."""


def open_gallery(address: str | Path, *, create: bool = False, maintain: bool = False) -> Gallery:
    """Opens the gallery at an address, a folder for the embedded engine; `create` allows a new one.

    With `maintain` the gallery compacts itself in the background: for a process that stays.
    """
    from index.gallery.gallery import EmbeddedGallery

    check_gallery(address, create=create)
    return EmbeddedGallery(Path(address), maintain=maintain)


def check_gallery(address: str | Path, *, create: bool = False) -> None:
    """Refuses an address that holds no gallery and, with `create`, one where none can be made."""
    from index.gallery.vectors.faiss.compaction import CATALOGUE_FILE

    directory = Path(address)
    if not (directory / CATALOGUE_FILE).is_file():
        # The catalogue itself may appear just now, when another process makes the same gallery.
        if directory.exists() and not (
            directory.is_dir() and all(path.name.startswith(CATALOGUE_FILE) for path in directory.iterdir())
        ):
            raise LookalikeError(f"{directory} is not a gallery.", "Name an empty or a new folder, or a gallery.")
        if not create:
            raise LookalikeError(f"No gallery at {directory}.", "Make one with `lookalike reindex`.")
