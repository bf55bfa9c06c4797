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
    retry_seconds: float = Field(default=60.0, description="pause after a compaction that failed")
    rest_seconds: float = Field(
        default=3.0, description="pause after one that succeeded: searches first have to open the new index"
    )
