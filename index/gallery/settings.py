"""Tunable parameters of a gallery, whichever engines it has."""

from pydantic import Field

from index._util.models import Frozen


class GallerySettings(Frozen):
    """Parameters of following, filtering and maintenance. Tests set others to reach every code path."""

    delta_block: int = Field(
        default=4096, description="images up to which blocks of the delta are merged; copying more would slow searches"
    )
    cached_filters: int = Field(
        default=16, description="filters whose matching images are cached; a mask of a million images is a megabyte"
    )
    cached_length: int = Field(
        default=100_000, description="characters up to which a filter is cached; one may have four million"
    )
    follow_seconds: float = Field(
        default=1.0, description="how often a process that keeps running looks for writes, also if nobody searches"
    )
    follow_batch: int = Field(default=8192, description="changes that a follower reads at a time: it bounds its memory")
    listed_removals: int = Field(
        default=10_000,
        description="newest removals that the store lists; a process that has followed fewer compares all images once",
    )
    max_delta_bytes: int = Field(
        default=64 << 20, description="memory of changed items from which a compaction is due, however few they are"
    )
    expiry_seconds: float = Field(
        default=60.0, description="how often a process that keeps running removes items that have expired"
    )
    expiry_batch: int = Field(default=1000, description="expired items that one transaction removes")
    retry_seconds: float = Field(default=60.0, description="pause after a compaction that failed")
    max_stale_seconds: float = Field(
        default=60.0,
        ge=0,
        description="how long searches continue with what was last read when the server of the store is gone",
    )
    rest_seconds: float = Field(
        default=3.0, description="pause after one that succeeded: searches first have to open the new index"
    )
