"""Problems: every error of a request has a type with a title, and an example that fits it."""

import asyncio
from typing import get_args

import httpx
import pytest

from index.embedding.images import ImageError
from index.embedding.images import Reason as ImageReason
from index.errors import LookalikeError
from index.gallery.errors import IndexUnavailable, StoreUnavailable
from service import problems
from service.admission import Overloaded
from service.app import create_app
from service.problems import FETCH_PROBLEMS, IMAGE_PROBLEMS, ProblemType
from service.settings import Settings
from service.url_fetcher import FetchError
from service.url_fetcher import Reason as FetchReason
from tests.service.conftest import problem

TYPES = [value for value in vars(problems).values() if isinstance(value, ProblemType)]


def test_an_unknown_address_and_a_wrong_method_are_problems(client: httpx.Client) -> None:
    assert "/v1/serch" in problem(client.get("/v1/serch"), 404, "not-found")["detail"]
    problem(client.get("/web/none.js"), 404, "not-found")
    wrong = client.get("/v1/search")
    assert "POST" in problem(wrong, 405, "method-not-allowed")["remedy"]
    assert wrong.headers["allow"] == "POST"


def answer_to(error: Exception) -> httpx.Response:
    """Returns the answer of a route that raises the error."""
    app = create_app(Settings(gallery="none"))

    @app.get("/fails")
    async def fail() -> None:
        raise error

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/fails")

    return asyncio.run(ask())


def test_every_reason_of_an_image_error_has_a_problem_of_its_own() -> None:
    reasons = get_args(ImageReason)
    for reason in reasons:
        type = IMAGE_PROBLEMS[reason]
        body = problem(answer_to(ImageError(reason, "It is so.", "Do that.")), type.status, type.slug)
        assert (body["detail"], body["remedy"]) == ("It is so.", "Do that.")
    assert set(IMAGE_PROBLEMS) == set(reasons)
    assert len({type.slug for type in IMAGE_PROBLEMS.values()}) == len(reasons)


def test_a_store_that_cannot_be_reached_is_a_problem_to_repeat_later() -> None:
    answer = answer_to(StoreUnavailable("PostgreSQL cannot be reached.", "Start it."))
    assert problem(answer, 503, "store-unavailable")["detail"] == "PostgreSQL cannot be reached."
    assert answer.headers["retry-after"] == "1"


def test_a_vector_index_that_cannot_be_reached_is_a_problem_to_repeat_later() -> None:
    answer = answer_to(IndexUnavailable("Qdrant does not answer at a:6334.", "Start its nodes."))
    assert problem(answer, 503, "index-unavailable")["detail"] == "Qdrant does not answer at a:6334."
    assert answer.headers["retry-after"] == "1"


def test_every_reason_of_a_fetch_error_has_a_problem_of_its_own() -> None:
    reasons = get_args(FetchReason)
    for reason in reasons:
        type = FETCH_PROBLEMS[reason]
        problem(answer_to(FetchError(reason, "It is so.", "Do that.")), type.status, type.slug)
    assert set(FETCH_PROBLEMS) == set(reasons)
    assert len({type.slug for type in FETCH_PROBLEMS.values()}) == len(reasons)


@pytest.mark.parametrize(("seconds", "header"), [(1.0, "1"), (2.1, "3")])
def test_an_overload_names_the_time_to_wait(seconds: float, header: str) -> None:
    answer = answer_to(Overloaded("Too much.", retry_after=seconds))
    problem(answer, 503, "overloaded")
    assert answer.headers["retry-after"] == header and "connection" not in answer.headers
    assert answer_to(Overloaded("Too much.", close=True)).headers["connection"] == "close"


def test_an_error_that_is_not_the_requests_fault_is_internal() -> None:
    body = problem(answer_to(LookalikeError("The file /secret is damaged.")), 500, "internal")
    assert "secret" not in body["detail"]


def test_titles_are_short_and_slugs_are_unique() -> None:
    types = [*TYPES, *IMAGE_PROBLEMS.values(), *FETCH_PROBLEMS.values()]
    assert len({type.slug for type in types}) == len(types) > 40
    for type in types:
        assert type.title[0].isupper() or type.title.startswith("image_url")
        assert len(type.title.split()) <= 5 and not type.title.endswith(".")
        assert len(type.detail.split()) <= 15 and type.detail.endswith("."), type.slug
        assert type.remedy.endswith("."), type.slug
