"""Loads, decodes and embeds the photos of requests, for searches and for writes."""

from time import perf_counter
from typing import NamedTuple

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
