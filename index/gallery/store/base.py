"""The first seam of a gallery: the item store, the only source of truth.

A vector index follows the store by its change log: `changes(bundle, since)` returns what happened after a revision.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.gallery.jobs import JobHistory
from index.gallery.types import Item, NewImage, StoredItem
from index.rankings import Ranking, StoredRanking


class BundleRow(NamedTuple):
    """A bundle with vectors in the store, and what a vector index has built of them."""

    key: int
    id: str
    dimension: int
    index_name: str | None
    index_revision: int


class Head(NamedTuple):
    """The newest revision, and the active bundle, at one instant."""

    revision: int
    forgotten: int
    """Removals up to this revision are no longer listed: a follower that has seen less compares all images."""
    bundle: BundleRow | None
    previous: BundleRow | None


class ImageRow(NamedTuple):
    """An image with its vector of one bundle, in half precision."""

    key: int
    item: int
    id: str
    digest: str
    vector: bytes


class Changes(NamedTuple):
    """What happened after a revision, as far as one bundle's vectors are concerned; read at one instant."""

    revision: int
    forgotten: int
    removed: list[int]
    """Keys of images."""
    images: list[ImageRow]
    items: dict[int, Item]
    """By key: items that changed, and the items of `images`."""
    is_last: bool = True
    """Whether nothing happened after `revision`."""


class ImageRecord(NamedTuple):
    """An image of a bundle without its vector."""

    key: int
    item: int
    id: str
    digest: str
    revision: int
    """The revision that stored the vector."""


class FullImageRow(NamedTuple):
    """All that the store holds of an image for one bundle, its item included."""

    key: int
    item: int
    id: str
    digest: str
    vector: bytes
    item_id: str
    title: str
    url: str
    attributes: str


class ImageContent(NamedTuple):
    """An image of an item with its vectors in half precision and its thumbnail, or with the SHA-256 of each."""

    id: str
    digest: str
    vectors: dict[str, bytes]
    """By bundle id; empty if all its bundles were dropped."""
    thumbnail: bytes
    """Empty if it is missing."""


