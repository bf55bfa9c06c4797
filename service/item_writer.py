"""Writing items: photos are embedded, then stored with their item, and found by the next search.

A write rests on the version of the item that it read, and is done again when somebody else was faster. So an item never
becomes a mixture of two requests, whichever process of the service they reach.
"""

from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from typing import Annotated, NamedTuple, ParamSpec, TypeVar

import anyio.to_thread
import numpy as np
from fastapi import Header, Request
from numpy.typing import NDArray

from index.embedding.images import decode_for_model, digest, thumbnail
from index.gallery import Gallery
from index.gallery.store.sqlite import VersionConflict
from index.gallery.types import Item, NewImage, StoredItem
from service.live_model import Model, NotReady
from service.problems import CONFLICT, ITEM_MISSING, ProblemError
from service.schemas.items import Photo
from service.search_pipeline import embed, photo_bytes
from service.state import ServiceState

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


async def in_thread(
    state: ServiceState, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Answer:
    """Calls the gallery without holding up the event loop."""
    return await anyio.to_thread.run_sync(lambda: work(*args, **kwargs), limiter=state.searchers)


def missing(item_id: str) -> ProblemError:
    """The problem of a request that names an item which is not there."""
    return ProblemError(ITEM_MISSING, f"The gallery has no item {item_id!r}.")


def tag_of(version: int) -> str:
    """The ETag of an item."""
    return f'"{version}"'


class Conditions(NamedTuple):
    """What a request demands of an item's version."""

    if_match: set[str] | None
    if_none_match: set[str]

    def check(self, item_id: str, seen: StoredItem | None) -> None:
        """Refuses a write to an item that is not as demanded."""
        tag = tag_of(seen.version) if seen else None
        if self.if_match is not None and not (seen and {tag, "*"} & self.if_match):
            told = f"Its ETag is {tag}." if seen else "It does not exist."
            raise ProblemError(CONFLICT, f"Item {item_id!r} is not the one of If-Match. {told}")
        if seen and self.holds(seen):
            raise ProblemError(CONFLICT, f"Item {item_id!r} exists already, with ETag {tag}.")

    def holds(self, seen: StoredItem) -> bool:
        """Whether the sender has this version already, or wants none."""
        known = {tag.removeprefix("W/") for tag in self.if_none_match}
        return bool({tag_of(seen.version), "*"} & known)


async def conditions(
    request: Request,
    if_match: Annotated[str, Header(description='only if the ETag is one of these, such as `"7"`')] = "",
    if_none_match: Annotated[str, Header(description="not if the ETag is one of these; `*` for none at all")] = "",
) -> Conditions:
    """Reads them from the headers of a request, which may come in several lines; the parameters only describe them."""
    return Conditions(_tags(request, "if-match"), _tags(request, "if-none-match") or set())


def _tags(request: Request, header: str) -> set[str] | None:
    """None without such a header: one that names no tag is a condition that nothing meets."""
    lines = request.headers.getlist(header)
    return {tag for line in lines for part in line.split(",") if (tag := part.strip())} if lines else None


class Written(NamedTuple):
    """An item after a write, and whether there was none before."""

    stored: StoredItem
    created: bool
    new_images: bool


async def store(
    state: ServiceState,
    item_id: str,
    wanted: Conditions,
    become: Callable[[StoredItem | None], Item],
    photos: Mapping[str, Photo] = {},
    *,
    only: bool = False,
) -> Written:
    """Makes an item what `become` says and gives it the photos; with `only` its other images go.

    Once it returns, every search finds the item by its photos.
    """
    while True:
        seen = await in_thread(state, state.gallery.stored, item_id)
        wanted.check(item_id, seen)
        item = become(seen)
        held = {image.id for image in seen.images} if seen else set()
        surplus = held - photos.keys() if only else set()
        model = await state.active_model.ready() if photos else None
        images = await _embedded(state, model, item_id, photos) if model else []
        bundle_id = model.bundle.id if model else ""
        version = seen.version if seen else None
        try:
            await in_thread(state, _write, state.gallery, item, images, bundle_id, version, surplus)
        except VersionConflict:
            continue
        if model:
            await _follow(state, item_id, photos, model)
        stored = await in_thread(state, state.gallery.stored, item_id)
        if stored is None:  # written, and deleted by somebody else since
            raise missing(item_id)
        return Written(stored, seen is None, any(image.id not in held for image in images))


async def remove(
    state: ServiceState, item_id: str, wanted: Conditions, delete: Callable[[dict[str, int]], int]
) -> None:
    """Deletes an item, or something of it, if its version is as demanded; what is gone already stays so."""
    while True:
        seen = await in_thread(state, state.gallery.stored, item_id)
        wanted.check(item_id, seen)
        if seen is None:
            return
        try:
            await in_thread(state, delete, {item_id: seen.version})
            return
        except VersionConflict:
            continue


def _write(
    gallery: Gallery,
    item: Item,
    images: list[NewImage],
    bundle_id: str,
    version: int | None,
    surplus: Collection[str] = (),
) -> None:
    gallery.upsert([(item, images)], bundle_id, expected={item.id: version}, without={item.id: surplus})


async def _follow(state: ServiceState, item_id: str, photos: Mapping[str, Photo], model: Model) -> None:
    """Another bundle may have gone live since the photos were embedded: then they get its vectors too."""
    while await in_thread(state, state.gallery.live_bundle) != model.bundle.id:
        seen = await in_thread(state, state.gallery.stored, item_id)
        if seen is None:  # deleted by somebody else since
            return
        newer = await state.active_model.followed()
        if newer is model:
            raise NotReady(
                "The item is stored, but the model that went live meanwhile cannot be loaded to embed its photos.",
                "Send the request again.",
            )
        held = {image.id: image.digest for image in seen.images}
        images = await _embedded(state, newer, item_id, photos)
        current = [image for image in images if held.get(image.id) == image.digest]
        try:
            await in_thread(state, _write, state.gallery, seen.item, current, newer.bundle.id, seen.version)
        except VersionConflict:
            continue
        model = newer


async def _embedded(state: ServiceState, model: Model, item_id: str, photos: Mapping[str, Photo]) -> list[NewImage]:
    """The photos that have no vector of the model's bundle yet, ready to be stored."""
    images = []
    with model.in_use():
        known = await in_thread(state, state.gallery.digests, item_id, model.bundle.id)
        # One after the other: the photos of one request must not crowd out those of others, nor fill the memory.
        for image_id, photo in photos.items():
            data = await photo_bytes(state, photo.data, photo.url)
            new = await anyio.to_thread.run_sync(
                _new_one, state, model, data, known.get(image_id), limiter=state.decoders
            )
            if new:
                embedded = await embed(state, model, new.pixels)
                images.append(NewImage(image_id, new.digest, embedded.vector, new.thumbnail))
    return images


class _New(NamedTuple):
    digest: str
    pixels: NDArray[np.uint8]
    thumbnail: bytes


def _new_one(state: ServiceState, model: Model, data: bytes, known: str | None) -> _New | None:
    """What a photo is embedded from and shown as, of one decoding; none when it is the one that is known."""
    name = digest(data)
    if name == known:
        return None
    rule, begun = model.bundle.preprocessing, perf_counter()
    picture, part = decode_for_model(rule, data, state.settings.image_limits)
    pixels = rule.apply(picture, part)
    state.telemetry.stage("decode", perf_counter() - begun)
    return _New(name, pixels, thumbnail(picture))
