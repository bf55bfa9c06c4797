"""Containers for tests: an engine where one is asked for and answers, and the project copied as a clone would be."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.containers.shop import Engine, Shop

ROOT = Path(__file__).parents[2]
_OWN = ("shop", "bundles", ".env", "__pycache__")
"""An operator's files in a checkout, which are no part of it."""


@pytest.fixture(scope="session")
def asked_for() -> None:
    """Of tests that take minutes, or programs that few machines have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them unless they are asked for; marked rather than skipped on their own, they are told in a line a file."""
    skipped = pytest.mark.skip(reason="containers and proxies are tested by `make test-containers`")
    for item in items if not os.environ.get("CONTAINERS") else ():
        if "asked_for" in getattr(item, "fixturenames", ()):
            item.add_marker(skipped)


@pytest.fixture(scope="session")
def engine(asked_for: None) -> Engine:
    """Docker if it answers, else Podman; CONTAINER_ENGINE and CONTAINER_COMPOSE name others, with their options."""
    named = os.environ.get("CONTAINER_ENGINE", "")
    for command in [shlex.split(named)] if named else [["docker"], ["podman"]]:
        if _answers([*command, "info"]):
            default = "podman-compose" if "podman" in command[0] else shlex.join([*command, "compose"])
            compose = shlex.split(os.environ.get("CONTAINER_COMPOSE", default))
            if not shutil.which(compose[0]):
                pytest.skip(f"{compose[0]} is not installed; CONTAINER_COMPOSE may name another.")
            return Engine(command, compose)
    pytest.skip(f"No container engine answers to `{named or 'docker'} info`; see docs/deploy.md.")


def _answers(command: list[str]) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project without what lies about in a checkout."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("index", "service", "training", "deploy"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*_OWN))
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    shutil.copy2(ROOT / "lookalike.py", copy)
    return copy


@pytest.fixture(scope="session")
def image(engine: Engine, project: Path) -> str:
    """The name of the built image `serve`, which stays for the next time."""
    name = "lookalike:test"
    engine.compose(project, "build", "serve", IMAGE=name)
    return name


@pytest.fixture
def shop(engine: Engine, project: Path, image: str, tmp_path: Path) -> Iterator[Shop]:
    """A service that runs on empty volumes."""
    with ExitStack() as end:
        shop = Shop(engine, project, image, tmp_path)
        end.callback(shop.compose, "--profile", "nightly", "down", "--volumes")
        shop.compose("up", "--detach", "--no-build")
        shop.wait_until("/healthz", 200)
        yield shop
