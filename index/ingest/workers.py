"""Workers: turn the photos of a source into digests, vectors and thumbnails, chunk by chunk."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from index._util.byte_budget import ByteBudget
from index._util.system import usable_cores
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import (
    DEFAULT_LIMITS,
    ImageError,
    decode_for_model,
    default_decode_bytes,
    digest,
    hold_memory,
    model_side,
    thumbnail,
)
from index.gallery.types import NewImage
from index.ingest.embedding_plan import KnownDigests, Outcome, Reject, Unchanged, is_unchanged
from index.ingest.places import OWN_FOLDER, AllowedPlaces
from index.ingest.remote_files import FileReader
from index.ingest.sources import SourceImage

_THUMBNAIL_SIDE = 320
"""Approximate length of a thumbnail's longer side, in pixels."""
_MAX_VALUE = np.finfo(np.float16).max
"""The store keeps vectors in half precision."""


class Workers(Protocol):
    """Reads, decodes and embeds chunks of a source."""

    @property
    def ahead(self) -> int:
        """Chunks to submit before the result of the oldest is awaited, so that no worker is idle."""

    def submit(self, chunk: Sequence[SourceImage], known: KnownDigests) -> "Future[list[Outcome]]":
        """Starts on a chunk; the outcomes are in the order of its images."""

    def close(self) -> None:
        """Stops the workers; chunks that were not started are dropped."""


class _Decoded(NamedTuple):
    image: SourceImage
    digest: str
    pixels: NDArray[np.uint8]
    thumbnail: bytes


class LocalWorkers:
    """Workers on this machine: threads read and decode the next chunks while the session embeds one."""

    ahead = 3

    def __init__(
        self,
        bundle: Bundle,
        *,
        allowed: AllowedPlaces = OWN_FOLDER,
        cores: int | None = None,
        max_decode_bytes: int | None = None,
    ) -> None:
        """Uses `cores` cores; default: all that the process may use.

        `max_decode_bytes` is the memory for decoding photos; default: half of the machine's, by the share of its cores.
        """
        usable = usable_cores()
        self._cores = cores or usable
        share = min(1.0, self._cores / usable)
        self._budget = ByteBudget(max_decode_bytes or int(default_decode_bytes() * share))
        self._bundle = bundle
        self._files = FileReader(allowed)
        self._lock = Lock()
        self._loaded: Embedder | None = None
        self._decoders = ThreadPoolExecutor(self._cores + 1, "decode")
        # Two chunks concurrently: the second keeps the cores busy while the first waits for its last images.
        self._sessions = ThreadPoolExecutor(2, "embed")

    def submit(self, chunk: Sequence[SourceImage], known: KnownDigests) -> "Future[list[Outcome]]":
        decoding = [self._decoders.submit(self._decode, image, known) for image in chunk]
        return self._sessions.submit(self._embed, decoding)

    def close(self) -> None:
        for pool in (self._sessions, self._decoders):
            pool.shutdown(cancel_futures=True)

    def _decode(self, image: SourceImage, known: KnownDigests) -> _Decoded | Unchanged | Reject:
        rule = self._bundle.preprocessing
        try:
            data = self._files.read(image.place, image.folder, DEFAULT_LIMITS)
            name = digest(data) if image.region is None else digest(data + repr(image.region).encode())
            if is_unchanged(image, name, known):
                return Unchanged(image.image_id)
            side = model_side(rule) if image.region is None else None
            with hold_memory(self._budget, data, side=side):
                picture, part = decode_for_model(rule, data, DEFAULT_LIMITS, image.region)
                return _Decoded(image, name, rule.apply(picture, part), _thumbnail(picture))
        except ImageError as error:
            return Reject.of(image, error.reason, str(error))

    def _embed(self, decoding: list["Future[_Decoded | Unchanged | Reject]"]) -> list[Outcome]:
        results = [future.result() for future in decoding]
        pixels = [result.pixels for result in results if isinstance(result, _Decoded)]
        vectors = iter(self.embedder().embed(np.stack(pixels)) if pixels else ())
        return [_new_image(result, next(vectors)) if isinstance(result, _Decoded) else result for result in results]

    def embedder(self) -> Embedder:
        """Returns the embedder, loaded for the first image that needs it: an unchanged source loads no model."""
        with self._lock:
            self._loaded = self._loaded or Embedder(self._bundle, threads=self._cores)
            return self._loaded


def _new_image(decoded: _Decoded, vector: NDArray[np.float32]) -> NewImage | Reject:
    image = decoded.image
    if not (np.abs(vector) <= _MAX_VALUE).all():  # also rejects NaN: every comparison with it is false
        problem = (
            "The model returned no finite vector for this photo. Check the photo, or use a bundle of precision fp32."
        )
        return Reject.of(image, "unreadable", problem)
    return NewImage(image.image_id, decoded.digest, vector, decoded.thumbnail)


def _thumbnail(picture: Image.Image) -> bytes:
    """Reduces by an integer factor, which takes a tenth of the time of resizing to an exact size."""
    factor = max(1, round(max(picture.size) / _THUMBNAIL_SIDE))
    return thumbnail(picture.reduce(factor) if factor > 1 else picture, side=2 * _THUMBNAIL_SIDE)
