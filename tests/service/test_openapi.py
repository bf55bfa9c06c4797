"""The OpenAPI document: it has an example of everything, and every answer conforms to it."""

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.app import create_app
from service.schemas.search import SearchOptions
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service of its own: what is sent at random writes and deletes."""
    root = tmp_path_factory.mktemp("shop")
    bundle = make_tiny_bundle(root / "bundle")
    sources = {"catalogue": str(root / "gallery-source" / "catalogue.csv")}
    with serving(Settings(gallery=make_tiny_gallery(root / "gallery", bundle), threads=1, sources=sources)) as client:
        yield client


DESCRIPTION = schemathesis.openapi.from_dict(create_app(Settings(gallery="none")).openapi())
OPERATIONS = {found.ok().label: found.ok() for found in DESCRIPTION.get_all_operations() if isinstance(found, Ok)}
# These take nothing, or one text that may be any.
NEVER_WRONG = {"GET /healthz", "GET /readyz", "GET /media/{digest}.jpg", "GET /v1/examples", "GET /examples/{name}"}


@pytest.mark.parametrize(
    ("mode", "label"),
    [(GenerationMode.POSITIVE, label) for label in OPERATIONS]
    + [(GenerationMode.NEGATIVE, label) for label in OPERATIONS if label not in NEVER_WRONG],
)
def test_an_operation_answers_as_described(service: httpx.Client, mode: GenerationMode, label: str) -> None:
    # A schema cannot describe an event stream; an example does.
    checks = [check for check in CHECKS if check is not response_schema_conformance or not label.endswith("/events")]

    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @effort(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def answers(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=str(service.base_url), checks=checks, timeout=10)

    answers()


def test_the_description_shows_an_example_of_every_error(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    search = description["paths"]["/v1/search"]["post"]
    assert set(search["requestBody"]["content"]) == {
        "multipart/form-data",
        "application/octet-stream",
        "application/json",
    }
    errors = {"400", "401", "403", "404", "408", "413", "415", "421", "422", "429", "500", "503"}
    assert set(search["responses"]) == {"200", *errors}
    for path in description["paths"].values():
        for operation in path.values():
            any_request, any_body = {"421", "500"}, {"408", "413", "503"}
            assert operation["responses"].keys() >= any_request | (any_body if "requestBody" in operation else set())
            for status, response in operation["responses"].items():
                if int(status) < 400:
                    continue
                (content,) = response["content"].items()
                assert content[0] == "application/problem+json"
                assert content[1]["schema"] == {"$ref": "#/components/schemas/Problem"}
                assert all(it["value"]["status"] == int(status) for it in content[1]["examples"].values())
    assert "remedy" in description["components"]["schemas"]["Problem"]["properties"]


def test_the_description_shows_which_requests_need_the_servers_of_a_gallery(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    shown = {
        f"{method.upper()} {path}": set(
            operation["responses"]["503"]["content"]["application/problem+json"]["examples"]
        )
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    assert all("store-unavailable" in slugs for slugs in shown.values())
    assert {label for label, slugs in shown.items() if "index-unavailable" in slugs} == {
        "POST /v1/search",
        "POST /v1/search/batch",
        "GET /v1/items",
        "GET /v1/facets",
        "GET /v1/status",
    }


def test_the_description_shows_an_example_of_every_success(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    shapes = {name: _as_shown(shape) for name, shape in description["components"]["schemas"].items()}
    checked = 0
    for path in description["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                for media_type, content in response.get("content", {}).items() if int(status) < 300 else ():
                    if media_type.startswith("image/"):  # JSON cannot show one
                        continue
                    schema = {**content["schema"], "components": {"schemas": shapes}}
                    jsonschema_rs.validate(schema, content["example"])
                    checked += media_type == "application/json"
    assert checked == 24
    metrics = description["paths"]["/metrics"]["get"]["responses"]["200"]["content"]["text/plain"]["example"]
    page = client.get("/metrics").text.splitlines()
    assert {line for line in metrics.splitlines() if line.startswith("#")} <= set(page)


def _as_shown(shape: dict[str, Any]) -> dict[str, Any]:
    """What an example of this shape must be: without keys that answers do not have. FastAPI leaves out what is null."""
    parts = shape.get("properties", {})
    never_null = [name for name in shape.get("required", ()) if {"type": "null"} not in parts[name].get("anyOf", ())]
    return {**shape, "required": never_null, "additionalProperties": False} if parts else shape


def test_the_description_shows_examples_of_bodies_that_are_understood(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    for path in description["paths"].values():
        for operation in path.values():
            forms = operation.get("requestBody", {}).get("content", {})
            shown = [
                (form["schema"], example["value"])
                for form in forms.values()
                for example in form.get("examples", {}).values()
            ]
            assert bool(shown) == bool(forms), operation["summary"]
            for schema, example in shown:
                jsonschema_rs.validate({**schema, "components": description["components"]}, example)


def test_a_form_takes_every_option_that_the_description_shows(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    form = description["paths"]["/v1/search"]["post"]["requestBody"]["content"]["multipart/form-data"]
    properties = description["components"]["schemas"]["SearchForm"]["properties"]
    assert set(properties) == {"image", *SearchOptions.model_fields}
    fields = form["examples"]["with options"]["value"]
    assert {"image", "cursor"} | set(fields) == set(properties)
    fields["exclude"] = [f"mug-{number}" for number in range(properties["exclude"]["maxItems"])]
    photo = {"image": tiny_photo(0, 0)}
    del fields["image"]
    assert client.post("/v1/search", files=photo, data=fields).status_code == 200
    first = client.post("/v1/search", files=photo, data={**fields, "limit": 1, "filter": "{}"}).json()
    next_page = client.post("/v1/search", files=photo, data={**fields, "filter": "{}", "cursor": first["cursor"]})
    assert next_page.status_code == 200 and first["items"][0] not in next_page.json()["items"]


def test_every_operation_shows_a_success_and_every_reference_leads_somewhere(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    operations = [
        (path, method, operation)
        for path, methods in description["paths"].items()
        if path.startswith(("/v1/items", "/v1/jobs", "/v1/facets"))
        for method, operation in methods.items()
    ]
    assert len(operations) == 13
    for path, method, operation in operations:
        for status, response in operation["responses"].items():
            if status in ("200", "201", "202"):
                assert all("example" in content for content in response["content"].values()), (path, method)
        if method in ("put", "patch", "post"):
            contents = operation["requestBody"]["content"]
            assert any("examples" in content for content in contents.values()), (path, method)
    for name in references(description):
        assert name.removeprefix("#/components/schemas/") in description["components"]["schemas"], name


def test_requests_have_no_defaults_that_a_generated_client_would_send(client: httpx.Client) -> None:
    """A default of a header or of an option would act as if the user had given it."""
    description = client.get("/openapi.json").json()
    for path in description["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                is_list = "requestBody" not in operation and parameter["name"] == "limit"
                assert ("default" in parameter["schema"]) == is_list, (operation["operationId"], parameter["name"])
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").removeprefix("#/components/schemas/")
                fields = description["components"]["schemas"][name]["properties"] if name else {}
                assert not [field for field, schema in fields.items() if "default" in schema], name
    limit = description["components"]["schemas"]["SearchBody"]["properties"]["limit"]
    assert limit["description"].endswith("default 12")


def test_operations_and_bodies_have_short_names(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert {operation["operationId"] for operation in operations} == {
        *("search", "search_batch", "list_items", "get_item", "put_item", "patch_item", "delete_item"),
        *("put_image", "delete_image", "list_facets", "start_job", "list_jobs", "get_job", "cancel_job", "watch_job"),
        *("list_rankings", "get_ranking", "put_ranking", "delete_ranking"),
        *("list_ranking_versions", "get_ranking_version"),
        *("get_status", "check_health", "check_readiness", "get_metrics"),
        *("get_thumbnail", "list_examples", "get_example"),
    }
    for operation in operations:
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
            assert "$ref" in content["schema"] or media_type == "application/octet-stream"


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield from [value] if key == "$ref" else references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)
