"""Tests of the examples in docs/search.md, each run verbatim against a real service."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from service import problems
from service.app import create_app
from service.auth.api_keys import KeyRing
from service.client import Client
from service.schemas.problem import Problem
from service.schemas.search import SearchAnswer
from service.settings import Settings
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo
from training.data.sample_shop.products import design_products

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "search.md"
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = {
    # An HTTP error fails the example, as does any failing line.
    "sh": [
        "bash",
        "-euc",
        'curl() { command curl --silent --show-error --fail-with-body "$@"; }\neval "$1"',
        "example",
    ],
    "python": [sys.executable, "-c"],
    "js": ["node", "--input-type=module", "-e"],
}


class Example(NamedTuple):
    language: str
    line: int
    text: str


def examples() -> list[Example]:
    """Returns the fenced blocks of the page, each with its first line."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Example(found[1], page.count("\n", 0, found.start()) + 1, found[2]) for found in blocks]


class Environment(NamedTuple):
    """A folder with a photo, a service without keys and one with keys."""

    folder: Path
    open_address: str
    guarded_address: str
    key: str


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    root = tmp_path_factory.mktemp("examples")
    (root / "photo.jpg").write_bytes(tiny_photo(2, 5))
    bundle = make_tiny_bundle(root / "bundle")
    gallery = make_tiny_gallery(root / "gallery", bundle)
    key = KeyRing(root / "keys.json").create("shop", ["admin"])
    serve = ("serve", "--gallery", gallery)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKALIKE_SOURCES", json.dumps({"catalogue": str(root / "gallery-source" / "catalogue.csv")}))
        with run_server(*serve) as without_keys, run_server(*serve, "--keys", root / "keys.json") as with_keys:
            with Client(without_keys) as client:
                for number in (1, 2):
                    client.put_item(
                        f"mug-{number:02}",
                        attributes={"category": "mug", "price": 10.0 * number},
                        images={"front": tiny_photo(2, number)},
                    )
            yield Environment(root, without_keys, with_keys, key)


@pytest.mark.parametrize(
    "example", [block for block in examples() if block.language != "json"], ids=lambda block: f"line {block.line}"
)
def test_example_runs_verbatim(example: Example, environment: Environment) -> None:
    command = COMMANDS[example.language]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    needs_key = "LOOKALIKE_KEY" in example.text
    text = example.text.replace(ADDRESS, environment.guarded_address if needs_key else environment.open_address)
    assert text != example.text, "every example calls the service"
    variables = {**os.environ, "LOOKALIKE_KEY": environment.key} if needs_key else None
    result = subprocess.run(
        [*command, text], cwd=environment.folder, capture_output=True, text=True, timeout=60, check=False, env=variables
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.strip(), "every example prints something"


def test_items_of_the_examples_are_in_the_sample_shop() -> None:
    named = set(re.findall(r"""item_id"?: "([^"]+)"|exclude=\[?"?([\w-]+)""", PAGE.read_text(encoding="utf-8")))
    ids = {first or second for first, second in named}
    assert ids and ids <= {product.item_id for product in design_products(seed=0)}


def test_page_has_examples_in_every_language() -> None:
    assert {example.language for example in examples()} == {*COMMANDS, "json"}


def test_example_responses_match_the_schemas() -> None:
    response, problem = (json.loads(example.text) for example in examples() if example.language == "json")
    assert set(SearchAnswer.model_validate(response).model_dump()) == set(response)
    assert set(Problem.model_validate(problem).model_dump()) == set(problem)
    search = create_app(Settings(gallery="none")).openapi()["paths"]["/v1/search"]["post"]
    described = search["responses"]["200"]["content"]["application/json"]["example"]
    # FastAPI leaves out what is null.
    assert SearchAnswer.model_validate(response).model_dump(exclude_none=True) == described, (
        "the page and the OpenAPI description show the same response"
    )


def test_every_problem_is_documented_with_its_status() -> None:
    kinds = [kind for kind in vars(problems).values() if isinstance(kind, problems.ProblemType)]
    kinds += [*problems.IMAGE_PROBLEMS.values(), *problems.FETCH_PROBLEMS.values()]
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(int(status), slug) for status, row in rows for slug in re.findall(r"`([a-z-]+)`", row)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {(kind.status, kind.slug) for kind in kinds}
