"""A client of the service for Python programs: typed answers, retries where it is asked to come again, paging.

`Client` and `AsyncClient` say the same; every request is built and every answer is read by the same code.
"""

import base64
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import anyio
import httpx
from pydantic import BaseModel, ValidationError

from index.errors import LookalikeError
from index.items import Attribute
from index.jobs import JobRecord
from service.asking import Include
from service.item_schemas import FacetsAnswer, ItemAnswer, ItemsAnswer
from service.problems import Problem
from service.schemas import Match, SearchAnswer, Status

Answer = TypeVar("Answer")
Shape = TypeVar("Shape", bound=BaseModel)
Photo = bytes | Path | str
"""The bytes of a photo, the file that holds them, or (a text) the address where the service fetches it."""

_AGAIN = {429, 503}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 60.0


class ServiceError(LookalikeError):
    """The service refused or failed; `document` is what it said."""

    kind = "service"

    def __init__(self, document: Problem) -> None:
        super().__init__(document.detail, document.remedy)
        self.document = document

    @property
    def status(self) -> int:
        return self.document.status

    @property
    def type(self) -> str:
        """The stable kind of problem, such as `item-missing`."""
        return self.document.type.rpartition("/")[2]


class ServiceUnreachable(LookalikeError):
    """No answer came."""

    kind = "unreachable"


class SearchOptions(TypedDict, total=False):
    """What may be said with any search; docs/search.md tells each."""

    top: int
    filter: Mapping[str, Any]
    min_score: float
    box: tuple[float, float, float, float]
    exclude: Sequence[str]
    cursor: str | None
    include: Sequence[Include]


class ItemValues(TypedDict, total=False):
    """An item as it is written. In a patch None empties a value or removes an attribute, and what is absent stays."""

    title: str | None
    url: str | None
    attributes: Mapping[str, Attribute | None] | None


@dataclass(frozen=True)
class _Call(Generic[Answer]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], Answer]
    params: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    repeatable: bool = True
    """Whether doing it twice is the same as once, so that it may be sent again after a broken connection."""

    def sent(self) -> dict[str, Any]:
        """As httpx takes it."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params,
            "headers": self.headers,
            "json": self.body,
        }


def _shape(shape: type[Shape]) -> Callable[[httpx.Response], Shape]:
    return lambda response: shape.model_validate_json(response.content)


def _nothing(response: httpx.Response) -> None:
    return None


def _photo(photo: Photo) -> dict[str, str]:
    if isinstance(photo, str):
        return {"image_url": photo}
    data = photo.read_bytes() if isinstance(photo, Path) else photo
    return {"image": base64.b64encode(data).decode()}


def _item_path(item_id: str, image_id: str | None = None) -> str:
    path = f"/v1/items/{quote(item_id, safe='')}"
    return path if image_id is None else f"{path}/images/{quote(image_id, safe='')}"


def _conditions(version: int | None, new: bool = False) -> dict[str, Any]:
    """Headers of a write that rests on a version of the item, or on its absence."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    if new:
        headers["If-None-Match"] = "*"
    # Sent again after it had succeeded, such a write would find the version that it made itself.
    return {"headers": headers, "repeatable": not headers}


