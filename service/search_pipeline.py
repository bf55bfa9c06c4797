"""Runs a search: photo to vector, vector to items, items to the answer."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from index.gallery import Gallery, Hit, SearchResult
from index.gallery.errors import BundleMismatch
from index.gallery.examples import Example
from service.answers import AnswerWriter, join_items
from service.memory import Holding
from service.photos import QueryEmbedding, embed_queries, load_photo, run_together
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
    with state.admission.received.hold() as fetched:
        photos = await run_together(
            [load_photo(state, one.photo, fetched) for one in request.examples if one.item_id is None]
        )
        # Taken after the photos were fetched: a slow host must not keep other searches from working.
        with state.admission.place("search"):
            if not photos:
                return _answer(state, await _search_vectors(state, request, [], media, writer), [])
            return _answer(state, *await _search_photos(state, request, photos, media, writer))


class _Found(NamedTuple):
    """The result of a search, the JSON of each item, why there are none, and the seconds that the search took."""

    result: SearchResult
    items: list[bytes]
    hints: list[str]
    seconds: float


async def _search_photos(
    state: ServiceState, request: SearchRequest, photos: list[bytes], media: str, writer: AnswerWriter
) -> tuple[_Found, list[QueryEmbedding]]:
    """Embeds photos and searches; embeds them again if their bundle was replaced twice meanwhile."""
    boxes = [one.box for one in request.examples if one.item_id is None]
    embeddings = await embed_queries(state, photos, boxes, await state.active_model.ready())
    try:
        return await _search_vectors(state, request, embeddings, media, writer), embeddings
    except BundleMismatch:
        await state.active_model.follow()
        embeddings = await embed_queries(state, photos, boxes, state.active_model.current())
        return await _search_vectors(state, request, embeddings, media, writer), embeddings


async def _search_vectors(
    state: ServiceState, request: SearchRequest, embeddings: list[QueryEmbedding], media: str, writer: AnswerWriter
) -> _Found:
    bundle_id = embeddings[0].model.bundle.id if embeddings else None
    vectors = iter([embedding.vector for embedding in embeddings])
    examples = [
        Example(next(vectors) if one.item_id is None else None, one.item_id, one.weight) for one in request.examples
    ]
    search = partial(_search_gallery, state.gallery, examples, bundle_id, request)
    return await state.admission.run("search", _find, state, search, request, media, writer)


def _search_gallery(
    gallery: Gallery, examples: list[Example], bundle_id: str | None, request: SearchRequest
) -> SearchResult:
    """Searches for one photo or item as it is, and for several combined."""
    first = examples[0]
    if len(examples) == 1 and first.vector is not None and bundle_id is not None:
        return gallery.search(first.vector[np.newaxis], bundle_id=bundle_id, **request.bounds)
    if len(examples) == 1 and first.item_id is not None:
        return gallery.search_item(first.item_id, **request.bounds)
    return gallery.search_examples(examples, bundle_id=bundle_id, combine=request.options.combine, **request.bounds)


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
        explanation=hit.explanation,
    )


def _answer(state: ServiceState, found: _Found, embeddings: list[QueryEmbedding]) -> bytes:
    result = found.result
    state.telemetry.stage("search", found.seconds)
    state.telemetry.saw_revision(result.revision)
    state.telemetry.saw_age(result.stale_seconds)
    stages = [(one.decode, one.wait, one.embed) for one in embeddings] or [(0.0, 0.0, 0.0)]
    decode, wait, embed, search = (
        round(seconds * 1000, 2) for seconds in (*map(sum, zip(*stages, strict=True)), found.seconds)
    )
    answer = SearchAnswer(
        items=[],
        cursor=result.cursor,
        bundle=result.bundle_id,
        revision=result.revision,
        milliseconds=Milliseconds(decode=decode, wait=wait, embed=embed, search=search),
        stale_seconds=round(result.stale_seconds, 3),
        window=result.windows[0] if result.windows else None,
        hints=found.hints,
    )
    return join_items(answer, "items", found.items)
