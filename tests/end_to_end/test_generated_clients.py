"""Tests of clients that other programs generate from the OpenAPI document: every operation works through them."""

import base64
import importlib
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

pytestmark = pytest.mark.slow

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients" / "bin"
"""Has openapi-python-client, whose requirements contradict ours."""
PACKAGES = ("openapi-typescript@7", "typescript@5")
PROGRAM = """
import type { components, operations } from "./schema";

type Body<Operation extends keyof operations> =
  operations[Operation] extends { requestBody: { content: { "application/json": infer Json } } } ? Json : never;

const search: Body<"search"> = { item_id: "mug-01", limit: 3, include: ["attributes", "vectors"] };
const batch: Body<"search_batch"> = { searches: [search, { image: "", filter: { price: { lt: 20 } } }] };
const item: Body<"put_item"> = { title: null, attributes: { price: 12.5, dishwasher: true } };
const patch: Body<"patch_item"> = { attributes: { price: null } };
const ranked: Body<"search"> = {
  examples: [{ item_id: "mug-01" }, { image: "", weight: -0.5, box: [0, 0, 1, 0.5] }],
  combine: "best",
  ranking: { boosts: [{ filter: { in_stock: true }, weight: 0.1 }], group_by: "product", diversity: 0.2 },
};
const named: Body<"search"> = { item_id: "mug-01", ranking: "home", explain: true };
const rules: Body<"put_ranking"> = { sort_by: { attribute: "price", order: "descending" }, pin: ["mug-01"] };
const job: Body<"start_job"> = { source: "catalogue" };
const conditions: operations["put_item"]["parameters"]["header"] = { "if-match": '"7"' };
const best = (answer: components["schemas"]["SearchAnswer"]): string =>
  answer.items.map(({ id, title, url }) => title ?? url ?? id).concat(answer.hints).join();
const count = (answer: components["schemas"]["FacetsAnswer"]): number =>
  answer.facets.flatMap(({ values }) => values.map(({ count }) => count)).reduce((sum, next) => sum + next, 0);
const start = ({ started }: components["schemas"]["JobStatus"]): Date => new Date(started);
console.log(batch, item, patch, ranked, named, rules, job, conditions, best, count, start);
"""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The OpenAPI document as a file."""
    file = tmp_path_factory.mktemp("document") / "openapi.json"
    file.write_text(json.dumps(create_app(Settings(gallery="none")).openapi()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def generator() -> Path:
    found = shutil.which("openapi-python-client", path=f"{ENVIRONMENT}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("openapi-python-client is not installed: make .venv-clients/.complete")
    return Path(found)


@pytest.fixture(scope="module")
def generated(document: Path, generator: Path) -> Iterator[str]:
    """Generates a Python client; returns the output of the generator."""
    folder = document.with_name("generated_client")
    command = [str(generator), "generate", "--path", str(document), "--output-path", str(folder), "--meta", "none"]
    environment = {**os.environ, "PATH": f"{generator.parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        yield result.stdout + result.stderr


class GeneratedClient:
    """Calls operations of the generated client by their ids, and counts which were called."""

    def __init__(self, service: httpx.Client, document: dict[str, Any]) -> None:
        package = importlib.import_module("generated_client")
        self.models: Any = importlib.import_module("generated_client.models")
        self._types: Any = importlib.import_module("generated_client.types")
        self._client = package.Client(base_url=str(service.base_url), raise_on_unexpected_status=False)
        self._tags = {
            operation["operationId"]: operation["tags"][0]
            for path in document["paths"].values()
            for operation in path.values()
        }
        self.unused = set(self._tags)

    def call(self, name: str, *args: Any, status: int = 200, **values: Any) -> Any:
        """Calls an operation; returns what was parsed, or the bytes where nothing is."""
        operation = importlib.import_module(f"generated_client.api.{self._tags[name]}.{name}")
        response = operation.sync_detailed(*args, client=self._client, **values)
        assert response.status_code == status, response.content
        self.unused.discard(name)
        return response.parsed if response.parsed is not None else response.content

    def photo(self, number: int, name: str = "photo.jpg") -> Any:
        return self._types.File(io.BytesIO(tiny_photo(number, 5)), name, "image/jpeg")


@pytest.fixture(scope="module")
def shop(generated: str, document: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratedClient]:
    root = tmp_path_factory.mktemp("shop")
    (root / "examples").mkdir()
    (root / "examples" / "ball.jpg").write_bytes(tiny_photo(2, 5))
    settings = Settings(
        gallery=make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle")),
        examples=root / "examples",
        sources={"catalogue": str(root / "gallery-source" / "catalogue.csv")},
        threads=1,
    )
    with serving(settings) as service:
        yield GeneratedClient(service, json.loads(document.read_text(encoding="utf-8")))


def test_the_generator_warns_of_pictures_alone(generated: str) -> None:
    """It supports no responses of the type image/...; their bytes are in `Response.content`."""
    warnings = [line for line in generated.splitlines() if line.startswith("WARNING")]
    assert warnings == [
        "WARNING parsing GET /media/{digest}.jpg within pictures.",
        "WARNING parsing GET /examples/{name} within pictures.",
    ]
    assert "ERROR" not in generated


def test_classes_of_the_generated_client_have_the_names_of_the_document(shop: GeneratedClient, document: Path) -> None:
    names = set(json.loads(document.read_text(encoding="utf-8"))["components"]["schemas"])
    assert set(shop.models.__all__) == names


def test_every_operation_works_through_the_generated_client(shop: GeneratedClient) -> None:
    write_items(shop)
    search(shop)
    rank(shop)
    run_a_job(shop)
    read_the_rest(shop)
    assert not shop.unused


def write_items(shop: GeneratedClient) -> None:
    models = shop.models
    attributes = models.NewAttributes.from_dict({"category": "mug", "price": 12.5, "tags": ["new", 5, True]})
    body = models.ItemBody(title="A mug", attributes=attributes, expires_at="2100-01-01")
    stored = shop.call("put_item", "mug/1", body=body, status=201)
    assert (stored.title, stored.url, stored.attributes.to_dict()) == ("A mug", None, attributes.to_dict())
    assert stored.expires_at == "2100-01-01T00:00:00Z"
    form = models.ItemForm(item=json.dumps({"title": "Two"}), image=[shop.photo(1, "a"), shop.photo(2, "b")])
    assert [image.id for image in shop.call("put_item", "two", body=form, status=201).images] == ["a", "b"]
    removed: dict[str, Any] = {"category": None, "tags": []}
    changes = models.ItemPatch(attributes=models.AttributeChanges.from_dict({"price": 9.5, **removed}))
    patched = shop.call("patch_item", "mug/1", body=changes, if_match=f'"{stored.version}"')
    assert patched.attributes.to_dict() == {"price": 9.5} and patched.title == "A mug"
    conflict = shop.call("patch_item", "mug/1", body=changes, if_match=f'"{stored.version}"', status=412)
    assert conflict.type_ == "/problems/version-conflict"
    shop.call("put_item", "mug/1", body=models.ItemBody(), if_none_match="*", status=412)
    shop.call("put_image", "mug/1", "raw", body=shop.photo(3), status=201)
    encoded = models.PhotoBody(image=base64.b64encode(tiny_photo(4, 5)).decode())
    assert len(shop.call("put_image", "mug/1", "json", body=encoded, status=201).images) == 2
    shop.call("delete_image", "mug/1", "json", status=204)
    item = shop.call("get_item", "mug/1")
    assert [image.id for image in item.images] == ["raw"]
    shop.call("get_item", "mug/1", if_none_match=f'"{item.version}"', status=304)
    assert shop.call("get_thumbnail", item.images[0].digest).startswith(b"\xff\xd8")
    shop.call("delete_item", "mug/1", status=204)
    assert shop.call("get_item", "mug/1", status=404).type_ == "/problems/item-missing"
    page = shop.call("list_items", limit=3, filter_=json.dumps({"category": "ball"}))
    assert len(page.items) == 3 and page.cursor
    assert shop.call("list_items", cursor=page.cursor).items[0].id > page.items[-1].id
    facets = shop.call("list_facets", limit=2).facets
    assert {facet.name for facet in facets} >= {"colour", "price"}
    assert all(value.count for facet in facets for value in facet.values)


def search(shop: GeneratedClient) -> None:
    models = shop.models
    by_item = shop.call("search", body=models.SearchBody(item_id="ball-red", limit=3))
    assert len(by_item.items) == 3
    assert len(shop.call("search", body=models.SearchBody(item_id="ball-red")).items) == 8
    only_blue = models.FilterDocument.from_dict({"colour": "blue"})
    encoded = base64.b64encode(tiny_photo(2, 5)).decode()
    body = models.SearchBody(image=encoded, filter_=only_blue, include=[models.Include.VECTORS])
    (blue,) = shop.call("search", body=body).items
    assert blue.id == "ball-blue" and blue.vector
    form = models.SearchForm(image=shop.photo(2), limit=2, exclude=["two"])
    assert shop.call("search", body=form).items[0].id == "ball-blue"
    raw = shop.call("search", body=shop.photo(2), limit=1, filter_=json.dumps({"category": "ball"}))
    assert [item.id for item in raw.items] == ["ball-blue"]
    wrong = models.FilterDocument.from_dict({"color": "blue"})
    answers = shop.call(
        "search_batch", body=models.BatchBody(searches=[body, models.SearchBody(image=encoded, filter_=wrong)])
    )
    assert [len(answer.items) for answer in answers.answers] == [1, 0]
    assert "'color'" in answers.answers[1].hints[0]
    failed = shop.call("search", body=models.SearchBody(item_id="ball-red", limit=5000), status=422)
    assert failed.detail == "limit must be at most 1,000 (got 5000)."


def rank(shop: GeneratedClient) -> None:
    models = shop.models
    rules = models.Ranking(
        boosts=[models.Boost(weight=0.2, attribute="price", from_=0, to=10)], pin=["ball-green"], diversity=0.1
    )
    stored = shop.call("put_ranking", "home", body=rules, if_none_match="*", status=201)
    assert stored.ranking.pin == ["ball-green"] and stored.ranking.boosts[0].from_ == 0
    changed = shop.call("put_ranking", "home", body=models.Ranking(group_by="colour"), if_match=f'"{stored.version}"')
    assert [one.version for one in shop.call("list_ranking_versions", "home").rankings] == [
        changed.version,
        stored.version,
    ]
    assert shop.call("get_ranking_version", "home", stored.version).ranking == stored.ranking
    assert shop.call("get_ranking", "home") == shop.call("list_rankings").rankings[0] == changed
    encoded = base64.b64encode(tiny_photo(2, 5)).decode()
    examples = [models.SearchExample(item_id="ball-red"), models.SearchExample(image=encoded, weight=-0.3)]
    body = models.SearchBody(examples=examples, combine=models.Combination.BEST, ranking=stored.ranking, explain=True)
    ranked = shop.call("search", body=body)
    assert ranked.items[0].id == "ball-green" and ranked.window.exhausted
    assert ranked.items[0].explanation.reason == models.Reason.PINNED
    by_name = shop.call("search", body=models.SearchBody(item_id="ball-red", ranking="home"))
    assert len(by_name.items) == 8 and by_name.window is None
    shop.call("delete_ranking", "home", status=204)


def run_a_job(shop: GeneratedClient) -> None:
    job = shop.call("start_job", body=shop.models.JobBody(source="catalogue"), status=202)
    deadline = time.monotonic() + 120
    while (job := shop.call("get_job", job.id)).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert job.state == "done", job.message
    assert job.started.tzinfo and job.started <= job.updated
    assert [other.id for other in shop.call("list_jobs", limit=1).jobs] == [job.id]
    assert "event: ended" in shop.call("watch_job", job.id)
    assert shop.call("cancel_job", job.id, status=409).type_ == "/problems/job-ended"


def read_the_rest(shop: GeneratedClient) -> None:
    status = shop.call("get_status")
    assert status.gallery.items and status.bundle.id
    assert shop.call("check_health").status == shop.call("check_readiness").status == "ok"
    assert "lookalike_ready 1.0" in shop.call("get_metrics")
    (example,) = shop.call("list_examples").examples
    assert shop.call("get_example", example.name) == tiny_photo(2, 5)


def test_types_for_typescript_pass_its_strict_check(document: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = document.parent / "typescript"
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true}')
    install = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--cache",
        str(folder / "cache"),
        *PACKAGES,
    ]
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    if installed.returncode:
        pytest.skip(f"npm cannot install {PACKAGES}: {installed.stderr[-300:]}")
    (folder / "program.ts").write_text(PROGRAM)
    programs = folder / "node_modules" / ".bin"
    commands: tuple[list[str | Path], ...] = (
        [programs / "openapi-typescript", document, "--output", "schema.d.ts"],
        [programs / "tsc", "--strict", "--noEmit", "--target", "es2022", "--lib", "es2022,dom", "program.ts"],
    )
    for command in commands:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
