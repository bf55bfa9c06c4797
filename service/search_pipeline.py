"""Runs a search: photo to vector, vector to items, items to the answer."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from index.gallery import Hit, SearchResult
from index.gallery.errors import BundleMismatch
from service.answers import AnswerWriter, join_items
from service.memory import Holding
from service.photos import QueryEmbedding, embed_query, load_photo
from service.requests import SearchRequest
from service.schemas.search import BatchAnswer, Match, MatchedImage, Milliseconds, SearchAnswer, SearchOptions
from service.state import ServiceState


async def search(state: ServiceState, request: SearchRequest, media: str, held: Holding) -> bytes:
    """Returns, as JSON, the items that look like the photo or the item of a request; `media` is where thumbnails are.

    The answer is counted in `held` while it is made.
    """
    return await _search(state, request, media, AnswerWriter(held, state.settings.max_answer_bytes))


async def search_batch(state: ServiceState, requests: list[SearchRequest], media: str, held: Holding) -> bytes:
    """Runs several searches one after the other: a batch must not displace the photos of other requests."""
    writer = AnswerWriter(held, state.settings.max_answer_bytes)
    answers = [await _search(state, request, media, writer) for request in requests]
    return join_items(BatchAnswer(answers=[]), "answers", answers)


async def _search(state: ServiceState, request: SearchRequest, media: str, writer: AnswerWriter) -> bytes:
    if request.item_id is not None:
        with state.admission.place("search"):
            bounded = partial(state.gallery.search_item, request.item_id, **request.bounds)
            found = await state.admission.run("search", _find, state, bounded, request, media, writer)
        return _answer(state, found, None)
    with state.admission.received.hold() as fetched:
        photo = await load_photo(state, request.photo, fetched)
        # Taken after the photo was fetched: a slow host must not keep other searches from working.
        with state.admission.place("search"):
            found, embedding = await _search_photo(state, request, photo, media, writer)
    return _answer(state, found, embedding)


class _Found(NamedTuple):
    """The result of a search, the JSON of each item, why there are none, and the seconds that the search took."""

    result: SearchResult
    items: list[bytes]
    hints: list[str]
    seconds: float


async def _search_photo(
    state: ServiceState, request: SearchRequest, photo: bytes, media: str, writer: AnswerWriter
) -> tuple[_Found, QueryEmbedding]:
    """Embeds a photo and searches; embeds it again if its bundle was replaced twice meanwhile."""
    embedding = await embed_query(state, photo, request.options.box, await state.active_model.ready())
    try:
        return await _search_vector(state, request, embedding, media, writer), embedding
    except BundleMismatch:
        await state.active_model.follow()
        embedding = await embed_query(state, photo, request.options.box, state.active_model.current())
        return await _search_vector(state, request, embedding, media, writer), embedding


async def _search_vector(
    state: ServiceState, request: SearchRequest, embedding: QueryEmbedding, media: str, writer: AnswerWriter
) -> _Found:
    vectors, bundle_id = embedding.vector[np.newaxis], embedding.model.bundle.id
    bounded = partial(state.gallery.search, vectors, bundle_id=bundle_id, **request.bounds)
    return await state.admission.run("search", _find, state, bounded, request, media, writer)


def _find(
    state: ServiceState, search: Callable[[], SearchResult], request: SearchRequest, media: str, writer: AnswerWriter
) -> _Found:
    """Searches and reads the items in one call: a switch of threads costs as much as a search."""
    started = perf_counter()
    result = search()
    seconds = perf_counter() - started
    options, filter = request.options, request.filter
    items = [writer.encode(_match(state, hit, options, result.bundle_id, media)) for hit in result.hits[0]]
    return _Found(result, items, [] if items or not filter else state.gallery.filter_hints(filter), seconds)


def _match(state: ServiceState, hit: Hit, options: SearchOptions, bundle_id: str, media: str) -> Match:
    item, image = hit.item, hit.image
    vector = None
    if "vectors" in options.include:
        stored = state.gallery.item_vectors(item.id, bundle_id).get(image.id)
        vector = None if stored is None else stored.tolist()
    return Match(
        id=item.id,
        title=item.title or None,
        url=item.url or None,
        score=hit.score,
        attributes=item.own_attributes if "attributes" in options.include else {},
        image=MatchedImage(id=image.id, url=f"{media}/{image.digest}.jpg"),
        vector=vector,
    )


def _answer(state: ServiceState, found: _Found, embedding: QueryEmbedding | None) -> bytes:
    result = found.result
    state.telemetry.stage("search", found.seconds)
    state.telemetry.saw_revision(result.revision)
    state.telemetry.saw_age(result.stale_seconds)
    stages = (embedding.decode, embedding.wait, embedding.embed) if embedding else (0.0, 0.0, 0.0)
    decode, wait, embed, search = (round(seconds * 1000, 2) for seconds in (*stages, found.seconds))
    answer = SearchAnswer(
        items=[],
        cursor=result.cursor,
        bundle=result.bundle_id,
        revision=result.revision,
        milliseconds=Milliseconds(decode=decode, wait=wait, embed=embed, search=search),
        stale_seconds=round(result.stale_seconds, 3),
        hints=found.hints,
    )
    return join_items(answer, "items", found.items)
