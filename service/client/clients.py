"""The clients. `Operations` defines each operation once; `Client` and `AsyncClient` differ in how they send it."""

import functools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import anyio
import httpx
from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse
from pydantic import ValidationError

from index.rankings import Ranking, StoredRanking
from service.client.calls import (
    Call,
    ExamplesSearch,
    ItemChanges,
    ItemExample,
    ItemSearch,
    ItemValues,
    JobOptions,
    Pages,
    Photo,
    PhotoExample,
    PhotoSearch,
    SearchOptions,
    item_path,
    parse_as,
    parse_no_content,
    photo_fields,
    ranking_fields,
    ranking_path,
    search_fields,
    write_conditions,
)
from service.client.errors import ServiceUnreachable, error_from, unexpected_content
from service.schemas.items import FacetsAnswer, ItemAnswer, ItemsAnswer
from service.schemas.jobs import JobsAnswer, JobStatus
from service.schemas.rankings import RankingsAnswer
from service.schemas.search import BatchAnswer, Match, SearchAnswer
from service.schemas.status import Status

P = ParamSpec("P")
T = TypeVar("T")
Definition = TypeVar("Definition", covariant=True)
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
_RETRIED = {429, 503}
_FIRST_DELAY, _MAX_DELAY = 0.2, 60.0
Outcome = httpx.Response | httpx.TransportError
"""What a request led to: a response, or the reason why none arrived."""


