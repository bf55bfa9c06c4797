"""Stored rankings over HTTP: versions, conditions, scopes, and searches by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.auth.api_keys import KeyRing
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery

RED = f"ball-{COLOURS[0]}"
RULES: dict[str, Any] = {
    "boosts": [{"attribute": "price", "from": 0, "to": 10, "weight": 0.2}],
    "pin": [f"ball-{COLOURS[3]}"],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service whose gallery the tests may change."""
    root = tmp_path_factory.mktemp("rankings")
    gallery = make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))
    with serving(Settings(gallery=gallery, threads=1)) as client:
        yield client


@pytest.fixture
def name(client: httpx.Client) -> Iterator[str]:
    """The name of a ranking that does not exist before and after the test."""
    yield "home.page-1"
    client.delete("/v1/rankings/home.page-1")


def test_a_ranking_is_stored_read_and_deleted(client: httpx.Client, name: str) -> None:
    path = f"/v1/rankings/{name}"
    problem(client.get(path), 404, "ranking-missing")
    created = client.put(path, json=RULES)
    assert created.status_code == 201 and created.headers["ETag"] == f'"{created.json()["version"]}"'
    assert created.json()["name"] == name
    assert created.json()["ranking"]["boosts"][0]["from"] == 0
    assert client.put(path, json=RULES).json() == created.json(), "equal rules make no version"
    changed = client.put(path, json={"diversity": 0.5})
    assert changed.status_code == 200 and changed.json()["version"] > created.json()["version"]
    assert client.get(path).json() == changed.json()
    assert client.get("/v1/rankings").json() == {"rankings": [changed.json()]}
    assert client.get(f"{path}/versions").json() == {"rankings": [changed.json(), created.json()]}
    assert client.get(f"{path}/versions/{created.json()['version']}").json() == created.json()
    problem(client.get(f"{path}/versions/1000000"), 404, "ranking-missing")
    assert client.delete(path).status_code == client.delete(path).status_code == 204
    problem(client.get(f"{path}/versions"), 404, "ranking-missing")
    assert client.get("/v1/rankings").json() == {"rankings": []}


def test_a_write_may_depend_on_the_etag(client: httpx.Client, name: str) -> None:
    path = f"/v1/rankings/{name}"
    problem(client.put(path, json=RULES, headers={"If-Match": '"7"'}), 412, "version-conflict")
    tag = client.put(path, json=RULES, headers={"If-None-Match": "*"}).headers["ETag"]
    problem(client.put(path, json={}, headers={"If-None-Match": "*"}), 412, "version-conflict")
    assert client.get(path, headers={"If-None-Match": tag}).status_code == 304
    second = client.put(path, json={}, headers={"If-Match": tag})
    assert second.status_code == 200
    body = problem(client.delete(path, headers={"If-Match": tag}), 412, "version-conflict")
    assert second.headers["ETag"] in body["detail"]
    assert client.delete(path, headers={"If-Match": second.headers["ETag"]}).status_code == 204


def test_a_search_names_a_ranking(client: httpx.Client, name: str) -> None:
    problem(client.post("/v1/search", json={"item_id": RED, "ranking": name}), 404, "ranking-missing")
    client.put(f"/v1/rankings/{name}", json=RULES)
    inline = client.post("/v1/search", json={"item_id": RED, "ranking": RULES}).json()
    by_name = client.post("/v1/search", json={"item_id": RED, "ranking": name}).json()
    by_query = client.post(f"/v1/search?ranking={name}", json={"item_id": RED}).json()
    assert inline["items"] == by_name["items"] == by_query["items"]
    assert by_name["items"][0]["id"] == RULES["pin"][0]
    first = client.post("/v1/search", json={"item_id": RED, "ranking": name, "limit": 2}).json()
    client.put(f"/v1/rankings/{name}", json={})
    following = {"item_id": RED, "ranking": name, "limit": 2, "cursor": first["cursor"]}
    assert "ranking has changed" in problem(client.post("/v1/search", json=following), 422, "search-invalid")["detail"]


def test_an_invalid_ranking_is_refused(client: httpx.Client, name: str) -> None:
    path = f"/v1/rankings/{name}"
    assert (
        "diversity must be at most 1"
        in problem(client.put(path, json={"diversity": 2}), 422, "request-invalid")["detail"]
    )
    filter = {"hide": {"filter": {"price": {"over": 1}}}}
    assert "hide.filter" in problem(client.put(path, json=filter), 422, "filter-invalid")["detail"]
    problem(client.put("/v1/rankings/-x", json={}), 422, "request-invalid")
    problem(client.put(path, content=b"{}", headers={"Content-Type": "text/plain"}), 422, "request-invalid")
    problem(client.get(f"{path}?limit=5"), 422, "request-invalid")
    problem(client.get(path), 404, "ranking-missing")


def test_reading_needs_the_scope_search_and_writing_the_scope_write(tmp_path: Path) -> None:
    settings = Settings(
        gallery=make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle")), threads=1
    )
    keys = KeyRing(tmp_path / "keys.json")
    tokens = {scope: keys.create(scope, [scope]) for scope in ("search", "write")}
    with serving(settings.model_copy(update={"keys": tmp_path / "keys.json"})) as client:

        def headers(scope: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {tokens[scope]}"}

        path = "/v1/rankings/guarded"
        problem(client.get(path), 401, "key-missing")
        problem(client.put(path, json={}, headers=headers("search")), 403, "forbidden")
        problem(client.delete(path, headers=headers("search")), 403, "forbidden")
        assert client.put(path, json={}, headers=headers("write")).status_code == 201
        assert client.get(path, headers=headers("search")).status_code == 200
        assert client.delete(path, headers=headers("write")).status_code == 204


def test_a_list_that_would_be_too_large_is_refused(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_answer_bytes": 20_000})) as client:
        for number in range(3):
            rules = {"hide": {"ids": [f"{number}-{place:0100}" for place in range(90)]}}
            assert client.put("/v1/rankings/large", json=rules).status_code in (200, 201)
        assert client.get("/v1/rankings").status_code == 200
        problem(client.get("/v1/rankings/large/versions"), 422, "answer-too-large")
        assert client.delete("/v1/rankings/large").status_code == 204
