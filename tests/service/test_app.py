"""What holds for the whole service: starting, headers, errors, its description, its page."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml
from fastapi import FastAPI
from pydantic import ValidationError

from index.errors import LookalikeError
from service.app import create_app
from service.requests import Options
from service.settings import Settings, load_settings
from tests.service.conftest import problem, serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo


def start(app: FastAPI) -> None:
    async def run() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(run())


def test_a_gallery_of_another_bundle_is_refused_at_start(settings: Settings, tmp_path: Path) -> None:
    other = make_tiny_bundle(tmp_path / "other", resize=40)
    with pytest.raises(LookalikeError, match=r"was indexed with bundle .* reindex"):
        start(create_app(settings.model_copy(update={"bundle": other})))


def test_a_missing_bundle_or_gallery_is_named_at_start(settings: Settings, tmp_path: Path) -> None:
    for name in ("bundle", "gallery"):
        with pytest.raises(LookalikeError, match="nowhere"):
            start(create_app(settings.model_copy(update={name: tmp_path / "nowhere"})))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKALIKE_GALLERY", "g")
    monkeypatch.setenv("LOOKALIKE_BUNDLE", "b")
    monkeypatch.setenv("LOOKALIKE_MAX_PIXELS", "1000")
    settings = Settings()  # type: ignore[call-arg]  # both required values are in the environment
    assert (settings.gallery, settings.bundle, settings.port) == ("g", Path("b"), 8000)
    assert settings.image_limits.max_pixels == 1000
    monkeypatch.setenv("LOOKALIKE_EXAMPLES", str(tmp_path / "nowhere"))
    with pytest.raises(ValidationError, match="examples"):
        Settings()  # type: ignore[call-arg]


def test_the_sample_shop_of_the_compose_file_needs_nothing_that_only_the_service_mounts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deploy = Path(__file__).parents[2] / "deploy"
    explained = re.findall(r"^#(LOOKALIKE_\w+)=(.*)$", (deploy / ".env.example").read_text(), re.MULTILINE)
    given = {name: value for name, value in explained if "/shop" in value or "/bundles" in value}
    given["LOOKALIKE_CONFIG"] = "/shop/lookalike.toml"
    demo = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]["demo"]["environment"]
    for name, value in {**given, **demo, "LOOKALIKE_EXAMPLES": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert (settings.bundle, settings.bundles, settings.sources) == (None, {}, {})


def test_status_tells_gallery_model_and_limits(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    assert (status["gallery"]["items"], status["gallery"]["images"]) == (8, 16)
    assert (status["bundle"]["backbone"], status["bundle"]["dimension"]) == ("colour_grid", 48)
    assert status["bundle"]["metrics"] == {"recall@1": 0.9}
    assert status["bundle"]["untrained_metrics"] == {"recall@1": 0.5}
    assert status["provider"].endswith("ExecutionProvider")
    assert status["limits"] == {"max_body_bytes": 300_000, "max_pixels": 1_000_000, "max_batch": 16}


def test_probes_answer(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}


def test_every_answer_has_a_request_id_and_keeps_the_callers(client: httpx.Client) -> None:
    one, other = client.get("/healthz"), client.get("/nowhere")
    assert one.headers["x-request-id"] != other.headers["x-request-id"]
    kept = client.get("/healthz", headers={"X-Request-Id": "shop-7.a"})
    assert kept.headers["x-request-id"] == "shop-7.a"
    replaced = client.get("/healthz", headers={"X-Request-Id": "spaces and <tags>"})
    assert re.fullmatch("[0-9a-f]{16}", replaced.headers["x-request-id"])


@pytest.mark.parametrize("address", ["/", "/web/app.js", "/v1/status", "/nowhere"])
def test_every_answer_forbids_foreign_and_inline_code(client: httpx.Client, address: str) -> None:
    headers = client.get(address).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "style-src 'self';" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_an_unknown_address_and_a_wrong_method_are_problems(client: httpx.Client) -> None:
    assert "/v1/serch" in problem(client.get("/v1/serch"), 404, "not-found")["detail"]
    problem(client.get("/web/none.js"), 404, "not-found")
    wrong = client.get("/v1/search")
    assert "POST" in problem(wrong, 405, "method-not-allowed")["remedy"]
    assert wrong.headers["allow"] == "POST"


def test_a_fault_of_ours_is_a_problem_that_says_nothing_about_the_inside(settings: Settings) -> None:
    app = create_app(settings)

    @app.get("/fault")
    def fault() -> None:
        raise RuntimeError("the secret is in /etc/secret")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/fault")

    response = asyncio.run(ask())
    problem(response, 500, "internal")
    assert "secret" not in response.text
    assert "default-src" in response.headers["content-security-policy"]


def test_the_description_shows_an_example_of_every_error(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    search = description["paths"]["/v1/search"]["post"]
    assert set(search["requestBody"]["content"]) == {"multipart/form-data", "image/*", "application/json"}
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
    assert checked >= 18
    metrics = description["paths"]["/metrics"]["get"]["responses"]["200"]["content"]["text/plain"]["example"]
    told = client.get("/metrics").text.splitlines()
    assert {line for line in metrics.splitlines() if line.startswith("#")} <= set(told)


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
    search = client.get("/openapi.json").json()["paths"]["/v1/search"]["post"]
    form = search["requestBody"]["content"]["multipart/form-data"]
    assert set(form["schema"]["properties"]) == {"image", *Options.model_fields}
    fields = form["examples"]["with options"]["value"]
    assert {"image", "cursor"} | set(fields) == set(form["schema"]["properties"])
    fields["exclude"] = [f"mug-{number}" for number in range(form["schema"]["properties"]["exclude"]["maxItems"])]
    photo = {"image": tiny_photo(0, 0)}
    del fields["image"]
    assert client.post("/v1/search", files=photo, data=fields).status_code == 200
    first = client.post("/v1/search", files=photo, data={**fields, "top": 1, "filter": "{}"}).json()
    going_on = client.post("/v1/search", files=photo, data={**fields, "filter": "{}", "cursor": first["cursor"]})
    assert going_on.status_code == 200 and first["items"][0] not in going_on.json()["items"]


def test_the_page_takes_everything_from_the_service(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"web/app.js", "web/style.css", "web/favicon.svg"} <= set(addresses)
    for address in addresses:
        assert client.get(f"/{address}").status_code == 200
    assert "<script>" not in page.text and "style=" not in page.text
    assert client.get("/web/app.js").headers["content-type"].startswith("text/javascript")


def test_behind_a_prefix_that_the_proxy_strips_the_addresses_in_answers_carry_it(settings: Settings) -> None:
    with serving(settings, root_path="/shop") as client:
        answer = client.post("/v1/search", files={"image": tiny_photo(0, 0)}).json()
        assert answer["items"][0]["image"]["url"].startswith("/shop/media/")
        (example,) = client.get("/v1/examples").json()["examples"]
        assert example["url"] == "/shop/examples/blue%20ball.jpg"
