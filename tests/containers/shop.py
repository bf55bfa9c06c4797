"""The containers of a shop, controlled through compose and called over HTTP."""

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo, write_tiny_source

TIMEOUT_SECONDS = 120
"""Long enough for a container on a busy machine."""


class Engine(NamedTuple):
    """The commands of a container engine."""

    command: list[str]
    compose_command: list[str]

    def run(self, *arguments: str) -> str:
        """Runs a command of the engine and returns its output."""
        return _output([*self.command, *arguments], {})

    def compose(self, project: Path, *arguments: str, **variables: str) -> str:
        """Runs a compose command with the file of the project and returns its output."""
        return _output(
            [*self.compose_command, "--file", str(project / "deploy" / "compose.yaml"), *arguments], variables
        )


def _output(command: list[str], variables: dict[str, str]) -> str:
    result = subprocess.run(
        command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


class Shop:
    """A compose project with its own volumes, a small catalogue and two bundles."""

    def __init__(self, engine: Engine, project: Path, image: str, folder: Path) -> None:
        self._engine, self._project = engine, project
        write_tiny_source(folder / "shop")
        make_tiny_bundle(folder / "bundles" / "bundle")
        make_tiny_bundle(folder / "bundles" / "new", grid=8)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._variables = {
            "COMPOSE_PROJECT_NAME": f"lookalike-test-{port}",
            "IMAGE": image,
            "PORT": str(port),
            "SHOP": str(folder / "shop"),
            "BUNDLES": str(folder / "bundles"),
        }

    def compose(self, *arguments: str, **variables: str) -> str:
        return self._engine.compose(self._project, *arguments, **{**self._variables, **variables})

    def job(self, *arguments: str, **variables: str) -> str:
        """Runs a command in a container of its own and returns its output."""
        return self.compose("--profile", "jobs", "run", "-T", "--rm", *arguments, **variables)

    def run_inside(self, script: str) -> str:
        """Runs a script in the container of the service and returns its output."""
        return self.compose("exec", "-T", "serve", "sh", "-c", script)

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(self._address + path, headers={"X-API-Key": key} if key else {}, timeout=60)

    def search(self, key: str) -> str:
        """Searches with a new photo of the blue ball and returns the id of the first item."""
        response = httpx.post(
            f"{self._address}/v1/search", files={"image": tiny_photo(2, 3)}, headers={"X-API-Key": key}, timeout=60
        )
        assert response.status_code == 200, response.text
        return str(response.json()["items"][0]["id"])

    def wait_until(self, path: str, status: int) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (actual := self._status_of(path)) != status:
            assert time.monotonic() < deadline, f"{path} returns {actual}: {self.compose('logs', 'serve')}"
            time.sleep(0.2)

    def _status_of(self, path: str) -> int | str:
        try:
            return self.get(path).status_code
        except httpx.TransportError as error:
            return str(error)

    def wait_for_bundle(self, bundle_id: str, key: str) -> None:
        """Waits until the service embeds with this bundle."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (bundle := self.get("/v1/status", key).json()["bundle"])["id"] != bundle_id:
            assert time.monotonic() < deadline, bundle
            self.get("/readyz")  # makes the service check the gallery
            time.sleep(0.2)
