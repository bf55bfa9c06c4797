"""Clients of the service for Python programs: typed answers, paging, and retries where the service asks for them.

`Client` and `AsyncClient` say the same; every request is built and every answer is read by the same code.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
import httpx

from index.gallery.jobs import JobRecord
from service.client.calls import (
    FIRST_PAUSE,
    Call,
    Calls,
    Connection,
    ItemChanges,
    ItemSearch,
    ItemValues,
    Photo,
    PhotoSearch,
    SearchOptions,
    ServiceError,
    ServiceUnreachable,
    read,
    told_in,
)
from service.schemas.items import FacetsAnswer, ItemAnswer
from service.schemas.search import Match, SearchAnswer
from service.schemas.status import Status

__all__ = ["AsyncClient", "Client", "ItemSearch", "Photo", "PhotoSearch", "ServiceError", "ServiceUnreachable"]

Answer = TypeVar("Answer")


class Client(Connection):
    """Talks to one service, such as `http://127.0.0.1:8000`; to be closed, or used as a context.

    A request that is refused for now (429, 503) is sent again up to `retries` times, no sooner than the service says;
    so is one whose connection broke, unless it must not be done twice. `timeout` is in seconds.
    """

    def __init__(self, address: str, *, key: str | None = None, retries: int = 4, timeout: float = 30) -> None:
        super().__init__(address, key, retries, timeout)
        self._http = httpx.Client(base_url=address, headers=self._headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _send(self, call: Call[Answer]) -> Answer:
        attempt = 0
        while True:
            try:
                response = self._http.request(**call.sent())
                pause = self._pause(attempt, response)
                if pause is None:
                    return read(call, response)
            except httpx.TransportError as error:
                pause = self._pause_after(error, attempt, call)
            time.sleep(pause)
            attempt += 1

    def search(self, photo: Photo, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like a photo."""
        return self._send(Calls.search({"photo": photo, **options}))

    def search_item(self, item_id: str, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like one of the gallery."""
        return self._send(Calls.search({"item_id": item_id, **options}))

    def search_batch(self, searches: Iterable[PhotoSearch | ItemSearch]) -> list[SearchAnswer]:
        """The answers to several searches in their order; the first that fails fails all."""
        return self._send(Calls.search_batch(searches))

    def search_all(self, photo: Photo, **options: Unpack[SearchOptions]) -> Iterator[Match]:
        """All items by falling likeness, asked for in pages of `top` as they are needed."""
        while True:
            page = self.search(photo, **options)
            yield from page.items
            if page.cursor is None:
                return
            options["cursor"] = page.cursor

    def status(self) -> Status:
        """The gallery, the model and the limits."""
        return self._send(Calls.status())

    def get_item(self, item_id: str) -> ItemAnswer:
        """An item with its images and its version."""
        return self._send(Calls.get_item(item_id))

    def put_item(
        self,
        item_id: str,
        *,
        images: Mapping[str, Photo] | None = None,
        version: int | None = None,
        new: bool = False,
        **values: Unpack[ItemValues],
    ) -> ItemAnswer:
        """Stores an item, and its images unless they are None, which leaves them; only at a version, or only if new."""
        return self._send(Calls.put_item(item_id, images, version, new, values))

    def patch_item(self, item_id: str, *, version: int | None = None, **changes: Unpack[ItemChanges]) -> ItemAnswer:
        """Changes some values of an item."""
        return self._send(Calls.patch_item(item_id, version, changes))

    def delete_item(self, item_id: str, *, version: int | None = None) -> None:
        """Removes an item with its images."""
        self._send(Calls.delete_item(item_id, version))

    def put_image(self, item_id: str, image_id: str, photo: Photo, *, version: int | None = None) -> ItemAnswer:
        """Adds an image to an item, or replaces it."""
        return self._send(Calls.put_image(item_id, image_id, photo, version))

    def delete_image(self, item_id: str, image_id: str, *, version: int | None = None) -> None:
        """Removes an image of an item."""
        self._send(Calls.delete_image(item_id, image_id, version))

    def scan(self, filter: Mapping[str, Any] | None = None, *, count: int = 100) -> Iterator[ItemAnswer]:
        """All items that match a filter by their ids, asked for in pages of `count` as they are needed."""
        cursor = None
        while True:
            page = self._send(Calls.scan(filter, count, cursor))
            yield from page.items
            cursor = page.cursor
            if cursor is None:
                return

    def facets(self) -> FacetsAnswer:
        """The attributes that items have, with their values."""
        return self._send(Calls.facets())

    def start_job(self, source: str, **settings: Any) -> JobRecord:
        """Starts to re-index a source that the operator named."""
        return self._send(Calls.start_job(source, settings))

    def jobs(self) -> list[JobRecord]:
        """The newest jobs."""
        return self._send(Calls.jobs())

    def job(self, job_id: int) -> JobRecord:
        """A job as it is now."""
        return self._send(Calls.job(job_id))

    def cancel_job(self, job_id: int) -> JobRecord:
        """Asks a job to end after the batch that it is at."""
        return self._send(Calls.cancel_job(job_id))

    def follow_job(self, job_id: int) -> Iterator[JobRecord]:
        """A job whenever it went on, until it ended; a broken connection is made again."""
        record = self.job(job_id)
        yield record
        while record.state == "running":
            with suppress(httpx.TransportError), self._http.stream(**self._events(job_id)) as response:
                for line in response.iter_lines() if response.is_success else ():
                    if told := told_in(line):
                        record = told
                        yield record
            if record.state == "running":  # it broke off
                time.sleep(FIRST_PAUSE)
                record = self.job(job_id)
                yield record


class AsyncClient(Connection):
    """The same for coroutines."""

    def __init__(self, address: str, *, key: str | None = None, retries: int = 4, timeout: float = 30) -> None:
        super().__init__(address, key, retries, timeout)
        self._http = httpx.AsyncClient(base_url=address, headers=self._headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def _send(self, call: Call[Answer]) -> Answer:
        attempt = 0
        while True:
            try:
                response = await self._http.request(**call.sent())
                pause = self._pause(attempt, response)
                if pause is None:
                    return read(call, response)
            except httpx.TransportError as error:
                pause = self._pause_after(error, attempt, call)
            await anyio.sleep(pause)
            attempt += 1

    async def search(self, photo: Photo, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like a photo."""
        return await self._send(Calls.search({"photo": photo, **options}))

    async def search_item(self, item_id: str, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like one of the gallery."""
        return await self._send(Calls.search({"item_id": item_id, **options}))

    async def search_batch(self, searches: Iterable[PhotoSearch | ItemSearch]) -> list[SearchAnswer]:
        """The answers to several searches in their order; the first that fails fails all."""
        return await self._send(Calls.search_batch(searches))

    async def search_all(self, photo: Photo, **options: Unpack[SearchOptions]) -> AsyncIterator[Match]:
        """All items by falling likeness, asked for in pages of `top` as they are needed."""
        while True:
            page = await self.search(photo, **options)
            for one in page.items:
                yield one
            if page.cursor is None:
                return
            options["cursor"] = page.cursor

    async def status(self) -> Status:
        """The gallery, the model and the limits."""
        return await self._send(Calls.status())

    async def get_item(self, item_id: str) -> ItemAnswer:
        """An item with its images and its version."""
        return await self._send(Calls.get_item(item_id))

    async def put_item(
        self,
        item_id: str,
        *,
        images: Mapping[str, Photo] | None = None,
        version: int | None = None,
        new: bool = False,
        **values: Unpack[ItemValues],
    ) -> ItemAnswer:
        """Stores an item, and its images unless they are None, which leaves them; only at a version, or only if new."""
        return await self._send(Calls.put_item(item_id, images, version, new, values))

    async def patch_item(
        self, item_id: str, *, version: int | None = None, **changes: Unpack[ItemChanges]
    ) -> ItemAnswer:
        """Changes some values of an item."""
        return await self._send(Calls.patch_item(item_id, version, changes))

    async def delete_item(self, item_id: str, *, version: int | None = None) -> None:
        """Removes an item with its images."""
        await self._send(Calls.delete_item(item_id, version))

    async def put_image(self, item_id: str, image_id: str, photo: Photo, *, version: int | None = None) -> ItemAnswer:
        """Adds an image to an item, or replaces it."""
        return await self._send(Calls.put_image(item_id, image_id, photo, version))

    async def delete_image(self, item_id: str, image_id: str, *, version: int | None = None) -> None:
        """Removes an image of an item."""
        await self._send(Calls.delete_image(item_id, image_id, version))

    async def scan(self, filter: Mapping[str, Any] | None = None, *, count: int = 100) -> AsyncIterator[ItemAnswer]:
        """All items that match a filter by their ids, asked for in pages of `count` as they are needed."""
        cursor = None
        while True:
            page = await self._send(Calls.scan(filter, count, cursor))
            for one in page.items:
                yield one
            cursor = page.cursor
            if cursor is None:
                return

    async def facets(self) -> FacetsAnswer:
        """The attributes that items have, with their values."""
        return await self._send(Calls.facets())

    async def start_job(self, source: str, **settings: Any) -> JobRecord:
        """Starts to re-index a source that the operator named."""
        return await self._send(Calls.start_job(source, settings))

    async def jobs(self) -> list[JobRecord]:
        """The newest jobs."""
        return await self._send(Calls.jobs())

    async def job(self, job_id: int) -> JobRecord:
        """A job as it is now."""
        return await self._send(Calls.job(job_id))

    async def cancel_job(self, job_id: int) -> JobRecord:
        """Asks a job to end after the batch that it is at."""
        return await self._send(Calls.cancel_job(job_id))

    async def follow_job(self, job_id: int) -> AsyncIterator[JobRecord]:
        """A job whenever it went on, until it ended; a broken connection is made again."""
        record = await self.job(job_id)
        yield record
        while record.state == "running":
            with suppress(httpx.TransportError):
                async with self._http.stream(**self._events(job_id)) as response:
                    if response.is_success:
                        async for line in response.aiter_lines():
                            if told := told_in(line):
                                record = told
                                yield record
            if record.state == "running":  # it broke off
                await anyio.sleep(FIRST_PAUSE)
                record = await self.job(job_id)
                yield record
