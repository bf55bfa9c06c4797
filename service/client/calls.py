"""What both clients of the service share: every request as a value, how its answer is read, when it is sent again."""

import base64
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Required, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from index.errors import LookalikeError
from index.gallery.jobs import JobRecord
from index.gallery.types import Attribute
from service.problems import Problem
from service.requests import Include
from service.schemas.items import FacetsAnswer, ItemAnswer, ItemsAnswer
from service.schemas.jobs import JobsAnswer, JobStatus
from service.schemas.search import BatchAnswer, SearchAnswer, Status

Answer = TypeVar("Answer")
Shape = TypeVar("Shape", bound=BaseModel)
Photo = bytes | Path | str
"""The bytes of a photo, the file that holds them, or (a text) the address where the service fetches it."""

_AGAIN = {429, 503}
FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 60.0
LONGEST_SILENCE = 45.0
"""Seconds after which a stream of events counts as broken: the service says something every 15."""


class ServiceError(LookalikeError):
    """The service refused or failed, or something else answered in its place; `document` is what was said."""

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


class PhotoSearch(SearchOptions):
    """A search for what looks like a photo."""

    photo: Required[Photo]


class ItemSearch(SearchOptions):
    """A search for what looks like an item of the gallery."""

    item_id: Required[str]


class ItemValues(TypedDict, total=False):
    """An item as it is written."""

    title: str
    url: str
    attributes: Mapping[str, Attribute]


class ItemChanges(TypedDict, total=False):
    """A change of an item: None empties a value or removes an attribute, and what is left out stays."""

    title: str | None
    url: str | None
    attributes: Mapping[str, Attribute | None] | None


@dataclass(frozen=True)
class Call(Generic[Answer]):
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
    if response.status_code != httpx.codes.NO_CONTENT:  # a page of a proxy must not pass for something done
        raise ValueError("the service would have answered 204")


def _photo_fields(photo: Photo) -> dict[str, str]:
    """A photo as a body holds it."""
    if isinstance(photo, str):
        return {"image_url": photo}
    data = photo.read_bytes() if isinstance(photo, Path) else photo
    return {"image": base64.b64encode(data).decode()}


def _search_fields(search: PhotoSearch | ItemSearch) -> dict[str, Any]:
    """A search as a body holds it."""
    fields: dict[str, Any] = {name: value for name, value in search.items() if value is not None}
    return {**_photo_fields(fields.pop("photo")), **fields} if "photo" in fields else fields


def _item_path(item_id: str, image_id: str | None = None) -> str:
    path = f"/v1/items/{_part(item_id)}"
    return path if image_id is None else f"{path}/images/{_part(image_id)}"


def _part(name: str) -> str:
    """An id within an address, where dots alone would lead elsewhere."""
    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")


