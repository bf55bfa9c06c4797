"""Values that go in and out of a gallery: images, search results, statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index._util.models import Frozen
from index.gallery.filters import Filter
from index.items import MAX_ID_LENGTH
from index.items import Attribute as Attribute
from index.items import Facet as Facet
from index.items import Item as Item
from index.rankings import Explanation, Ranking, Window

Progress = Callable[[int, int], None]
"""Progress callback: (done, total)."""


def no_progress(done: int, total: int) -> None:
    """Ignores progress."""


class StoredImage(Frozen):
    """One photo of an item; the digest of its bytes decides whether it must be embedded again."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredItem(NamedTuple):
    """An item as the gallery holds it: with its images, and the revision that last changed it."""

    item: Item
    images: list[StoredImage]
    version: int


class NewImage(NamedTuple):
    """An image to store: its vector, made by one bundle, and a thumbnail in JPEG."""

    id: str
    digest: str
    vector: NDArray[np.float32]
    thumbnail: bytes


class ItemPage(NamedTuple):
    """Items in the order of their ids, and the id after which the next page begins; None after the last."""

    items: list[Item]
    after: str | None


class HitRecords(Protocol):
    """Where a hit reads its item and image from when a caller asks for them."""

    def item(self, position: int) -> Item: ...

    def image(self, position: int) -> StoredImage: ...


class Hit:
    """A search result: an item, its best matching image, and the cosine of the two vectors.

    Items are parsed on access: a search is far faster than parsing what it found.
    """

    __slots__ = ("_position", "_records", "explanation", "score")

    def __init__(self, score: float, records: HitRecords, position: int) -> None:
        self.score = score
        self.explanation: Explanation | None = None
        self._records = records
        self._position = position

    @property
    def item(self) -> Item:
        return self._records.item(self._position)

    @property
    def image(self) -> StoredImage:
        return self._records.image(self._position)

    def __repr__(self) -> str:
        return f"Hit({self.score:.4f}, item={self.item.id!r}, image={self.image.id!r})"


class Bounds(TypedDict, total=False):
    """What a search returns, apart from what it is for."""

    top: int
    """Items to return; default 10."""
    filter: Filter | None
    min_score: float | None
    """The lowest similarity of an item."""
    exclude: Sequence[str]
    """Ids of items to leave out."""
    cursor: str | None
    """Continues a single query."""
    ranking: Ranking | str | None
    """Rules for the order, or the name of those that the gallery holds."""
    explain: bool
    """Adds to each hit why it is where it is."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The hits of each query, and the revision of the gallery that they reflect."""

    hits: list[list[Hit]]
    bundle_id: str
    revision: int
    next_page: Callable[[], str] | None = None
    stale_seconds: float = 0.0
    """The age of what was searched, while the server of the store is gone; 0 if every acknowledged write is in it."""
    windows: list[Window] = field(default_factory=list)
    """For each query the window that rules acted on last; empty if none needs a window."""

    @property
    def cursor(self) -> str | None:
        """Where the next page of a single query begins; None after the last."""
        return self.next_page() if self.next_page else None


class NeededBundles(NamedTuple):
    """The bundles of which a new image needs a vector, so that searches find it now and after the next activation."""

    active: str | None
    prepared: tuple[str, ...]
    """Those that re-indexing jobs are preparing for their activation."""


class IndexStats(Frozen):
    """The vector index that searches use; everything in here depends on the engine."""

    engine: str
    name: str | None = Field(
        default=None, description="what the engine built last; null while searches scan the store's vectors"
    )
    revision: int = Field(
        default=0, description="the revision that it reflects; searches add the changes since, the delta"
    )
    pending: int = Field(default=0, description="images and items that were added, changed or removed since")
    kind: str | None = Field(default=None, description="exact, hnsw or ivf")
    recall: float | None = Field(default=None, description="recall@10 against exact search, measured by the build")
    target: float | None = Field(default=None, description="the recall@10 that the build aimed at")
    effort: int | None = Field(default=None, description="efSearch or lists to read that reach it; 0: all vectors")
    bytes: int = Field(default=0, description="size of its files; 0 if servers hold them")
    device: str | None = Field(
        default=None, description="what compares the vectors: cpu or the names of GPUs; null if servers do"
    )


class GalleryStats(Frozen):
    """What a gallery holds, and what its searches reflect."""

    items: int
    images: int
    unsearchable: int = Field(description="images without a vector of the active bundle, which no search finds")
    revision: int = Field(description="the number of the last write")
    bundle_id: str | None = Field(description="the active bundle; null before the first one is activated")
    previous_bundle_id: str | None = Field(description="the bundle that was active before, for a rollback")
    dimension: int | None = Field(description="numbers per vector")
    store_bytes: int = Field(description="size of the store's files")
    index: IndexStats


class BuildReport(Frozen):
    """What a vector index has built for a bundle, and what was measured."""

    name: str
    revision: int
    images: int
    is_new: bool = Field(description="false when nothing had changed since the last build")
    kind: str
    recall: float
    target: float
    effort: int
    scans: bool = Field(description="no effort reached the target, so every search compares with all vectors")
