"""Re-indexing: a source into a gallery, embedding only what is new, and then making it live."""

import csv
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from index.embedder import Embedder
from index.errors import LookalikeError
from index.files import written_whole
from index.gallery import Gallery
from index.images import DEFAULT_LIMITS, ImageError, decode, digest, thumbnail
from index.items import Frozen, Item, NewImage
from index.sources import Source, SourceImage

_CHUNK = 128
"""Images of one transaction: large enough to fill batches, small enough to hold in memory."""


class Reject(NamedTuple):
    """A photo that could not be indexed, and why."""

    item_id: str
    path: str
    reason: str


class Summary(Frozen):
    """What a re-indexing run did."""

    embedded: int
    unchanged: int
    rejected: int
    generation: str


class _Prepared(NamedTuple):
    source: SourceImage
    digest: str
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None
    """None for an image that already has a vector of this bundle."""
    thumbnail: bytes


def reindex(
    source: Source,
    *,
    gallery: Gallery,
    embedder: Embedder,
    rejects_file: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Indexes every photo of a source and activates the result; bad photos go to `rejects_file`."""
    total = source.check().images
    embedded = unchanged = 0
    rejects: list[Reject] = []
    with ThreadPoolExecutor() as pool:
        for done, chunk in _chunks(source):
            outcomes = list(pool.map(lambda image: _prepare(image, source, gallery, embedder), chunk))
            rejects += [outcome for outcome in outcomes if isinstance(outcome, Reject)]
            ready = [outcome for outcome in outcomes if isinstance(outcome, _Prepared)]
            fresh = [prepared for prepared in ready if prepared.pixels is not None]
            _store(ready, fresh, gallery, embedder)
            embedded += len(fresh)
            unchanged += len(ready) - len(fresh)
            on_progress(done, total)
    _write_rejects(rejects_file, rejects)
    if not embedded + unchanged:
        raise LookalikeError(
            f"None of the {total} images could be indexed; the first: {rejects[0].reason}",
            f"See {rejects_file} for each.",
        )
    generation = gallery.activate(embedder.bundle.id)
    return Summary(embedded=embedded, unchanged=unchanged, rejected=len(rejects), generation=generation)


def _chunks(images: Iterable[SourceImage]) -> Iterator[tuple[int, list[SourceImage]]]:
    iterator, done = iter(images), 0
    while chunk := list(islice(iterator, _CHUNK)):
        done += len(chunk)
        yield done, chunk


def _prepare(image: SourceImage, source: Source, gallery: Gallery, embedder: Embedder) -> _Prepared | Reject:
    rule = embedder.bundle.preprocessing
    try:
        data = source.read(image.place, DEFAULT_LIMITS)
        name = digest(data)
        if gallery.digests(image.item.id, embedder.bundle.id).get(image.image_id) == name:
            return _Prepared(image, name, None, b"")
        picture = decode(data, DEFAULT_LIMITS, rule)
    except ImageError as error:
        return Reject(image.item.id, image.place, str(error))
    return _Prepared(image, name, rule.apply(picture), thumbnail(picture))


def _store(ready: list[_Prepared], fresh: list[_Prepared], gallery: Gallery, embedder: Embedder) -> None:
    """Embeds the fresh images in full batches and writes them and their items in one transaction."""
    new: dict[tuple[str, str], NewImage] = {}
    if fresh:
        vectors = embedder.embed(np.stack([prepared.pixels for prepared in fresh if prepared.pixels is not None]))
        for prepared, vector in zip(fresh, vectors, strict=True):
            image = NewImage(prepared.source.image_id, prepared.digest, vector, prepared.thumbnail)
            new[prepared.source.item.id, image.id] = image
    entries: list[tuple[Item, list[NewImage]]] = []
    for item_id, group in groupby(ready, key=lambda prepared: prepared.source.item.id):
        sources = [prepared.source for prepared in group]
        found = [new[item_id, source.image_id] for source in sources if (item_id, source.image_id) in new]
        entries.append((sources[-1].item, found))
    gallery.upsert(entries, embedder.bundle.id)


def _write_rejects(path: Path, rejects: list[Reject]) -> None:
    """The file always tells of the last run, so an old one goes when nothing was rejected."""
    if not rejects:
        path.unlink(missing_ok=True)
        return
    with written_whole(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Reject._fields)
        writer.writerows(rejects)
