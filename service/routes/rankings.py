"""Stores, reads and removes rankings; the next search by their names reflects each change."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Request, Response

from index.gallery.errors import RankingMissing, VersionConflict
from index.rankings import RANKING_NAME, Ranking, StoredRanking
from service.answers import AnswerWriter, join_items
from service.auth.dependencies import MaySearch, MayWrite
from service.openapi import (
    DELETE_PROBLEMS,
    NOT_MODIFIED,
    RANKING_ANSWER,
    RANKING_BODY,
    RANKING_PROBLEMS,
    READ_PROBLEMS,
    error_responses,
    example_response,
    ranking_response,
)
from service.problems import ANSWER_TOO_LARGE, CONFLICT, RANKING_MISSING, ProblemError
from service.requests import Conditions, KnownQuery, etag, read_conditions, read_json
from service.schemas.rankings import RankingsAnswer
from service.state import AnswerDep, ServiceState, StateDep

router = APIRouter(tags=["rankings"])

Name = Annotated[str, Path(pattern=RANKING_NAME, description="letters, digits, dots, dashes and underscores")]
Version = Annotated[int, Path(ge=0, description="number of the version")]
ConditionsDep = Annotated[Conditions, Depends(read_conditions)]
_LIST = example_response({"rankings": [RANKING_ANSWER]})
Result = TypeVar("Result")


@router.get(
    "/v1/rankings",
    summary="List rankings",
    response_model=RankingsAnswer,
    dependencies=[MaySearch, KnownQuery],
    responses={200: _LIST, **error_responses(ANSWER_TOO_LARGE, *READ_PROBLEMS)},
)
async def list_rankings(state: StateDep, answer: AnswerDep) -> Response:
    """The newest version of each ranking, by name."""
    return _listed(state, await state.admission.run("read", state.gallery.rankings), answer)


@router.get(
    "/v1/rankings/{name}",
    summary="Read a ranking",
    response_model=StoredRanking,
    dependencies=[MaySearch, KnownQuery],
    responses={200: ranking_response(), 304: NOT_MODIFIED, **error_responses(RANKING_MISSING, *READ_PROBLEMS)},
)
async def get_ranking(name: Name, state: StateDep, conditions: ConditionsDep, answer: AnswerDep) -> Response:
    """The newest version of a ranking."""
    stored = _existing(name, await state.admission.run("read", state.gallery.get_ranking, name))
    if conditions.excludes(etag(stored.version)):
        return Response(status_code=304, headers={"ETag": etag(stored.version)})
    return _respond(stored, answer)


@router.get(
    "/v1/rankings/{name}/versions",
    summary="List the versions of a ranking",
    response_model=RankingsAnswer,
    dependencies=[MaySearch, KnownQuery],
    responses={200: _LIST, **error_responses(RANKING_MISSING, ANSWER_TOO_LARGE, *READ_PROBLEMS)},
)
async def list_ranking_versions(name: Name, state: StateDep, answer: AnswerDep) -> Response:
    """The versions that are kept, the newest first."""
    versions = await state.admission.run("read", state.gallery.ranking_versions, name)
    _existing(name, versions[0] if versions else None)
    return _listed(state, versions, answer)


@router.get(
    "/v1/rankings/{name}/versions/{version}",
    summary="Read a version of a ranking",
    response_model=StoredRanking,
    dependencies=[MaySearch, KnownQuery],
    responses={200: ranking_response(), **error_responses(RANKING_MISSING, *READ_PROBLEMS)},
)
async def get_ranking_version(name: Name, version: Version, state: StateDep, answer: AnswerDep) -> Response:
    read = state.gallery.get_ranking
    stored = await state.admission.run("read", lambda: read(name, version=version))
    if stored is None:
        raise RankingMissing(name, version)
    return _respond(stored, answer)


@router.put(
    "/v1/rankings/{name}",
    summary="Store a ranking",
    response_model=StoredRanking,
    dependencies=[MayWrite, KnownQuery],
    openapi_extra=RANKING_BODY,
    responses={
        200: ranking_response(),
        201: {**ranking_response("The ranking is new"), "model": StoredRanking},
        **error_responses(*RANKING_PROBLEMS),
    },
)
async def put_ranking(
    name: Name, request: Request, state: StateDep, conditions: ConditionsDep, answer: AnswerDep
) -> Response:
    """Replaces the rules by a new version, unless they are equal. Every search after the answer uses them."""
    state.admission.check("write")
    ranking = await read_json(request, Ranking)
    put = state.gallery.put_ranking

    async def write(seen: StoredRanking | None) -> tuple[StoredRanking, bool]:
        expected = {name: seen.version if seen else None}
        stored = await state.admission.run("write", lambda: put(name, ranking, expected=expected))
        return stored, seen is None

    stored, is_new = await _write(state, name, conditions, write)
    return _respond(stored, answer, status=201 if is_new else 200)


@router.delete(
    "/v1/rankings/{name}",
    summary="Delete a ranking",
    status_code=204,
    dependencies=[MayWrite, KnownQuery],
    responses=error_responses(*DELETE_PROBLEMS),
)
async def delete_ranking(name: Name, state: StateDep, conditions: ConditionsDep) -> Response:
    """Deletes a ranking with all its versions; succeeds also when there is none."""
    delete = state.gallery.delete_ranking

    async def write(seen: StoredRanking | None) -> None:
        if seen:
            await state.admission.run("write", lambda: delete(name, expected={name: seen.version}))

    await _write(state, name, conditions, write)
    return Response(status_code=204)


async def _write(
    state: ServiceState,
    name: str,
    conditions: Conditions,
    write: Callable[[StoredRanking | None], Awaitable[Result]],
) -> Result:
    """Writes on top of the version that is there, again when another writer was faster."""
    with state.admission.place("write"):
        for _ in range(state.settings.max_write_attempts):
            seen = await state.admission.run("read", state.gallery.get_ranking, name)
            tag = etag(seen.version) if seen else None
            if not conditions.matches(tag) or (tag and conditions.excludes(tag)):
                actual = f"its ETag is {tag}" if tag else "it does not exist"
                raise ProblemError(CONFLICT, f"Ranking {name!r} does not match the condition: {actual}.")
            try:
                return await write(seen)
            except VersionConflict:
                continue
    attempts = state.settings.max_write_attempts
    raise state.admission.refuse("conflict", f"Other writers changed ranking {name!r} during {attempts} attempts.")


def _existing(name: str, stored: StoredRanking | None) -> StoredRanking:
    if stored is None:
        raise RankingMissing(name)
    return stored


def _respond(stored: StoredRanking, answer: AnswerDep, status: int = 200) -> Response:
    body = stored.model_dump_json().encode()
    answer.add(len(body))
    return Response(body, status, headers={"ETag": etag(stored.version)}, media_type="application/json")


def _listed(state: ServiceState, rankings: list[StoredRanking], answer: AnswerDep) -> Response:
    writer = AnswerWriter(answer, state.settings.max_answer_bytes)
    body = join_items(RankingsAnswer(rankings=[]), "rankings", [writer.encode(ranking) for ranking in rankings])
    return Response(body, media_type="application/json")
