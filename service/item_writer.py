"""Writes items: embeds their photos, and stores both so that the next search finds them.

A write rests on the version of the item that it read, and is repeated when another writer was faster. So an item never
becomes a mixture of two requests, whichever process of the service they reach.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.byte_budget import ByteBudget
from index.embedding.images import (
    ImageLimits,
    Preprocessing,
    decode_for_model,
    digest,
    hold_memory,
    model_side,
    thumbnail,
)
from index.errors import LookalikeError
from index.gallery.errors import VersionConflict
from index.gallery.expiry import current_instant, is_expired
from index.gallery.types import Item, NewImage, StoredImage, StoredItem
from service.admission import Overloaded
from service.inference import Model, NotReady
from service.photos import embed_pixels, load_photo
from service.problems import CONFLICT, ITEM_MISSING, ProblemError
from service.requests import Conditions, ItemWrite, Photo, etag, validate
from service.schemas.items import ItemPatch
from service.state import ServiceState

log = logging.getLogger(__name__)


class WriteResult(NamedTuple):
    """An item as its write left it, and whether the item or one of its images is new."""

    stored: StoredItem
    created: bool
    has_new_images: bool


class _ItemState(NamedTuple):
    """What a write makes of an item: its content, and the images that it loses."""

    item: Item
    surplus: frozenset[str] = frozenset()


async def put_item(state: ServiceState, item_id: str, conditions: Conditions, write: ItemWrite) -> WriteResult:
    """Replaces an item; with photos its images become exactly those, without they stay."""

    def target(seen: StoredItem | None) -> _ItemState:
        item = write.item(item_id)
        if seen is None or write.photos is None:
            return _ItemState(item)
        return _ItemState(item, frozenset(image.id for image in seen.images) - write.photos.keys())

    with state.admission.place("write"):
        return await _store(state, item_id, conditions, target, write.photos or {})


async def patch_item(state: ServiceState, item_id: str, conditions: Conditions, patch: ItemPatch) -> WriteResult:
    """Applies a JSON merge patch to an item."""

    def target(seen: StoredItem | None) -> _ItemState:
        item = _existing(item_id, seen)
        return _ItemState(validate(Item, {**item.model_dump(), **patch.changes(item.attributes)}))

    with state.admission.place("write"):
        return await _store(state, item_id, conditions, target, {})


async def put_image(
    state: ServiceState, item_id: str, image_id: str, conditions: Conditions, photo: Photo
) -> WriteResult:
    """Adds an image to an item, or replaces the one with this id."""

    def target(seen: StoredItem | None) -> _ItemState:
        return _ItemState(_existing(item_id, seen))

    with state.admission.place("write"):
        return await _store(state, item_id, conditions, target, {image_id: photo})


async def delete_item(state: ServiceState, item_id: str, conditions: Conditions) -> None:
    """Deletes an item with its images; an item that does not exist is ignored."""
    delete = state.gallery.delete
    await _delete(state, item_id, conditions, lambda expected: delete([item_id], expected=expected))


async def delete_image(state: ServiceState, item_id: str, image_id: str, conditions: Conditions) -> None:
    """Deletes an image of an item; one that does not exist is ignored."""
    delete = state.gallery.delete_images
    await _delete(state, item_id, conditions, lambda expected: delete(item_id, [image_id], expected=expected))


def item_missing(item_id: str) -> ProblemError:
    """Returns the problem of a request for an item that does not exist."""
    return ProblemError(ITEM_MISSING, f"The gallery has no item {item_id!r}.")


def _existing(item_id: str, seen: StoredItem | None) -> Item:
    if seen is None:
        raise item_missing(item_id)
    return seen.item


def check_conditions(conditions: Conditions, item_id: str, seen: StoredItem | None) -> None:
    """Refuses a write to an item whose version is not the one that the request demands."""
    tag = etag(seen.version) if seen else None
    if not conditions.matches(tag):
        actual = f"Its ETag is {tag}." if tag else "It does not exist."
        raise ProblemError(CONFLICT, f"Item {item_id!r} does not match If-Match. {actual}")
    if tag and conditions.excludes(tag):
        raise ProblemError(CONFLICT, f"Item {item_id!r} exists already, with ETag {tag}.")


async def _store(
    state: ServiceState,
    item_id: str,
    conditions: Conditions,
    target: Callable[[StoredItem | None], _ItemState],
    photos: Mapping[str, Photo],
) -> WriteResult:
    """Stores what `target` makes of the item that is there, with the photos.

    Once it returns, every search finds the item by its photos, also when a bundle that a job is preparing has been
    activated. The version in the result is the one that this write
    made, even when another writer has changed the item since.
    """
    embedder = _PhotoEmbedder(state, item_id, photos)
    for _ in range(state.settings.max_write_attempts):
        stored = await state.admission.run("read", state.gallery.get_item, item_id, with_expired=True)
        # One that has expired does not exist, and leaves no images behind.
        seen = None if stored and is_expired(stored.item.attributes, current_instant()) else stored
        check_conditions(conditions, item_id, seen)
        item, surplus = target(seen)
        if stored and not seen:
            surplus = frozenset(image.id for image in stored.images) - photos.keys()
        model = await state.active_model.ready() if photos else None
        images = await embedder.missing_images(model, state.active_model.prepared) if model else []
        try:
            revision = await _write(state, item, images, model, stored, surplus)
        except VersionConflict:
            continue
        if model:
            try:
                await _add_vectors(state, item_id, embedder, model.bundle.id)
            except LookalikeError as error:  # as it is, the answer would mean that nothing was stored
                raise NotReady(
                    f"The item is stored, but searches do not find all of its photos yet. {error.problem}",
                    "Send the request again.",
                ) from error
        result = _write_result(stored, item, images, surplus, revision)
        return result._replace(created=seen is None)
    raise _too_many_conflicts(state, item_id)


async def _write(
    state: ServiceState,
    item: Item,
    images: list[NewImage],
    model: Model | None,
    seen: StoredItem | None,
    surplus: frozenset[str],
) -> int:
    return await state.admission.run(
        "write",
        state.gallery.upsert,
        [(item, images)],
        model.bundle.id if model else "",
        expected={item.id: seen.version if seen else None},
        without={item.id: surplus},
    )


def _write_result(
    seen: StoredItem | None, item: Item, images: list[NewImage], surplus: frozenset[str], revision: int
) -> WriteResult:
    """Derives the stored item from what was written: reading it again might return a later write of somebody else."""
    held = {image.id: image for image in seen.images} if seen else {}
    added = [image for image in images if image.id not in held or held[image.id].digest != image.digest]
    removed = surplus.union(image.id for image in added)
    kept = [image for image in held.values() if image.id not in removed]
    is_changed = seen is None or added or surplus or _content(item) != _content(seen.item)
    stored = StoredItem(
        item.model_copy(update={"attributes": dict(sorted(item.attributes.items()))}),
        kept + [StoredImage(id=image.id, digest=image.digest) for image in added],
        revision if is_changed or seen is None else seen.version,
    )
    return WriteResult(stored, seen is None, any(image.id not in held for image in images))


def _content(item: Item) -> str:
    """Returns the content as the store compares it: 9 and 9.0 differ, and so do 1 and true."""
    return json.dumps(item.model_dump(), sort_keys=True)


async def _delete(
    state: ServiceState, item_id: str, conditions: Conditions, delete: Callable[[dict[str, int]], int]
) -> None:
    with state.admission.place("write"):
        for _ in range(state.settings.max_write_attempts):
            seen = await state.admission.run("read", state.gallery.get_item, item_id)
            check_conditions(conditions, item_id, seen)
            if seen is None:
                return
            try:
                await state.admission.run("write", delete, {item_id: seen.version})
                return
            except VersionConflict:
                continue
    raise _too_many_conflicts(state, item_id)


def _too_many_conflicts(state: ServiceState, item_id: str) -> Overloaded:
    attempts = state.settings.max_write_attempts
    return state.admission.refuse("conflict", f"Other writers changed item {item_id!r} during {attempts} attempts.")


async def _add_vectors(state: ServiceState, item_id: str, embedder: "_PhotoEmbedder", stored: str) -> None:
    """Adds vectors of the other bundles that searches use, or will use once a job has activated them.

    Which ones is read after the commit with the bundle `stored`. So a bundle is either seen here, or prepared by a job
    that began after the commit and reads its source after that. A prepared bundle that cannot be used is logged and
    counted, but does not fail the write.
    """
    added, failed, conflicts = {stored}, set[str](), 0
    while conflicts < state.settings.max_write_attempts:
        needed = await state.active_model.follow(wait=False)
        lacking = [name for name in (needed.active, *needed.prepared) if name and name not in added]
        bundle_id = next((name for name in lacking if name == needed.active or name not in failed), None)
        if bundle_id is None:
            return
        try:
            await _add_vectors_of(state, item_id, embedder, bundle_id)
            added.add(bundle_id)
        except VersionConflict:
            conflicts += 1
        except Overloaded:
            raise
        except Exception as error:
            if bundle_id == needed.active:
                raise
            failed.add(bundle_id)
            state.telemetry.unprepared(embedder.count)
            log.error("item %r is stored without vectors of bundle %s: %s", item_id, bundle_id, error)
    raise _too_many_conflicts(state, item_id)


async def _add_vectors_of(state: ServiceState, item_id: str, embedder: "_PhotoEmbedder", bundle_id: str) -> None:
    model = await state.active_model.load(bundle_id)
    images = await embedder.missing_images(model)
    seen = await state.admission.run("read", state.gallery.get_item, item_id, with_expired=True)
    if seen is None:  # deleted by another request since
        return
    held = {image.id: image.digest for image in seen.images}
    images = [image for image in images if held.get(image.id) == image.digest]
    if images:
        await _write(state, seen.item, images, model, seen, frozenset())


class _PhotoEmbedder:
    """Embeds the photos of one request, each at most once per bundle however often the write is repeated."""

    def __init__(self, state: ServiceState, item_id: str, photos: Mapping[str, Photo]) -> None:
        self._state = state
        self._item_id = item_id
        self._photos = photos
        self._digests: dict[str, str] = {}
        self._images: dict[tuple[str, str], NewImage] = {}

    @property
    def count(self) -> int:
        return len(self._photos)

    async def missing_images(self, model: Model, others: Sequence[Model] = ()) -> list[NewImage]:
        """Returns the photos that have no vector of the model's bundle in the gallery, ready to be stored.

        A photo that is decoded for that is embedded with the `others` too: it need not be fetched and decoded again
        when their vectors are stored.
        """
        bundle_id = model.bundle.id
        with ExitStack() as stack:
            for used in (model, *others):
                stack.enter_context(used.in_use())
            stored = await self._state.admission.run("read", self._state.gallery.digests, self._item_id, bundle_id)
            # One after the other: the photos of one request must not displace those of others, nor fill the memory.
            for image_id in self._photos:
                known = stored.get(image_id)
                if (image_id, bundle_id) not in self._images and (
                    known is None or known != self._digests.get(image_id)
                ):
                    await self._embed(model, others, image_id, known)
        images = [self._images.get((image_id, bundle_id)) for image_id in self._photos]
        return [image for image in images if image and image.digest != stored.get(image.id)]

    async def _embed(self, model: Model, others: Sequence[Model], image_id: str, known: str | None) -> None:
        """Embeds a photo, unless its digest turns out to be the known one."""
        admission = self._state.admission
        with admission.received.hold() as held:
            data = await load_photo(self._state, self._photos[image_id], held)
            started = perf_counter()
            rules = list(dict.fromkeys(used.bundle.preprocessing for used in (model, *others)))
            limits, budget = self._state.settings.image_limits, admission.decode_budget
            decoded = await admission.run("decode", _decode, data, rules, limits, known, budget)
        if self._digests.setdefault(image_id, decoded.digest) != decoded.digest:
            raise admission.refuse("conflict", f"The photo of image {image_id!r} changed while it was being stored.")
        if not decoded.pixels:
            return
        self._state.telemetry.stage("decode", perf_counter() - started)
        await self._embed_decoded(model, image_id, decoded)
        for other in others:
            try:
                await self._embed_decoded(other, image_id, decoded)
            except Overloaded:
                raise
            except Exception as error:  # repeated after the commit, where a failure is counted
                log.warning("bundle %s, which is not active, cannot embed a photo: %s", other.bundle.id, error)

    async def _embed_decoded(self, model: Model, image_id: str, decoded: "_DecodedPhoto") -> None:
        embedding = await embed_pixels(self._state, model, decoded.pixels[model.bundle.preprocessing])
        image = NewImage(image_id, decoded.digest, embedding.vector, decoded.thumbnail)
        self._images[image_id, model.bundle.id] = image


class _DecodedPhoto(NamedTuple):
    digest: str
    pixels: Mapping[Preprocessing, NDArray[np.uint8]]
    thumbnail: bytes = b""


def _decode(
    data: bytes, rules: Sequence[Preprocessing], limits: ImageLimits, known: str | None, budget: ByteBudget
) -> _DecodedPhoto:
    """Decodes a photo once per rule, for its vectors and its thumbnail; not at all when it has the known digest."""
    name = digest(data)
    pixels: dict[Preprocessing, NDArray[np.uint8]] = {}
    small = b""
    for rule in rules if name != known else ():
        with hold_memory(budget, data, limits, model_side(rule)):
            picture, part = decode_for_model(rule, data, limits)
            pixels[rule] = rule.apply(picture, part)
            small = small or thumbnail(picture)
    return _DecodedPhoto(name, pixels, small)
