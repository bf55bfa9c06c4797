"""Writes items of one gallery to another so that both are equal, the order of the images included."""

from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from index.errors import LookalikeError
from index.gallery.contents import ItemOutline
from index.gallery.store.base import BundleRow, ImageContent, ItemStore, StoreReader
from index.gallery.types import Item, NewImage

_CHUNK_IMAGES = 512
"""Images whose vectors and thumbnails are in memory at a time, more only for a single item."""
_PLACEHOLDER = "lookalike-copy-placeholder"
_DIGEST = sha256(_PLACEHOLDER.encode()).hexdigest()
_NO_VECTORS = "lookalike-copy-no-vectors"
"""The bundle of images that have no vector: it is dropped at the end of a pass."""

Run = tuple[str, list[str]]
"""A bundle, and ids of images of which vectors of it are written together."""


class Plan(NamedTuple):
    """How an item of the target becomes equal to the source's."""

    item: Item
    removed: list[str]
    """Ids of images that are removed first."""
    runs: list[Run]
    """To be written one after another, at least one."""

    @property
    def image_ids(self) -> set[str]:
        return {name for _, names in self.runs for name in names}


def plan_item(wanted: ItemOutline, found: ItemOutline | None, bundles: Collection[str]) -> Plan | None:
    """Returns how to write an item that differs; None if it is equal."""
    stored = {image.id: image for image in wanted.images}
    copied = found.images if found else []
    fitting = [image for image in copied if _fits(stored.get(image.id), image, bundles)]
    # Images can only be appended: those that follow the first gap are written again.
    pairs = zip(fitting, wanted.images, strict=False)
    kept = {image.id: image for image, _ in takewhile(lambda pair: pair[0].id == pair[1].id, pairs)}
    runs = _order(wanted.images[len(kept) :])
    written = {(bundle, name) for bundle, names in runs for name in names}
    for bundle in sorted(bundles):
        rest = [
            image.id
            for image in wanted.images
            if bundle in image.vectors
            and (bundle, image.id) not in written
            and (image.id not in kept or kept[image.id].vectors.get(bundle) != image.vectors[bundle])
        ]
        runs += [(bundle, rest)] if rest else []
    removed = [image.id for image in copied if image.id not in kept]
    if found and not removed and not runs and found.text == wanted.text:
        return None
    return Plan(wanted.item, removed, runs or [(_NO_VECTORS, [])])


def _fits(wanted: ImageContent | None, found: ImageContent, bundles: Collection[str]) -> bool:
    """Whether an image of the target becomes equal by adding vectors: one that is too much cannot be removed."""
    return (
        wanted is not None
        and (found.digest, found.thumbnail) == (wanted.digest, wanted.thumbnail)
        and found.vectors.keys() & bundles <= wanted.vectors.keys()
    )


def _order(images: Sequence[ImageContent]) -> list[Run]:
    """Returns runs that create images in their order: usually one, of a bundle of which all have a vector."""
    runs: list[Run] = []
    start = 0
    while start < len(images):
        rest = images[start:]
        lengths = {name: len(list(takewhile(lambda it: name in it.vectors, rest))) for name in rest[0].vectors}  # noqa: B023
        bundle = max(sorted(lengths), key=lengths.__getitem__) if lengths else _NO_VECTORS
        count = lengths[bundle] if lengths else len(list(takewhile(lambda it: not it.vectors, rest)))
        runs.append((bundle, [image.id for image in rest[:count]]))
        start += count
    return runs


class ItemSync:
    """Writes planned items, with content from one instant of the source."""

    def __init__(self, reader: StoreReader, target: ItemStore, bundles: Sequence[BundleRow]) -> None:
        self._reader, self._target, self._bundles = reader, target, bundles

    def add_bundles(self) -> None:
        """Adds the bundles that the target lacks, in their order, also those without vectors."""
        for row in self._bundles:
            found = self._target.read.bundle(row.id)
            if found and found.dimension != row.dimension:
                raise LookalikeError(
                    f"Bundle {row.id} has {row.dimension} numbers per vector, in the target {found.dimension}.",
                    "Copy to a new gallery.",
                )
            if found is None:
                # Only an image can bring a bundle into a store.
                image = NewImage("image", _DIGEST, np.zeros(row.dimension, np.float32), b"")
                self._target.upsert([(Item(id=_PLACEHOLDER), [image])], row.id, activate_first=False)
                self._target.delete([_PLACEHOLDER])

    def write(self, plans: Sequence[Plan]) -> None:
        """Writes items, those with many images in several transactions."""
        chunk: list[Plan] = []
        images = 0
        for plan in plans:
            count = len(plan.image_ids)
            if chunk and images + count > _CHUNK_IMAGES:
                self._write_chunk(chunk)
                chunk, images = [], 0
            chunk.append(plan)
            images += count
        if chunk:
            self._write_chunk(chunk)

    def _write_chunk(self, plans: Sequence[Plan]) -> None:
        needed = [plan.item.id for plan in plans if plan.image_ids]
        contents = {
            item_id: {image.id: image for image in images}
            for item_id, images in self._reader.image_contents(needed, hashed=False).items()
        }
        for step in range(max(len(plan.runs) for plan in plans)):
            for bundle, chosen in _by_bundle(plans, step):
                entries = [
                    (plan.item, [_new_image(contents[plan.item.id][name], bundle) for name in plan.runs[step][1]])
                    for plan in chosen
                ]
                without = {} if step else {plan.item.id: plan.removed for plan in chosen if plan.removed}
                self._target.upsert(entries, bundle, without=without, activate_first=False)


def _by_bundle(plans: Sequence[Plan], step: int) -> Iterator[tuple[str, list[Plan]]]:
    """Yields the bundles of the plans' runs at a step, and the plans of each."""
    chosen: dict[str, list[Plan]] = {}
    for plan in plans:
        if step < len(plan.runs):
            chosen.setdefault(plan.runs[step][0], []).append(plan)
    yield from chosen.items()


def _new_image(image: ImageContent, bundle: str) -> NewImage:
    vector = image.vectors.get(bundle, np.zeros(1, "<f2").tobytes())
    return NewImage(image.id, image.digest, np.frombuffer(vector, "<f2").astype(np.float32), image.thumbnail)
