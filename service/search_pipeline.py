"""Runs a search: photo to vector, vector to items, items to the answer."""

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from index.gallery import Hit, SearchResult
from index.gallery.errors import BundleMismatch
from index.items import Attribute
from service.photos import QueryEmbedding, embed_query, load_photo
from service.problems import ANSWER_TOO_LARGE, ProblemError
from service.requests import SearchRequest
from service.schemas.search import BatchAnswer, Match, MatchedImage, Milliseconds, SearchAnswer, SearchOptions
from service.state import ServiceState

_BYTES_PER_NUMBER = 22
"""Of a vector in JSON: a float32 as a double has up to 20 digits."""


class AnswerSize:
    """Counts the approximate bytes of an answer while it is made, and refuses one that becomes too large."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0

    def add_match(self, match: Match) -> None:
        self._bytes += item_bytes(match.title, match.url, match.attributes)
        self._bytes += _BYTES_PER_NUMBER * len(match.vector or ())
        if self._bytes > self._max_bytes:
            raise ProblemError(
                ANSWER_TOO_LARGE, f"The answer would have more than {self._max_bytes:,} bytes.", ANSWER_TOO_LARGE.remedy
            )


def item_bytes(title: str, url: str, attributes: Mapping[str, Attribute]) -> int:
    """Returns the approximate size of an item in an answer."""
    return 300 + len(title) + len(url) + sum(len(name) + len(str(value)) + 8 for name, value in attributes.items())


async def search(
    state: ServiceState, request: SearchRequest, media: str, size: AnswerSize | None = None
) -> SearchAnswer:
    """Finds the items that look like the photo or the item of a request; `media` is where thumbnails are served."""
    size = size or AnswerSize(state.settings.max_answer_bytes)
    if request.item_id is not None:
        with state.admission.place("search"):
            bounded = partial(state.gallery.search_item, request.item_id, **request.bounds)
            found = await state.admission.run("search", _find, state, bounded, request.options, media, size)
        return _answer(state, found, None)
    with state.admission.hold_bytes() as hold:
        photo = await load_photo(state, request.photo, hold)
        # Taken after the photo was fetched: a slow host must not keep other searches from working.
        with state.admission.place("search"):
            found, embedding = await _search_photo(state, request, photo, media, size)
    return _answer(state, found, embedding)


async def search_batch(state: ServiceState, requests: list[SearchRequest], media: str) -> BatchAnswer:
    """Runs several searches one after the other: a batch must not displace the photos of other requests."""
    size = AnswerSize(state.settings.max_answer_bytes)
    return BatchAnswer(answers=[await search(state, request, media, size) for request in requests])


class _Found(NamedTuple):
    """The result of a search, the matches made from it, and the seconds that the search took."""

    result: SearchResult
    matches: list[Match]
    seconds: float


async def _search_photo(
    state: ServiceState, request: SearchRequest, photo: bytes, media: str, size: AnswerSize
) -> tuple[_Found, QueryEmbedding]:
    """Embeds a photo and searches; embeds it again if its bundle was replaced twice meanwhile."""
    embedding = await embed_query(state, photo, request.options.box, await state.active_model.ready())
    try:
        return await _search_vector(state, request, embedding, media, size), embedding
    except BundleMismatch:
        await state.active_model.follow()
        embedding = await embed_query(state, photo, request.options.box, state.active_model.current())
        return await _search_vector(state, request, embedding, media, size), embedding


async def _search_vector(
    state: ServiceState, request: SearchRequest, embedding: QueryEmbedding, media: str, size: AnswerSize
) -> _Found:
    vectors, bundle_id = embedding.vector[np.newaxis], embedding.model.bundle.id
    bounded = partial(state.gallery.search, vectors, bundle_id=bundle_id, **request.bounds)
    return await state.admission.run("search", _find, state, bounded, request.options, media, size)


def _find(
    state: ServiceState, search: Callable[[], SearchResult], options: SearchOptions, media: str, size: AnswerSize
) -> _Found:
    """Searches and reads the items in one call: a switch of threads costs as much as a search."""
    started = perf_counter()
    result = search()
    seconds = perf_counter() - started
    matches = []
    for hit in result.hits[0]:
        matches.append(_match(state, hit, options, result.bundle_id, media))
        size.add_match(matches[-1])
    return _Found(result, matches, seconds)


def _match(state: ServiceState, hit: Hit, options: SearchOptions, bundle_id: str, media: str) -> Match:
    item, image = hit.item, hit.image
    vector = None
    if "vectors" in options.include:
        stored = state.gallery.item_vectors(item.id, bundle_id).get(image.id)
        vector = None if stored is None else stored.tolist()
    return Match(
        id=item.id,
        title=item.title,
        url=item.url,
        score=hit.score,
        attributes=item.attributes if "attributes" in options.include else {},
        image=MatchedImage(id=image.id, url=f"{media}/{image.digest}.jpg"),
        vector=vector,
    )


def _answer(state: ServiceState, found: _Found, embedding: QueryEmbedding | None) -> SearchAnswer:
    result = found.result
    state.telemetry.stage("search", found.seconds)
    state.telemetry.saw_revision(result.revision)
    stages = (embedding.decode, embedding.wait, embedding.embed) if embedding else (0.0, 0.0, 0.0)
    decode, wait, embed, search = (round(seconds * 1000, 2) for seconds in (*stages, found.seconds))
    return SearchAnswer(
        items=found.matches,
        cursor=result.cursor,
        bundle=result.bundle_id,
        revision=result.revision,
        milliseconds=Milliseconds(decode=decode, wait=wait, embed=embed, search=search),
    )