class StoreReader(Protocol):
    """Reads of a store. Bundles are given by key, except where the parameter is a `bundle_id`."""

    def news(self) -> int:
        """Returns a number that differs from the last one whenever another connection has written; cheap."""

    def head(self) -> Head: ...

    def revision(self) -> int: ...

    def counts(self) -> tuple[int, int]:
        """Returns the number of items and of images."""

    def bundle(self, bundle_id: str) -> BundleRow | None: ...

    def bundles(self) -> list[BundleRow]: ...

    def changes(self, bundle: int, since: int, limit: int | None = None, *, whole_items: bool = False) -> Changes:
        """Returns what a follower that has seen the revision `since` must apply.

        With a `limit` it may return only the first revisions, with about so many changes. They are of the store as it
        is now, so that only what is applied after the last of them is the state of one revision. With `whole_items`
        the images include all those of changed items.
        """

    def get_item(self, item_id: str) -> StoredItem | None: ...

    def items_after(self, item_id: str, count: int) -> list[Item]:
        """Returns the next items in the order of their ids; fewer if they are large, and none after the last."""

    def item_keys(self, item_ids: Sequence[str]) -> set[int]:
        """Returns the keys of those items that exist."""

    def item_vectors(self, item_id: str, bundle: int) -> dict[str, NDArray[np.float32]]:
        """Returns image id to vector, of an item's images that have one."""

    def digests(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        """Returns (item id, image id) to digest, of those images that have a vector of the bundle."""

    def image_ids(self) -> Iterator[tuple[str, str]]:
        """Yields item and image id of every image, by item; only within `ItemStore.open_reader`."""

    def images_without(self, bundle_id: str, *, through: int | None = None) -> int:
        """Returns the number of images that have no vector of a bundle, all or only those with keys up to `through`."""

    def newest_image(self) -> int:
        """Returns the key of the image that was stored last, 0 if there is none."""

    def thumbnail(self, digest: str) -> bytes | None: ...

    def image_contents(self, item_ids: Sequence[str], *, hashed: bool) -> dict[str, list[ImageContent]]:
        """Returns item id to all images in their order, of those items that have any.

        With `hashed` vectors and thumbnails are replaced by their SHA-256 digests, computed where the data are.
        """

    def ranking(self, name: str, version: int | None = None) -> StoredRanking | None:
        """Returns a version of a ranking, by default the newest."""

    def rankings(self) -> list[StoredRanking]:
        """Returns the newest version of each ranking, by name."""

    def ranking_versions(self, name: str | None = None) -> list[StoredRanking]:
        """Returns the versions of a ranking, or of all, the newest first."""

    # Bulk reads for building an index; only within `ItemStore.open_reader`

    def image_count(self, bundle: int) -> int: ...

    def image_keys(self, bundle: int) -> NDArray[np.int64]:
        """Returns the keys of all images of a bundle."""

    def image_ids_without(self, bundle_id: str) -> Iterator[tuple[str, str]]:
        """Yields item and image id of the images that have no vector of a bundle."""

    def image_records(self, bundle: int) -> Iterator[ImageRecord]:
        """Yields every image of a bundle by key."""

    def items(self, bundle: int) -> Iterator[tuple[int, Item]]:
        """Yields the items that have such an image, by key."""

    def vectors(self, bundle: int, since: int, out: NDArray[np.float16]) -> None:
        """Fills `out` with the vectors that are newer than the revision `since`, by image key."""

    def full_images(self, bundle: int) -> Iterator[list[FullImageRow]]:
        """Yields every image of a bundle with everything about it, by key, in batches."""


class ItemStore(Protocol):
    """Items, images, vectors, bundles and jobs. A write is acknowledged after its commit.

    Writes return the gallery's revision after them, which grows only if something changed. `expected` maps item ids to
    the versions that the write is based on, None for an item that must not exist; if one differs, nothing is written
    and VersionConflict is raised.
    """

    @property
    def watch(self) -> StoreReader:
        """For following the change log: never waits for other reads."""

    @property
    def read(self) -> StoreReader:
        """For single reads."""

    @property
    def jobs(self) -> JobHistory: ...

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written where the store is."""

    @property
    def can_record_indexes(self) -> bool:
        """Whether `set_index` works; where indexes are recorded elsewhere, also for a store that is read-only."""

    def open_reader(self) -> AbstractContextManager[StoreReader]:
        """Opens a reader for a long read, all of one instant."""

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] = ...,
        without: Mapping[str, Iterable[str]] = ...,
        activate_first: bool = True,
    ) -> int:
        """Stores items and images; other images of an item stay, except those that `without` names for it.

        Images in `without` are removed first, so that one which is also in `entries` becomes the item's last.
        If no bundle is active, that of the images becomes it with `activate_first`. Raises LimitExceeded, and then
        writes nothing, if an item would have too many images, or the gallery too many attributes.
        """

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] = ...) -> int:
        """Removes items with their images; unknown ids are ignored."""

    def delete_expired(self, instant: int, limit: int) -> int:
        """Removes items that have expired at an instant, at most so many; returns how many."""

    def put_ranking(
        self,
        name: str,
        ranking: Ranking,
        *,
        expected: Mapping[str, int | None] = ...,
        stored: float | None = None,
    ) -> StoredRanking:
        """Stores a version of a ranking, unless the newest one is equal; `expected` maps its name to a version.

        `stored` is when that was, in a copy. Raises LimitExceeded if the gallery would have too many.
        """

    def delete_ranking(self, name: str, *, expected: Mapping[str, int | None] = ...) -> bool:
        """Removes a ranking with all its versions; returns whether there was one."""

    def set_index(self, bundle: int, name: str | None, revision: int) -> None:
        """Records what a vector index has built, and prunes removals that no follower needs any more."""

    def set_active(self, bundle: BundleRow) -> None:
        """Makes a bundle the active one, and the active one the previous."""

    def drop_bundle(self, bundle: BundleRow) -> None:
        """Removes a bundle that is not active, its vectors and its copy."""

    def keep_bundle(self, bundle: Bundle) -> None:
        """Keeps a copy of a bundle's files."""

    def has_bundle(self, bundle_id: str) -> bool:
        """Whether there is a copy of the bundle."""

    def load_bundle(self, bundle_id: str) -> Bundle:
        """Returns the copy after checking it."""

    def problems(self) -> list[str]:
        """Returns what is wrong with the stored data itself; empty if nothing is."""

    def lost_writes(self) -> list[str]:
        """Returns the evidence that acknowledged writes were lost by damage of the disk."""

    def check(self) -> None:
        """Raises StoreError if what is open is no longer the gallery's store, because its files were replaced."""

    def probe(self) -> None:
        """Raises StoreError if the store cannot be read; cheap, and waits for no other call."""

    def checkpoint(self, *, idle: bool) -> None:
        """Reduces what a crash would have to recover; called again and again by a process that keeps running.

        `idle` if nothing was written since the last call. Never delays a write or a read.
        """

    def files(self, folder: Path) -> dict[str, Path]:
        """Writes a consistent copy into a folder, and returns name to path of every file that a snapshot needs."""

    def size(self) -> int:
        """Returns the bytes that the store takes on disk."""

    def close(self) -> None: ...
