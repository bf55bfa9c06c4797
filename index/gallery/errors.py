"""The errors that a gallery raises, whichever store and vector index it has."""

from collections.abc import Sequence

from index.errors import LookalikeError
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM

RESTORE = "Restore a snapshot: lookalike gallery restore; then repeat later changes: lookalike reindex."
"""The remedy for a damaged store."""


class StoreError(LookalikeError):
    """The store cannot be read or written, or was given invalid data."""

    kind = "store"


class StorageFull(StoreError):
    """The disk has no space for a write; nothing of it was kept."""

    kind = "storage-full"


class StoreBusy(StoreError):
    """Another process has held the store's write lock for too long; nothing was written."""

    kind = "store-busy"


class StoreUnavailable(StoreError):
    """The server of the store cannot be reached, or has not responded in time; it may work again at any moment."""

    kind = "store-unavailable"


class StoreReadOnly(StoreError):
    """The store does not allow writes: its file system, the file itself, a standby server or the user's rights."""

    kind = "store-read-only"


class VersionConflict(LookalikeError):
    """An item or a ranking was changed since the writer read it."""

    kind = "version-conflict"

    def __init__(self, name: str, noun: str = "Item") -> None:
        super().__init__(f"{noun} {name!r} was changed since it was read.", "Read it again and repeat the change.")


class LimitExceeded(LookalikeError):
    """A write would exceed a limit of the gallery; nothing of it was kept."""

    kind = "limit-exceeded"

    def __init__(self, problem: str, remedy: str, item_id: str, image_ids: Sequence[str] = ()) -> None:
        super().__init__(problem, remedy)
        self.item_id = item_id
        self.image_ids = frozenset(image_ids)
        """The images without which the write would succeed; empty if the item itself is refused."""


class TooManyImages(LimitExceeded):
    """An item would have more images than an item may have."""

    def __init__(self, item_id: str, count: int, surplus: Sequence[str]) -> None:
        super().__init__(
            f"Item {item_id!r} would have {count:,} images; the limit is {MAX_IMAGES_PER_ITEM}.",
            "Remove some of its images first, or send fewer.",
            item_id,
            surplus,
        )


class TooManyAttributes(LimitExceeded):
    """A gallery would have more distinct names of attributes than it may have."""

    def __init__(self, item_id: str, name: str) -> None:
        super().__init__(
            f"Item {item_id!r} has the new attribute {name[:80]!r}; the gallery has {MAX_ATTRIBUTE_NAMES:,} already.",
            "Use an attribute that other items have, or remove attributes from items.",
            item_id,
        )


class SearchError(LookalikeError):
    """A search has an invalid argument."""

    kind = "search"


class ItemMissing(LookalikeError):
    """The item to search with does not exist, or has no vector of the active bundle."""

    kind = "item-missing"

    def __init__(self, item_id: str) -> None:
        super().__init__(
            f"The gallery has no item {item_id!r} with an image of the active bundle.", "Check the id, or add an image."
        )


class RankingMissing(LookalikeError):
    """The gallery has no ranking of this name, or not this version of it."""

    kind = "ranking-missing"

    def __init__(self, name: str, version: int | None = None) -> None:
        super().__init__(
            f"The gallery has no ranking {name!r}{f' of version {version}' if version is not None else ''}.",
            "List them: lookalike gallery rankings list, or GET /v1/rankings.",
        )


class BundleMismatch(LookalikeError):
    """Query vectors of one bundle met a gallery whose active bundle is another."""

    kind = "bundle-mismatch"

    def __init__(self, gallery_bundle: str, query_bundle: str) -> None:
        super().__init__(
            f"The gallery was indexed with bundle {gallery_bundle}, not with {query_bundle}.",
            "Use the bundle that indexed the gallery, or run `lookalike reindex` with this one.",
        )


class IndexDamaged(LookalikeError):
    """What a vector index built is missing, damaged or outdated; it can always be rebuilt from the store."""

    kind = "index-damaged"


class IndexUnavailable(LookalikeError):
    """The servers of a vector index do not answer, or have to be filled first; nothing is lost."""

    kind = "index-unavailable"


class IndexBuildError(LookalikeError):
    """The next vector index could not be written; searches continue with the last one."""

    kind = "index-build"


class SnapshotError(LookalikeError):
    """A snapshot cannot be written, or a file is not a complete snapshot."""

    kind = "snapshot"


class JobMissing(LookalikeError):
    """The gallery's history has no such job."""

    kind = "job-missing"

    def __init__(self, job_id: int) -> None:
        super().__init__(f"The gallery has no job {job_id}.", "List them with `lookalike jobs`.")


class JobRunning(LookalikeError):
    """Another job writes the same gallery."""

    kind = "job-running"

    def __init__(self, job_id: int) -> None:
        super().__init__(f"Job {job_id} is running.", "Wait until it has ended, or cancel it.")
        self.job_id = job_id
