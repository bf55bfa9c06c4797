"""The hard work of a re-index: photos to digests, vectors and thumbnails, a chunk at a time."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from index.cores import usable_cores
from index.embedder import Embedder
from index.images import DEFAULT_LIMITS, ImageError, decode, digest, thumbnail
from index.items import NewImage
from index.sources import Source, SourceImage

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

    def submit(self, chunk: Sequence[SourceImage], known: Known) -> "Future[list[Outcome]]": ...

    def close(self) -> None: ...


class _Decoded(NamedTuple):
    image_id: str
    digest: str
    pixels: NDArray[np.uint8]
    thumbnail: bytes


class LocalWorkers:
    """This machine: threads read and decode the next chunks while the session embeds one."""

    def __init__(self, source: Source, embedder: Embedder) -> None:
        self._source = source
        self._embedder = embedder
        self._decoders = ThreadPoolExecutor(usable_cores() + 1, "decode")
        self._session = ThreadPoolExecutor(1, "embed")

    def submit(self, chunk: Sequence[SourceImage], known: Known) -> "Future[list[Outcome]]":
        decoding = [self._decoders.submit(self._decode, image, known) for image in chunk]
        return self._session.submit(self._embed, decoding)

    def close(self) -> None:
        for pool in (self._session, self._decoders):
            pool.shutdown(cancel_futures=True)

    def _decode(self, image: SourceImage, known: Known) -> _Decoded | Unchanged | Reject:
        rule = self._embedder.bundle.preprocessing
        try:
            data = self._source.read(image.place, DEFAULT_LIMITS)
            name = digest(data)
            if known.get((image.item.id, image.image_id)) == name:
                return Unchanged(image.image_id)
            picture = decode(data, DEFAULT_LIMITS, rule)
        except ImageError as error:
            return Reject(image.item.id, image.image_id, image.place, error.reason, str(error))
        return _Decoded(image.image_id, name, rule.apply(picture), thumbnail(picture))

    def _embed(self, decoding: list["Future[_Decoded | Unchanged | Reject]"]) -> list[Outcome]:
        prepared = [future.result() for future in decoding]
        pixels = [one.pixels for one in prepared if isinstance(one, _Decoded)]
        vectors = iter(self._embedder.embed(np.stack(pixels)) if pixels else ())
        return [
            NewImage(one.image_id, one.digest, next(vectors), one.thumbnail) if isinstance(one, _Decoded) else one
            for one in prepared
        ]
