"""Loads, decodes and embeds the photos of requests, for searches and for writes."""

import asyncio
from collections.abc import Coroutine, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from index._util.byte_budget import ByteBudget
from index.embedding.images import (
    Box,
    ImageLimits,
    Preprocessing,
    hold_memory,
    load_part,
    load_pixels,
    model_side,
)
from service.inference import Embedding, Model
from service.memory import BODY_FACTOR, Holding
from service.problems import URL_DISABLED, ProblemError
from service.requests import Photo
from service.state import ServiceState

Result = TypeVar("Result")
_TOGETHER = 4
"""Photos of one request that are fetched, decoded or embedded at the same time."""


class QueryEmbedding(NamedTuple):
    """The vector of a query photo, the model that made it, and the seconds of each stage."""

    model: Model
    vector: NDArray[np.float32]
    decode: float
    wait: float
    embed: float


async def load_photo(state: ServiceState, photo: Photo, held: Holding) -> bytes:
    """Returns the bytes of a photo that came with the request, or fetches them and counts them in `held`."""
    if photo.data is not None:
        return photo.data
    if state.fetcher is None:
        raise ProblemError(URL_DISABLED)
    async with state.admission.fetch_place():
        return await state.fetcher.fetch(str(photo.url), lambda size: held.add(BODY_FACTOR * size))


async def run_together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns what some coroutines return, of which a few run at the same time; the first error cancels the others.

    The photos of one request must neither displace those of others nor fill the memory.
    """
    limit = asyncio.Semaphore(_TOGETHER)

    async def run(work: Coroutine[Any, Any, Result]) -> Result:
        async with limit:
            return await work

    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(run(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            work.close()  # one that has not begun


async def embed_queries(
    state: ServiceState, photos: Sequence[bytes], boxes: Sequence[Box | None], model: Model
) -> list[QueryEmbedding]:
    """Embeds photos, or parts of them, with the same model."""
    with model.in_use():
        works = [embed_query(state, photo, box, model) for photo, box in zip(photos, boxes, strict=True)]
        return await run_together(works)


async def embed_query(state: ServiceState, photo: bytes, box: Box | None, model: Model) -> QueryEmbedding:
    """Embeds a photo, or a part of it."""
    with model.in_use():
        started = perf_counter()
        rule, limits = model.bundle.preprocessing, state.settings.image_limits
        budget = state.admission.decode_budget
        pixels = await state.admission.run("decode", decode_query, photo, rule, limits, box, budget)
        decoded = perf_counter() - started
        state.telemetry.stage("decode", decoded)
        embedding = await embed_pixels(state, model, pixels)
    return QueryEmbedding(model, embedding.vector, decoded, embedding.waited, embedding.computed)


async def embed_pixels(state: ServiceState, model: Model, pixels: NDArray[np.uint8]) -> Embedding:
    """Embeds decoded pixels and records how long that took."""
    with state.telemetry.queued():
        embedding = await model.batcher.embed(pixels, alone=state.admission.working <= 1)
    state.telemetry.stage("wait", embedding.waited, ago=embedding.computed)
    state.telemetry.stage("embed", embedding.computed)
    return embedding


def decode_query(
    photo: bytes, rule: Preprocessing, limits: ImageLimits, box: Box | None, budget: ByteBudget
) -> NDArray[np.uint8]:
    """Decodes a photo, or the part of it within `box`, to the model's input size, once the budget has the memory."""
    with hold_memory(budget, photo, limits, model_side(rule) if box is None else None):
        if box is None:
            return load_pixels(photo, rule, limits)
        return load_part(photo, rule, box, limits)
