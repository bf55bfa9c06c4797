"""Searches by a photo or by an item."""

from fastapi import APIRouter, Request, Response

from service import search_pipeline
from service.auth.dependencies import MaySearch
from service.openapi import (
    BATCH_BODY,
    SEARCH_ANSWER,
    SEARCH_BODY,
    SEARCH_PROBLEMS,
    SIMILAR_ITEM_ANSWER,
    error_responses,
    example_response,
)
from service.requests import KnownQuery, media_address, read_batch, read_search, while_connected
from service.schemas.search import BatchAnswer, SearchAnswer
from service.state import AnswerDep, StateDep

router = APIRouter(tags=["search"], dependencies=[MaySearch])


@router.post(
    "/v1/search",
    summary="Find the items that look like a photo, or like an item",
    response_model=SearchAnswer,
    responses={200: example_response(SEARCH_ANSWER), **error_responses(*SEARCH_PROBLEMS)},
    openapi_extra=SEARCH_BODY,
)
async def search(request: Request, state: StateDep, answer: AnswerDep) -> Response:
    """The photo is the file field `image` of a form, the body itself with its own type `image/...`, or base64 in JSON.

    JSON may also name the photo's address, where that is enabled, or an item of the gallery. Options are sent in the
    query string, the form or the JSON.
    """
    state.admission.check("search")
    wanted = await read_search(request)
    found = await while_connected(request, search_pipeline.search(state, wanted, media_address(request), answer))
    return Response(found, media_type="application/json")


@router.post(
    "/v1/search/batch",
    summary="Find the items that look like each of several photos",
    response_model=BatchAnswer,
    responses={
        200: example_response({"answers": [SEARCH_ANSWER, SIMILAR_ITEM_ANSWER]}),
        **error_responses(*SEARCH_PROBLEMS),
    },
    openapi_extra=BATCH_BODY,
    dependencies=[KnownQuery],
)
async def search_batch(request: Request, state: StateDep, answer: AnswerDep) -> Response:
    """Runs each search as if it were sent alone, in the order given; the first problem fails the request."""
    state.admission.check("search")
    wanted = await read_batch(request, state.settings.max_batch)
    found = await while_connected(request, search_pipeline.search_batch(state, wanted, media_address(request), answer))
    return Response(found, media_type="application/json")
