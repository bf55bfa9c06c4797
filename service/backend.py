"""What the routes work with: the opened bundle and gallery, and proof that the two belong together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from anyio import CapacityLimiter
from fastapi import Depends, Request

from index.bundle import Bundle
from index.cores import usable_cores
from index.embedder import Embedder
from index.gallery import BundleMismatch, Gallery, GalleryStats, open_gallery
from service.settings import Settings

PHOTO_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}


@dataclass(frozen=True)
class Backend:
    """The engines of one running service."""

    settings: Settings
    bundle: Bundle
    embedder: Embedder
    gallery: Gallery
    examples: dict[str, Path]
    workers: CapacityLimiter
    """Bounds the photos in memory: each one decoded may weigh 150 MB."""

    def matching_stats(self) -> GalleryStats:
        """The gallery's state, refused while its vectors are not those of our bundle."""
        stats = self.gallery.stats()
        # A gallery that never saw an image has no bundle yet, and nothing that could be compared wrongly.
        if stats.bundle_id is not None and stats.bundle_id != self.bundle.id:
            raise BundleMismatch(stats.bundle_id, self.bundle.id)
        return stats


@contextmanager
def opened(settings: Settings) -> Iterator[Backend]:
    """Opens everything a request needs, and closes the gallery at the end."""
    bundle = Bundle.load(settings.bundle)
    gallery = open_gallery(settings.gallery)
    try:
        backend = Backend(
            settings=settings,
            bundle=bundle,
            embedder=Embedder(bundle, threads=settings.threads),
            gallery=gallery,
            examples=_photos_in(settings.examples),
            workers=CapacityLimiter(max(2, usable_cores())),
        )
        backend.matching_stats()
        yield backend
    finally:
        gallery.close()


def _photos_in(folder: Path | None) -> dict[str, Path]:
    """Name to file, listed once: a request picks a name from here and never forms a path."""
    if folder is None:
        return {}
    return {
        path.name: path for path in sorted(folder.iterdir()) if path.suffix.lower() in PHOTO_TYPES and path.is_file()
    }


def _backend_of(request: Request) -> Backend:
    return cast(Backend, request.state.backend)


Serving = Annotated[Backend, Depends(_backend_of)]
"""The parameter type by which a route receives the backend."""
