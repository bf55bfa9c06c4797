"""Requests as values: what to send, how to parse the response, and whether it is safe to repeat."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Required, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from index.items import Attribute, Value
from index.rankings import Combination, Ranking
from service.schemas.search import Include

T_co = TypeVar("T_co", covariant=True)
Model = TypeVar("Model", bound=BaseModel)
Photo = bytes | Path | str
"""The bytes of a photo, the file that holds them, or (a string) the URL from which the service fetches it."""

RankingValues = Ranking | Mapping[str, Any] | str
"""Rules for the order of the items, also as JSON, or the name of those that the gallery holds."""


class SearchOptions(TypedDict, total=False):
    """The options of any search, as docs/search.md describes them."""

    limit: int
    filter: Mapping[str, Any]
    min_score: float
    box: tuple[float, float, float, float]
    exclude: Sequence[str]
    cursor: str | None
    include: Sequence[Include]
    combine: Combination
    ranking: RankingValues
    explain: bool


class PhotoSearch(SearchOptions):
    """A search for items that look like a photo."""

    photo: Required[Photo]


class ItemSearch(SearchOptions):
    """A search for items that look like an item of the gallery."""

    item_id: Required[str]


class ExampleOptions(TypedDict, total=False):
    """How an example counts: its weight, which is negative for what is not wanted, and the part of a photo."""

    weight: float
    box: tuple[float, float, float, float]


class PhotoExample(ExampleOptions):
    """A photo that the wanted items are like, or unlike."""

    photo: Required[Photo]


class ItemExample(ExampleOptions):
    """An item that the wanted items are like, or unlike."""

    item_id: Required[str]


class ExamplesSearch(SearchOptions):
    """A search for items that are like several photos and items."""

    examples: Required[Sequence[PhotoExample | ItemExample]]


class ItemValues(TypedDict, total=False):
    """The values of an item to store."""

    title: str | None
    url: str | None
    attributes: Mapping[str, Attribute | Sequence[Value]]
    expires_at: str | None


class ItemChanges(TypedDict, total=False):
    """Changes to an item: None clears a value or removes an attribute; what is left out stays."""

    title: str | None
    url: str | None
    attributes: Mapping[str, Attribute | Sequence[Value] | None] | None
    expires_at: str | None


class JobOptions(TypedDict, total=False):
    """The options of a re-index job, as docs/search.md describes them."""

    bundle: str | None
    delete_missing: bool
    max_delete: float
    max_rejects: float
    queries: str | None
    expect_recall: float | None
    allow_slow_index: bool
    lists: Mapping[str, str]


@dataclass(frozen=True)
class Call(Generic[T_co]):
    """A request, and how its response is parsed."""

    method: str
    path: str
    parse: Callable[[httpx.Response], T_co]
    """Raises ValueError for a response that the service cannot have sent."""
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    idempotent: bool = True
    """Whether it may be sent again after a broken connection, when the first one may have succeeded."""

    def request_options(self) -> dict[str, Any]:
        """Returns the arguments of `httpx.Client.request`."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params,
            "headers": self.headers,
            "json": self.body,
        }


class Page(Protocol[T_co]):
    """One page of results; the cursor is None on the last one."""

    @property
    def items(self) -> Sequence[T_co]: ...

    @property
    def cursor(self) -> str | None: ...


@dataclass(frozen=True)
class Pages(Generic[T_co]):
    """An operation that requests page after page; `call` takes the cursor, which is None for the first one."""

    call: Callable[[str | None], Call[Page[T_co]]]


def parse_as(model: type[Model]) -> Callable[[httpx.Response], Model]:
    """Returns a parser of JSON responses."""
    return lambda response: model.model_validate_json(response.content)


def parse_no_content(response: httpx.Response) -> None:
    """Checks that the response is 204: a login page of a proxy must not pass for a completed deletion."""
    if response.status_code != httpx.codes.NO_CONTENT:
        raise ValueError("expected status 204")


def photo_fields(photo: Photo) -> dict[str, str]:
    """Returns the JSON fields of a photo."""
    if isinstance(photo, str):
        return {"image_url": photo}
    data = photo.read_bytes() if isinstance(photo, Path) else photo
    return {"image": base64.b64encode(data).decode()}


def search_fields(search: PhotoSearch | ItemSearch | ExamplesSearch) -> dict[str, Any]:
    """Returns the JSON fields of a search."""
    fields = _query_fields(search)
    if "examples" in fields:
        fields["examples"] = [_query_fields(example) for example in fields["examples"]]
    if "ranking" in fields:
        fields["ranking"] = ranking_fields(fields["ranking"])
    return fields


def _query_fields(query: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in query.items() if value is not None}
    return {**photo_fields(fields.pop("photo")), **fields} if "photo" in fields else fields


def ranking_fields(ranking: RankingValues) -> Any:
    """Returns the JSON of rules, or the name of a stored ranking."""
    return ranking.model_dump(mode="json", exclude_defaults=True) if isinstance(ranking, Ranking) else ranking


def item_path(item_id: str, image_id: str | None = None) -> str:
    """Returns the URL path of an item, or of one of its images."""
    path = f"/v1/items/{_quote_id(item_id)}"
    return path if image_id is None else f"{path}/images/{_quote_id(image_id)}"


def ranking_path(name: str) -> str:
    """Returns the URL path of a stored ranking."""
    return f"/v1/rankings/{_quote_id(name)}"


def _quote_id(name: str) -> str:
    # Path segments "." and ".." would be resolved away.
    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")


def write_conditions(version: int | None, new: bool = False) -> dict[str, Any]:
    """Returns the fields of a Call that writes only at a version of the item, or only if the item is new."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    if new:
        headers["If-None-Match"] = "*"
    # Sent again after it had succeeded, such a write would conflict with the version that it made itself.
    return {"headers": headers, "idempotent": not headers}