class operation(Generic[P, Definition]):
    """Turns a method that defines a request into one that sends it, with or without `await` as the client needs.

    A method that returns `Call[T]` becomes one that returns T (Client) or a coroutine of T (AsyncClient); `Pages[T]`
    becomes an iterator or an asynchronous iterator over T.
    """

    def __init__(self, define: Callable[Concatenate[Any, P], Definition]) -> None:
        self._define = define

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(self: "operation[P, Call[T]]", client: "Client", owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self: "operation[P, Pages[T]]", client: "Client", owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(
        self: "operation[P, Call[T]]", client: "AsyncClient", owner: type
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(
        self: "operation[P, Pages[T]]", client: "AsyncClient", owner: type
    ) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        @functools.wraps(self._define)
        def run(client: Any, *args: Any, **kwargs: Any) -> Any:
            defined = self._define(client, *args, **kwargs)
            return client._iterate(defined) if isinstance(defined, Pages) else client._send(defined)

        return run if client is None else MethodType(run, client)


class Operations(Generic[Http]):
    """Every operation of the HTTP API, and what both clients need to send it."""

    def __init__(
        self, address: str, *, key: str | None = None, retries: int = 4, timeout: float = 30, event_timeout: float = 45
    ) -> None:
        self._address = address
        self._retries = retries
        self._event_timeout = httpx.Timeout(timeout, read=event_timeout)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: Http = self._connect(base_url=address, headers=headers, timeout=timeout)

    def _connect(self, **options: Any) -> Http:
        raise NotImplementedError

    @operation
    def search(self, photo: Photo, **options: Unpack[SearchOptions]) -> Call[SearchAnswer]:
        """Returns the items that look most like a photo."""
        return _search({"photo": photo, **options})

    @operation
    def search_item(self, item_id: str, **options: Unpack[SearchOptions]) -> Call[SearchAnswer]:
        """Returns the items that look most like an item of the gallery."""
        return _search({"item_id": item_id, **options})

    @operation
    def search_examples(
        self, examples: Sequence[PhotoExample | ItemExample], **options: Unpack[SearchOptions]
    ) -> Call[SearchAnswer]:
        """Returns the items that are most like several photos and items, and unlike those of negative weight."""
        return _search({"examples": examples, **options})

    @operation
    def search_batch(self, searches: Iterable[PhotoSearch | ItemSearch | ExamplesSearch]) -> Call[list[SearchAnswer]]:
        """Runs several searches and returns their results in order; raises the error of the first that fails."""
        body = {"searches": [search_fields(search) for search in searches]}
        return Call("POST", "/v1/search/batch", lambda response: parse_as(BatchAnswer)(response).answers, body=body)

    @operation
    def search_all(self, photo: Photo, **options: Unpack[SearchOptions]) -> Pages[Match]:
        """Iterates over all items, by descending similarity or as ranked; requests pages of `limit` items as needed."""
        first: PhotoSearch = {"photo": photo, **options}
        return Pages(lambda cursor: _search({**first, "cursor": cursor} if cursor else first))

    @operation
    def status(self) -> Call[Status]:
        """Returns the state of the gallery and the model, and the limits of requests."""
        return Call("GET", "/v1/status", parse_as(Status))

    @operation
    def get_item(self, item_id: str) -> Call[ItemAnswer]:
        """Returns an item with its images and its version."""
        return Call("GET", item_path(item_id), parse_as(ItemAnswer))

    @operation
    def put_item(
        self,
        item_id: str,
        *,
        images: Mapping[str, Photo] | None = None,
        version: int | None = None,
        new: bool = False,
        **values: Unpack[ItemValues],
    ) -> Call[ItemAnswer]:
        """Stores an item and replaces its images; `images=None` keeps them.

        With `version` it is stored only if that is the item's version, with `new` only if there is no such item.
        """
        body: dict[str, Any] = {**values}
        if images is not None:
            body["images"] = [{"id": image_id, **photo_fields(photo)} for image_id, photo in images.items()]
        return Call("PUT", item_path(item_id), parse_as(ItemAnswer), body=body, **write_conditions(version, new))

    @operation
    def patch_item(
        self, item_id: str, *, version: int | None = None, **changes: Unpack[ItemChanges]
    ) -> Call[ItemAnswer]:
        """Changes some values of an item."""
        return Call("PATCH", item_path(item_id), parse_as(ItemAnswer), body=changes, **write_conditions(version))

    @operation
    def delete_item(self, item_id: str, *, version: int | None = None) -> Call[None]:
        """Deletes an item with its images."""
        return Call("DELETE", item_path(item_id), parse_no_content, **write_conditions(version))

    @operation
    def put_image(self, item_id: str, image_id: str, photo: Photo, *, version: int | None = None) -> Call[ItemAnswer]:
        """Adds an image to an item, or replaces it."""
        path, body = item_path(item_id, image_id), photo_fields(photo)
        return Call("PUT", path, parse_as(ItemAnswer), body=body, **write_conditions(version))

    @operation
    def delete_image(self, item_id: str, image_id: str, *, version: int | None = None) -> Call[None]:
        """Deletes an image of an item."""
        return Call("DELETE", item_path(item_id, image_id), parse_no_content, **write_conditions(version))

    @operation
    def scan(self, filter: Mapping[str, Any] | None = None, *, limit: int = 100) -> Pages[ItemAnswer]:
        """Iterates over the items that match a filter, in the order of their ids; requests pages of `limit` items."""
        params = {"limit": limit} | ({"filter": json.dumps(filter)} if filter else {})
        return Pages(
            lambda cursor: Call(
                "GET", "/v1/items", parse_as(ItemsAnswer), params=params | ({"cursor": cursor} if cursor else {})
            )
        )

    @operation
    def facets(
        self,
        names: Sequence[str] = (),
        *,
        filter: Mapping[str, Any] | None = None,
        contains: str | None = None,
        limit: int = 20,
    ) -> Call[FacetsAnswer]:
        """Returns attributes, by default those that most items have, each with its `limit` most frequent values.

        Counts the items that match the filter. With `contains`, searches the values of one attribute.
        """
        params = {"limit": limit, "name": list(names)} | ({"filter": json.dumps(filter)} if filter else {})
        params |= {"contains": contains} if contains else {}
        return Call("GET", "/v1/facets", parse_as(FacetsAnswer), params=params)

    @operation
    def rankings(self) -> Call[list[StoredRanking]]:
        """Returns the newest version of each stored ranking."""
        return _rankings("/v1/rankings")

    @operation
    def get_ranking(self, name: str, *, version: int | None = None) -> Call[StoredRanking]:
        """Returns a version of a stored ranking, by default the newest."""
        path = ranking_path(name) if version is None else f"{ranking_path(name)}/versions/{version}"
        return Call("GET", path, parse_as(StoredRanking))

    @operation
    def ranking_versions(self, name: str) -> Call[list[StoredRanking]]:
        """Returns the versions of a stored ranking that are kept, the newest first."""
        return _rankings(f"{ranking_path(name)}/versions")

    @operation
    def put_ranking(
        self, name: str, ranking: Ranking | Mapping[str, Any], *, version: int | None = None, new: bool = False
    ) -> Call[StoredRanking]:
        """Stores a new version of a ranking.

        With `version` it is stored only if that is the newest one, with `new` only if there is no such ranking.
        """
        body = ranking_fields(ranking)
        return Call("PUT", ranking_path(name), parse_as(StoredRanking), body=body, **write_conditions(version, new))

    @operation
    def delete_ranking(self, name: str, *, version: int | None = None) -> Call[None]:
        """Deletes a stored ranking with all its versions."""
        return Call("DELETE", ranking_path(name), parse_no_content, **write_conditions(version))

    @operation
    def start_job(self, source: str, **options: Unpack[JobOptions]) -> Call[JobStatus]:
        """Starts to re-index a source that the operator configured."""
        return Call("POST", "/v1/jobs", parse_as(JobStatus), body={"source": source, **options}, idempotent=False)

    @operation
    def jobs(self, *, limit: int = 20) -> Call[list[JobStatus]]:
        """Returns the newest jobs, newest first."""
        return Call("GET", "/v1/jobs", lambda response: parse_as(JobsAnswer)(response).jobs, params={"limit": limit})

    @operation
    def job(self, job_id: int) -> Call[JobStatus]:
        """Returns the current state of a job."""
        return Call("GET", f"/v1/jobs/{job_id}", parse_as(JobStatus))

    @operation
    def cancel_job(self, job_id: int) -> Call[JobStatus]:
        """Cancels a job, which ends after its current batch."""
        return Call("DELETE", f"/v1/jobs/{job_id}", parse_as(JobStatus))

    def _events(self, job_id: int) -> dict[str, Any]:
        return {"method": "GET", "url": f"/v1/jobs/{job_id}/events", "timeout": self._event_timeout}

    def _retry_delay(self, call: Call[Any], outcome: Outcome, attempt: int) -> float | None:
        """Returns the seconds to wait before the request is sent again, or None if it must not be."""
        if attempt >= self._retries:
            return None
        # Random, so that clients that were rejected together do not return together.
        delay = _FIRST_DELAY * 2.0**attempt * random.uniform(1, 1.5)
        if isinstance(outcome, httpx.TransportError):
            return delay if call.idempotent and not isinstance(outcome, httpx.TimeoutException) else None
        if outcome.status_code not in _RETRIED:
            return None
        retry_after = outcome.headers.get("Retry-After", "")
        delay = max(delay, float(retry_after) if retry_after.isdigit() else 0.0)
        return delay if delay <= _MAX_DELAY else None

    def _result(self, call: Call[T], outcome: Outcome) -> T:
        """Parses the response, or raises the error that it reports."""
        if isinstance(outcome, httpx.TransportError):
            reason = str(outcome) or type(outcome).__name__
            problem = f"No response from {self._address}: {reason}."
            raise ServiceUnreachable(problem, "Check that the service runs at this address.") from outcome
        if not outcome.is_success:
            raise error_from(outcome)
        try:
            return call.parse(outcome)
        except ValueError as error:
            raise unexpected_content(outcome, error) from error


class Client(Operations[httpx.Client]):
    """Calls the service at `address`, such as `http://127.0.0.1:8000`. Close it, or use it as a context manager.

    A request that the service rejects for the moment (429, 503) is sent again up to `retries` times with exponential
    back-off, no sooner than its Retry-After; so is one whose connection broke, unless it must not run twice. `timeout`
    is in seconds; `event_timeout` is how long the events of a job may pause: the service sends one every 15 seconds.
    """

    def _connect(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def follow_job(self, job_id: int) -> Iterator[JobStatus]:
        """Iterates over the states of a job until it ends; reconnects when the connection breaks."""
        job = self.job(job_id)
        yield job
        while job.state == "running":
            with suppress(httpx.TransportError), connect_sse(self._http, **self._events(job_id)) as source:
                for event in source.iter_sse():
                    job = _job_of(event)
                    yield job
            if job.state == "running":  # the stream broke
                time.sleep(_FIRST_DELAY)
                job = self.job(job_id)
                yield job

    def _send(self, call: Call[T]) -> T:
        attempt = 0
        while True:
            outcome: Outcome
            try:
                outcome = self._http.request(**call.request_options())
            except httpx.TransportError as error:
                outcome = error
            delay = self._retry_delay(call, outcome, attempt)
            if delay is None:
                return self._result(call, outcome)
            time.sleep(delay)
            attempt += 1

    def _iterate(self, pages: Pages[T]) -> Iterator[T]:
        page = self._send(pages.call(None))
        yield from page.items
        while page.cursor is not None:
            page = self._send(pages.call(page.cursor))
            yield from page.items


class AsyncClient(Operations[httpx.AsyncClient]):
    """The same as Client for asynchronous programs: operations are awaited, iterators are asynchronous."""

    def _connect(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def follow_job(self, job_id: int) -> AsyncIterator[JobStatus]:
        """Iterates over the states of a job until it ends; reconnects when the connection breaks."""
        job = await self.job(job_id)
        yield job
        while job.state == "running":
            with suppress(httpx.TransportError):
                async with aconnect_sse(self._http, **self._events(job_id)) as source:
                    async for event in source.aiter_sse():
                        job = _job_of(event)
                        yield job
            if job.state == "running":  # the stream broke
                await anyio.sleep(_FIRST_DELAY)
                job = await self.job(job_id)
                yield job

    async def _send(self, call: Call[T]) -> T:
        attempt = 0
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(**call.request_options())
            except httpx.TransportError as error:
                outcome = error
            delay = self._retry_delay(call, outcome, attempt)
            if delay is None:
                return self._result(call, outcome)
            await anyio.sleep(delay)
            attempt += 1

    async def _iterate(self, pages: Pages[T]) -> AsyncIterator[T]:
        page = await self._send(pages.call(None))
        for item in page.items:
            yield item
        while page.cursor is not None:
            page = await self._send(pages.call(page.cursor))
            for item in page.items:
                yield item


def _search(search: PhotoSearch | ItemSearch | ExamplesSearch) -> Call[SearchAnswer]:
    return Call("POST", "/v1/search", parse_as(SearchAnswer), body=search_fields(search))


def _rankings(path: str) -> Call[list[StoredRanking]]:
    return Call("GET", path, lambda response: parse_as(RankingsAnswer)(response).rankings)


def _job_of(event: ServerSentEvent) -> JobStatus:
    try:
        return JobStatus.model_validate_json(event.data)
    except ValidationError as error:
        # Not an event of the service; requesting the job shows what responds there.
        raise httpx.RemoteProtocolError("an event of the stream is not a job") from error
