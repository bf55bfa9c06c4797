"""The API's description is kept: whatever is sent, it is answered as described, and never with a fault of ours."""

from collections.abc import Iterator
from typing import Any

import httpx
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
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("image/*")
def _photo(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


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
    # An event stream has no end that a schema could tell; its content is told by an example.
    checks = [check for check in CHECKS if check is not response_schema_conformance or not label.endswith("/events")]

    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @effort(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def answers(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=str(service.base_url), checks=checks, timeout=10)

    answers()