def _conditions(version: int | None, new: bool = False) -> dict[str, Any]:
    """Headers of a write that rests on a version of the item, or on its absence."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    if new:
        headers["If-None-Match"] = "*"
    # Sent again after it had succeeded, such a write would find the version that it made itself.
    return {"headers": headers, "repeatable": not headers}


class Calls:
    """Every operation of the API as a request to send."""

    @staticmethod
    def search(search: PhotoSearch | ItemSearch) -> Call[SearchAnswer]:
        return Call("POST", "/v1/search", _shape(SearchAnswer), body=_search_fields(search))

    @staticmethod
    def search_batch(searches: Iterable[PhotoSearch | ItemSearch]) -> Call[list[SearchAnswer]]:
        body = {"searches": [_search_fields(search) for search in searches]}
        return Call("POST", "/v1/search/batch", lambda told: _shape(BatchAnswer)(told).answers, body=body)

    @staticmethod
    def status() -> Call[Status]:
        return Call("GET", "/v1/status", _shape(Status))

    @staticmethod
    def get_item(item_id: str) -> Call[ItemAnswer]:
        return Call("GET", _item_path(item_id), _shape(ItemAnswer))

    @staticmethod
    def put_item(
        item_id: str, images: Mapping[str, Photo] | None, version: int | None, new: bool, values: ItemValues
    ) -> Call[ItemAnswer]:
        body: dict[str, Any] = {**values}
        if images is not None:
            body["images"] = [{"id": image_id, **_photo_fields(photo)} for image_id, photo in images.items()]
        return Call("PUT", _item_path(item_id), _shape(ItemAnswer), body=body, **_conditions(version, new))

    @staticmethod
    def patch_item(item_id: str, version: int | None, changes: ItemChanges) -> Call[ItemAnswer]:
        return Call("PATCH", _item_path(item_id), _shape(ItemAnswer), body=changes, **_conditions(version))

    @staticmethod
    def delete_item(item_id: str, version: int | None) -> Call[None]:
        return Call("DELETE", _item_path(item_id), _nothing, **_conditions(version))

    @staticmethod
    def put_image(item_id: str, image_id: str, photo: Photo, version: int | None) -> Call[ItemAnswer]:
        path = _item_path(item_id, image_id)
        return Call("PUT", path, _shape(ItemAnswer), body=_photo_fields(photo), **_conditions(version))

    @staticmethod
    def delete_image(item_id: str, image_id: str, version: int | None) -> Call[None]:
        return Call("DELETE", _item_path(item_id, image_id), _nothing, **_conditions(version))

    @staticmethod
    def scan(filter: Mapping[str, Any] | None, count: int, cursor: str | None) -> Call[ItemsAnswer]:
        params: dict[str, Any] = {"count": count}
        if filter:
            params["filter"] = json.dumps(filter)
        if cursor is not None:
            params["cursor"] = cursor
        return Call("GET", "/v1/items", _shape(ItemsAnswer), params=params)

    @staticmethod
    def facets() -> Call[FacetsAnswer]:
        return Call("GET", "/v1/facets", _shape(FacetsAnswer))

    @staticmethod
    def start_job(source: str, settings: dict[str, Any]) -> Call[JobRecord]:
        body = {"source": source, **settings}
        return Call("POST", "/v1/jobs", _shape(JobStatus), body=body, repeatable=False)

    @staticmethod
    def jobs() -> Call[list[JobRecord]]:
        return Call("GET", "/v1/jobs", lambda told: [*_shape(JobsAnswer)(told).jobs])

    @staticmethod
    def job(job_id: int) -> Call[JobRecord]:
        return Call("GET", f"/v1/jobs/{job_id}", _shape(JobStatus))

    @staticmethod
    def cancel_job(job_id: int) -> Call[JobRecord]:
        return Call("DELETE", f"/v1/jobs/{job_id}", _shape(JobStatus))


class Connection:
    """What both clients share: where the service is, and when to try again."""

    def __init__(self, address: str, key: str | None, retries: int, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._retries = retries

    def _pause(self, attempt: int, response: httpx.Response) -> float | None:
        """The seconds to wait before the request is sent again; none when its answer counts."""
        if response.status_code not in _AGAIN or attempt >= self._retries:
            return None
        told = response.headers.get("Retry-After", "")
        pause = max(self._backoff(attempt), float(told) if told.isdigit() else 0.0)
        return pause if pause <= _LONGEST_PAUSE else None

    def _pause_after(self, error: httpx.TransportError, attempt: int, call: Call[Any]) -> float:
        """The same after no answer came; raises when there is no use in another try."""
        if attempt >= self._retries or not call.repeatable or isinstance(error, httpx.TimeoutException):
            raise self._unreachable(error) from error
        return self._backoff(attempt)

    def _unreachable(self, error: httpx.TransportError) -> ServiceUnreachable:
        what = str(error) or type(error).__name__
        return ServiceUnreachable(f"{self._address} did not answer: {what}.", "Is the service running there?")

    def _events(self, job_id: int) -> dict[str, Any]:
        """Where a job is watched, as httpx takes it."""
        timeout = httpx.Timeout(self._timeout, read=LONGEST_SILENCE)
        return {"method": "GET", "url": f"/v1/jobs/{job_id}/events", "timeout": timeout}

    def _backoff(self, attempt: int) -> float:
        # Spread out, so that those who were refused together do not come again together.
        return FIRST_PAUSE * 2.0**attempt * random.uniform(1, 1.5)


def read(call: Call[Answer], response: httpx.Response) -> Answer:
    """What the service answered, or the error that it told."""
    if not response.is_success:
        raise ServiceError(_problem(response))
    try:
        return call.read(response)
    except ValueError as error:
        media_type = response.headers.get("Content-Type", "no type").partition(";")[0]
        told = f" with {media_type}, which the service would not have answered ({_fault(error)})"
        raise ServiceError(_foreign(response, told)) from error


def _problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        return _foreign(response)


def _foreign(response: httpx.Response, told: str = "") -> Problem:
    """The problem of an answer by something between us and the service, or in its place."""
    status, reason = response.status_code, response.reason_phrase
    return Problem(
        type="about:blank",
        title=reason,
        status=status,
        detail=f"The address answered {status} {reason}{told}.",
        remedy="Check that it is that of the service, and what stands between.",
        request_id=response.headers.get("X-Request-Id", ""),
    )


def _fault(error: ValueError) -> str:
    """The first mistake of an answer."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_input=False, include_url=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)


def told_in(line: str) -> JobRecord | None:
    """The job in a line of an event stream, if it holds one."""
    if not line.startswith("data:"):
        return None
    try:
        return JobStatus.model_validate_json(line.removeprefix("data:"))
    except ValidationError as error:
        # The connection ended within the line, or the stream is not the service's: asking for the job tells which.
        raise httpx.RemoteProtocolError("a line of the stream cannot be read") from error
