"""Runs each example of docs/search.md unchanged against a real service."""

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
from service.schemas.search import SearchAnswer
from service.settings import Settings
from tests.support.processes import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PAGE = Path(__file__).parents[2] / "docs" / "search.md"
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = {
    # An HTTP error fails the example, and so does any line of it.
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
    """Returns the fenced blocks of the page, each with the line where it begins."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Example(found[1], page.count("\n", 0, found.start()) + 1, found[2]) for found in blocks]


class Place(NamedTuple):
    """The folder with a photo, a service without keys and one with keys that the examples use."""

    folder: Path
    open: str
    guarded: str
    key: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("examples")
    (root / "photo.jpg").write_bytes(tiny_photo(2, 5))
    bundle = make_tiny_bundle(root / "bundle")
    gallery = make_tiny_gallery(root / "gallery", bundle)
    key = KeyRing(root / "keys.json").create("shop", ["admin"])
    serve = ("serve", "--gallery", gallery)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKALIKE_SOURCES", json.dumps({"catalogue": str(root / "gallery-source" / "catalogue.csv")}))
        with serving(*serve) as without_keys, serving(*serve, "--keys", root / "keys.json") as with_keys:
            with Client(without_keys) as client:
                for number in (1, 2):
                    client.put_item(
                        f"mug-{number}",
                        attributes={"category": "mug", "price": 10.0 * number},
                        images={"front": tiny_photo(2, number)},
                    )
            yield Place(root, without_keys, with_keys, key)


@pytest.mark.parametrize(
    "example", [it for it in examples() if it.language != "json"], ids=lambda it: f"line {it.line}"
)
def test_an_example_runs_unchanged(example: Example, place: Place) -> None:
    command = COMMANDS[example.language]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    needs_key = "LOOKALIKE_KEY" in example.text
    text = example.text.replace(ADDRESS, place.guarded if needs_key else place.open)
    assert text != example.text, "an example calls the service"
    environment = {**os.environ, "LOOKALIKE_KEY": place.key} if needs_key else None
    ran = subprocess.run(
        [*command, text], cwd=place.folder, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert ran.stdout.strip(), "an example prints something"


def test_the_page_has_examples_in_every_language() -> None:
    assert {example.language for example in examples()} == {*COMMANDS, "json"}


def test_the_responses_on_the_page_match_the_schemas() -> None:
    answer, problem = (json.loads(example.text) for example in examples() if example.language == "json")
    assert set(SearchAnswer.model_validate(answer).model_dump()) == set(answer)
    assert set(problems.Problem.model_validate(problem).model_dump()) == set(problem)
    search = create_app(Settings(gallery="none")).openapi()["paths"]["/v1/search"]["post"]
    described = search["responses"]["200"]["content"]["application/json"]["example"]
    assert SearchAnswer.model_validate(described) == SearchAnswer.model_validate(answer), (
        "the page and the API description show the same answer"
    )


def test_the_page_lists_every_problem_with_its_status() -> None:
    types = [value for value in vars(problems).values() if isinstance(value, problems.ProblemType)]
    types += [*problems.IMAGE_PROBLEMS.values(), *problems.FETCH_PROBLEMS.values()]
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(int(status), slug) for status, row in rows for slug in re.findall(r"`([a-z-]+)`", row)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {(type_.status, type_.slug) for type_ in types}
