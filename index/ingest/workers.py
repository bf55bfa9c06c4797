"""The hard work of a re-index: photos to digests, vectors and thumbnails, a chunk at a time."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from index._util.system import usable_cores
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import DEFAULT_LIMITS, ImageError, decode_for_model, digest, thumbnail
from index.gallery.types import NewImage
from index.ingest.remote_files import Places
from index.ingest.sources import Source, SourceImage

_THUMBNAIL = 320
"""About as many pixels has the longer side of a thumbnail."""
_LARGEST = np.finfo(np.float16).max
"""The catalogue keeps vectors in half precision."""

Known = Mapping[tuple[str, str], str]
"""Item id and image id to the digest of what the gallery already has a vector of."""


class Reject(NamedTuple):
    """A photo that could not be indexed, and why."""

    item_id: str
    image_id: str
    place: str
    reason: str
    problem: str


class Unchanged(NamedTuple):
    """A photo that the gallery already has, byte for byte."""

    image_id: str


Outcome = NewImage | Unchanged | Reject


class Workers(Protocol):
    """Who turns chunks of a source into outcomes, in the order of the chunk."""

    @property
    def ahead(self) -> int:
        """Chunks to hand in before the oldest is done, so that nobody waits for work."""

    def submit(self, chunk: Sequence[SourceImage], known: Known) -> "Future[list[Outcome]]": ...

    def close(self) -> None: ...


class _Decoded(NamedTuple):
    image: SourceImage
    digest: str
    pixels: NDArray[np.uint8]
    thumbnail: bytes


class LocalWorkers:
    """This machine: threads read and decode the next chunks while the session embeds one."""

    ahead = 3

    def __init__(self, source: Source | Places, bundle: Bundle, *, cores: int | None = None) -> None:
        """Uses `cores`, or all that the process may use."""
        self._cores = cores or usable_cores()
        self._source = source
        self._bundle = bundle
        self._lock = Lock()
        self._made: Embedder | None = None
        self._decoders = ThreadPoolExecutor(self._cores + 1, "decode")
        # Two chunks at once: the second keeps the cores busy while the first waits for its last images.
        self._sessions = ThreadPoolExecutor(2, "embed")

    def submit(self, chunk: Sequence[SourceImage], known: Known) -> "Future[list[Outcome]]":
        decoding = [self._decoders.submit(self._decode, image, known) for image in chunk]
        return self._sessions.submit(self._embed, decoding)

    def close(self) -> None:
        for pool in (self._sessions, self._decoders):
            pool.shutdown(cancel_futures=True)

    def _decode(self, image: SourceImage, known: Known) -> _Decoded | Unchanged | Reject:
        rule = self._bundle.preprocessing
        try:
            data = self._source.read(image.place, DEFAULT_LIMITS)
            name = digest(data)
            if known.get((image.item.id, image.image_id)) == name:
                return Unchanged(image.image_id)
            picture, part = decode_for_model(rule, data)
        except ImageError as error:
            return Reject(image.item.id, image.image_id, image.place, error.reason, str(error))
        return _Decoded(image, name, rule.apply(picture, part), _thumbnail(picture))

    def _embed(self, decoding: list["Future[_Decoded | Unchanged | Reject]"]) -> list[Outcome]:
        prepared = [future.result() for future in decoding]
        pixels = [one.pixels for one in prepared if isinstance(one, _Decoded)]
        vectors = iter(self.embedder().embed(np.stack(pixels)) if pixels else ())
        return [_embedded(one, next(vectors)) if isinstance(one, _Decoded) else one for one in prepared]

    def embedder(self) -> Embedder:
        """Made for the first image that needs it: a night without news loads no model."""
        with self._lock:
            self._made = self._made or Embedder(self._bundle, threads=self._cores)
            return self._made


def _embedded(one: _Decoded, vector: NDArray[np.float32]) -> NewImage | Reject:
    image = one.image
    if not (np.abs(vector) <= _LARGEST).all():  # which is said of no NaN
        problem = (
            "The model makes no finite vector of this photo. Look at the photo, or use a bundle of precision fp32."
        )
        return Reject(image.item.id, image.image_id, image.place, "unreadable", problem)
    return NewImage(image.image_id, one.digest, vector, one.thumbnail)


def _thumbnail(picture: Image.Image) -> bytes:
    """Reduced by a whole factor, which takes a tenth of the time that resizing to an exact size does."""
    factor = max(1, round(max(picture.size) / _THUMBNAIL))
    return thumbnail(picture.reduce(factor) if factor > 1 else picture, side=2 * _THUMBNAIL)