class _Calls:
    """Every operation of the API as a request to send."""

    @staticmethod
    def search(query: dict[str, str], options: SearchOptions) -> _Call[SearchAnswer]:
        body = {**query, **{name: value for name, value in options.items() if value is not None}}
        return _Call("POST", "/v1/search", _shape(SearchAnswer), body=body)

    @staticmethod
    def status() -> _Call[Status]:
        return _Call("GET", "/v1/status", _shape(Status))

    @staticmethod
    def get_item(item_id: str) -> _Call[ItemAnswer]:
        return _Call("GET", _item_path(item_id), _shape(ItemAnswer))

    @staticmethod
    def put_item(
        item_id: str, images: Mapping[str, Photo] | None, version: int | None, new: bool, values: ItemValues
    ) -> _Call[ItemAnswer]:
        body: dict[str, Any] = {**values}
        if images is not None:
            body["images"] = [{"id": image_id, **_photo(photo)} for image_id, photo in images.items()]
        return _Call("PUT", _item_path(item_id), _shape(ItemAnswer), body=body, **_conditions(version, new))

    @staticmethod
    def patch_item(item_id: str, version: int | None, changes: ItemValues) -> _Call[ItemAnswer]:
        return _Call("PATCH", _item_path(item_id), _shape(ItemAnswer), body=changes, **_conditions(version))

    @staticmethod
    def delete_item(item_id: str, version: int | None) -> _Call[None]:
        return _Call("DELETE", _item_path(item_id), _nothing, **_conditions(version))

    @staticmethod
    def put_image(item_id: str, image_id: str, photo: Photo, version: int | None) -> _Call[ItemAnswer]:
        path = _item_path(item_id, image_id)
        return _Call("PUT", path, _shape(ItemAnswer), body=_photo(photo), **_conditions(version))

    @staticmethod
    def delete_image(item_id: str, image_id: str, version: int | None) -> _Call[None]:
        return _Call("DELETE", _item_path(item_id, image_id), _nothing, **_conditions(version))

    @staticmethod
    def scan(filter: Mapping[str, Any] | None, count: int, cursor: str | None) -> _Call[ItemsAnswer]:
        params: dict[str, Any] = {"count": count}
        if filter:
            params["filter"] = json.dumps(filter)
        if cursor is not None:
            params["cursor"] = cursor
        return _Call("GET", "/v1/items", _shape(ItemsAnswer), params=params)

    @staticmethod
    def facets() -> _Call[FacetsAnswer]:
        return _Call("GET", "/v1/facets", _shape(FacetsAnswer))

    @staticmethod
    def start_job(source: str, settings: dict[str, Any]) -> _Call[JobRecord]:
        body = {"source": source, **settings}
        return _Call("POST", "/v1/jobs", _shape(JobRecord), body=body, repeatable=False)

    @staticmethod
    def jobs() -> _Call[list[JobRecord]]:
        return _Call("GET", "/v1/jobs", lambda told: [JobRecord.model_validate(job) for job in told.json()["jobs"]])

    @staticmethod
    def job(job_id: int) -> _Call[JobRecord]:
        return _Call("GET", f"/v1/jobs/{job_id}", _shape(JobRecord))

    @staticmethod
    def cancel_job(job_id: int) -> _Call[JobRecord]:
        return _Call("DELETE", f"/v1/jobs/{job_id}", _shape(JobRecord))


class _Connection:
    """What both clients share: where the service is, and when to try again."""

    def __init__(self, address: str, key: str | None, retries: int) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._retries = retries

    def _pause(self, attempt: int, response: httpx.Response) -> float | None:
        """The seconds to wait before the request is sent again; none when its answer counts."""
        if response.status_code not in _AGAIN or attempt >= self._retries:
            return None
        told = response.headers.get("Retry-After", "")
        pause = max(self._backoff(attempt), float(told) if told.isdigit() else 0.0)
        return pause if pause <= _LONGEST_PAUSE else None

    def _pause_after(self, error: httpx.TransportError, attempt: int, call: _Call[Any]) -> float:
        """The same after no answer came; raises when there is no use in another try."""
        if attempt >= self._retries or not call.repeatable or isinstance(error, httpx.TimeoutException):
            raise self._unreachable(error) from error
        return self._backoff(attempt)

    def _unreachable(self, error: httpx.TransportError) -> ServiceUnreachable:
        what = str(error) or type(error).__name__
        return ServiceUnreachable(f"{self._address} did not answer: {what}.", "Is the service running there?")

    def _backoff(self, attempt: int) -> float:
        # Spread out, so that those who were refused together do not come again together.
        return _FIRST_PAUSE * 2**attempt * random.uniform(1, 1.5)


def _read(call: _Call[Answer], response: httpx.Response) -> Answer:
    if not response.is_success:
        raise ServiceError(_problem(response))
    return call.read(response)


