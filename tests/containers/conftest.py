"""Fixtures of the container tests: an engine, a clean copy of the project, and a running shop."""

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
_IGNORED = ("shop", "bundles", ".env", "__pycache__")
"""Files of an operator in a checkout that do not belong to the project."""


@pytest.fixture(scope="session")
def containers_enabled() -> None:
    """Requested by tests that take minutes or need programs that few machines have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests unless CONTAINERS is set; as a marker, so that the summary has one line per file."""
    skip = pytest.mark.skip(reason="run by `make test-containers`")
    for item in items if not os.environ.get("CONTAINERS") else ():
        if "containers_enabled" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def engine(containers_enabled: None) -> Engine:
    """Returns Docker if it is running, else Podman; CONTAINER_ENGINE and CONTAINER_COMPOSE select another."""
    named = os.environ.get("CONTAINER_ENGINE", "")
    for command in [shlex.split(named)] if named else [["docker"], ["podman"]]:
        if _succeeds([*command, "info"]):
            default = "podman-compose" if "podman" in command[0] else shlex.join([*command, "compose"])
            compose = shlex.split(os.environ.get("CONTAINER_COMPOSE", default))
            if not shutil.which(compose[0]):
                pytest.skip(f"{compose[0]} is not installed; set CONTAINER_COMPOSE to another one.")
            return Engine(command, compose)
    pytest.skip(f"`{named or 'docker'} info` fails: no container engine is running; see docs/deploy.md.")


def _succeeds(command: list[str]) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the project without other files of the checkout."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("index", "service", "training", "deploy"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*_IGNORED))
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    shutil.copy2(ROOT / "lookalike.py", copy)
    return copy


@pytest.fixture(scope="session")
def image(engine: Engine, project: Path) -> str:
    """Builds the image `serve` and returns its name; it is kept as a cache for the next run."""
    name = "lookalike:test"
    engine.compose(project, "build", "serve", IMAGE=name)
    return name


@pytest.fixture
def shop(engine: Engine, project: Path, image: str, tmp_path: Path) -> Iterator[Shop]:
    """Starts a service on empty volumes."""
    with ExitStack() as cleanup:
        shop = Shop(engine, project, image, tmp_path)
        cleanup.callback(shop.compose, "--profile", "nightly", "down", "--volumes")
        shop.compose("up", "--detach", "--no-build")
        shop.wait_until("/healthz", 200)
        yield shop
