"""The walk of a photo: bytes to pixels in a thread, pixels to a vector in a batch, a vector to items in a thread."""

import asyncio
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import anyio.lowlevel
import anyio.to_thread
import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from index.embedding.images import Box, EncodedImage, ImageError, load_pixels
from index.gallery import BundleMismatch
from service.inference import Embedded, Overloaded
from service.live_model import Model
from service.problems import URL_OFF, ProblemError
from service.schemas.search import Milliseconds
from service.state import ServiceState

Answer = TypeVar("Answer")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class Looked(NamedTuple):
    """The vector of a photo, the model that made it, and where the time went."""

    model: Model
    vector: NDArray[np.float32]
    decode: float
    wait: float
    embed: float


async def while_connected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Does the work unless the client leaves before it is done: then what is left of it is dropped."""
    with anyio.CancelScope() as scope:  # a thread that has begun is waited for: it holds memory that is counted
        watching = asyncio.create_task(_cancel_when_left(request, scope))
        try:
            return await work
        finally:
            watching.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
    raise ClientLeft


async def _cancel_when_left(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def photo_bytes(state: ServiceState, photo: bytes | None, url: str | None) -> bytes:
    """A photo that came with the request, or is fetched for it."""
    if photo is not None:
        return photo
    if state.fetcher is None:
        raise ProblemError(URL_OFF, URL_OFF.detail)
    return await state.fetcher.fetch(str(url))


async def look(state: ServiceState, photo: bytes, box: Box | None = None, model: Model | None = None) -> Looked:
    """Embeds a photo, or a part of it, with the model of the live bundle."""
    model = model or await state.active_model.ready()
    with model.in_use():
        begun = perf_counter()
        pixels = await anyio.to_thread.run_sync(_pixels, state, model, photo, box, limiter=state.decoders)
        decoded = perf_counter() - begun
        state.telemetry.stage("decode", decoded)
        embedded = await embed(state, model, pixels)
    return Looked(model, embedded.vector, decoded, embedded.waited, embedded.worked)


async def embed(state: ServiceState, model: Model, pixels: NDArray[np.uint8]) -> Embedded:
    """The vector of one photo, and how long it took, which is noted."""
    try:
        with state.telemetry.queued():
            embedded = await model.batcher.embed(pixels, alone=state.working <= 1)
    except Overloaded:
        state.telemetry.refused("queue")
        raise
    state.telemetry.stage("wait", embedded.waited, ago=embedded.worked)
    state.telemetry.stage("embed", embedded.worked)
    return embedded


def _pixels(state: ServiceState, model: Model, photo: bytes, box: Box | None) -> NDArray[np.uint8]:
    rule, limits = model.bundle.preprocessing, state.settings.image_limits
    if box is None:
        return load_pixels(photo, rule, limits)
    image = EncodedImage(photo, limits)
    left, top, right, bottom = (round(share * side) for share, side in zip(box, image.size * 2, strict=True))
    if left >= right or top >= bottom:
        raise ImageError("empty", f"The box {box} holds no pixel of the photo.", "Draw a larger one.")
    return rule.apply(*image.read((left, top, right, bottom), rule.resize))


async def find_photo(
    state: ServiceState, photo: bytes, box: Box | None, search: Callable[[NDArray[np.float32], str], Answer]
) -> tuple[Answer, Looked]:
    """Embeds and searches. Should the bundle have been exchanged twice meanwhile, it looks again with the new one."""
    looked = await look(state, photo, box)
    for last in (False, True):
        try:
            answer = await anyio.to_thread.run_sync(
                search, looked.vector[np.newaxis], looked.model.bundle.id, limiter=state.searchers
            )
            return answer, looked
        except BundleMismatch:
            if last:
                raise
            looked = await look(state, photo, box, await state.active_model.followed())
    raise AssertionError("unreachable")


def milliseconds(looked: Looked | None, search: float) -> Milliseconds:
    """Where the time of an answer went."""
    stages = (looked.decode, looked.wait, looked.embed) if looked else (0.0, 0.0, 0.0)
    decoded, wait, embed, found = (round(seconds * 1000, 2) for seconds in (*stages, search))
    return Milliseconds(decode=decoded, wait=wait, embed=embed, search=found)