def _problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:  # of something between us and the service
        status, reason = response.status_code, response.reason_phrase
        return Problem(
            type="about:blank",
            title=reason,
            status=status,
            detail=f"The address answered {status} {reason}.",
            remedy="Check that it is that of the service.",
            request_id=response.headers.get("X-Request-Id", ""),
        )


def _told(line: str) -> JobRecord | None:
    """The job in a line of an event stream, if it holds one."""
    return JobRecord.model_validate_json(line[5:]) if line.startswith("data:") else None


class Client(_Connection):
    """Talks to one service, such as `http://127.0.0.1:8000`; to be closed, or used as a context.

    A request that is refused for now (429, 503) is sent again up to `retries` times, no sooner than the service says;
    so is one whose connection broke, unless it must not be done twice. `timeout` is in seconds.
    """

    def __init__(self, address: str, *, key: str | None = None, retries: int = 4, timeout: float = 30) -> None:
        super().__init__(address, key, retries)
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

    def _send(self, call: _Call[Answer]) -> Answer:
        attempt = 0
        while True:
            try:
                response = self._http.request(**call.sent())
                pause = self._pause(attempt, response)
                if pause is None:
                    return _read(call, response)
            except httpx.TransportError as error:
                pause = self._pause_after(error, attempt, call)
            time.sleep(pause)
            attempt += 1

    def search(self, photo: Photo, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like a photo."""
        return self._send(_Calls.search(_photo(photo), options))

    def search_item(self, item_id: str, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items that look like one of the gallery."""
        return self._send(_Calls.search({"item_id": item_id}, options))

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
        return self._send(_Calls.status())

    def get_item(self, item_id: str) -> ItemAnswer:
        """An item with its images and its version."""
        return self._send(_Calls.get_item(item_id))

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
        return self._send(_Calls.put_item(item_id, images, version, new, values))

    def patch_item(self, item_id: str, *, version: int | None = None, **changes: Unpack[ItemValues]) -> ItemAnswer:
        """Changes some values of an item."""
        return self._send(_Calls.patch_item(item_id, version, changes))

    def delete_item(self, item_id: str, *, version: int | None = None) -> None:
        """Removes an item with its images."""
        self._send(_Calls.delete_item(item_id, version))

    def put_image(self, item_id: str, image_id: str, photo: Photo, *, version: int | None = None) -> ItemAnswer:
        """Adds an image to an item, or replaces it."""
        return self._send(_Calls.put_image(item_id, image_id, photo, version))

    def delete_image(self, item_id: str, image_id: str, *, version: int | None = None) -> None:
        """Removes an image of an item."""
        self._send(_Calls.delete_image(item_id, image_id, version))

    def scan(self, filter: Mapping[str, Any] | None = None, *, count: int = 100) -> Iterator[ItemAnswer]:
        """All items that match a filter by their ids, asked for in pages of `count` as they are needed."""
        cursor = None
        while True:
            page = self._send(_Calls.scan(filter, count, cursor))
            yield from page.items
            cursor = page.cursor
            if cursor is None:
                return

    def facets(self) -> FacetsAnswer:
        """The attributes that items have, with their values."""
        return self._send(_Calls.facets())

    def start_job(self, source: str, **settings: Any) -> JobRecord:
        """Starts to re-index a source that the operator named."""
        return self._send(_Calls.start_job(source, settings))

    def jobs(self) -> list[JobRecord]:
        """The newest jobs."""
        return self._send(_Calls.jobs())

    def job(self, job_id: int) -> JobRecord:
        """A job as it is now."""
        return self._send(_Calls.job(job_id))

    def cancel_job(self, job_id: int) -> JobRecord:
        """Asks a job to end after the batch that it is at."""
        return self._send(_Calls.cancel_job(job_id))

    def follow_job(self, job_id: int) -> Iterator[JobRecord]:
        """A job whenever it went on, until it ended; a broken connection is made again."""
        record = self.job(job_id)
        yield record
        while record.state == "running":
            try:
                with self._http.stream("GET", f"/v1/jobs/{job_id}/events", timeout=None) as response:
                    for line in response.iter_lines() if response.is_success else ():
                        if told := _told(line):
                            record = told
                            yield record
            except httpx.TransportError:
                pass
