"""A shop's containers as its operator handles them: through compose, and from outside over HTTP."""

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo, write_tiny_source

PATIENCE = 120
"""Seconds for a container to get somewhere; machines that test have little to give."""


class Engine(NamedTuple):
    """The commands of a container engine."""

    command: list[str]
    composing: list[str]

    def run(self, *words: str) -> str:
        """A command of the engine itself."""
        return _output([*self.command, *words], {})

    def compose(self, project: Path, *words: str, **variables: str) -> str:
        """A command of compose, over the file that the project delivers."""
        return _output([*self.composing, "--file", str(project / "deploy" / "compose.yaml"), *words], variables)


def _output(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Shop:
    """One project of the compose file, with volumes of its own, a small catalogue and two bundles."""

    def __init__(self, engine: Engine, project: Path, image: str, folder: Path) -> None:
        self._engine, self._project = engine, project
        self._address = ""
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

    def compose(self, *words: str, **variables: str) -> str:
        return self._engine.compose(self._project, *words, **{**self._variables, **variables})

    def job(self, *words: str, **variables: str) -> str:
        """What a container that is there for one command says."""
        return self.compose("--profile", "jobs", "run", "-T", "--rm", *words, **variables)

    def inside(self, script: str) -> str:
        """What a script says within the service's container."""
        return self.compose("exec", "-T", "serve", "sh", "-c", script)

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(self._address + path, headers={"X-API-Key": key} if key else {}, timeout=60)

    def found(self, key: str) -> str:
        """The item that a new photo of the blue ball finds first."""
        answer = httpx.post(
            f"{self._address}/v1/search", files={"image": tiny_photo(2, 3)}, headers={"X-API-Key": key}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["items"][0]["id"])

    def wait_until(self, path: str, status: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while (answer := self._answer(path)) != status:
            assert time.monotonic() < deadline, f"{path} answers {answer}: {self.compose('logs', 'serve')}"
            time.sleep(0.2)

    def _answer(self, path: str) -> int | str:
        try:
            return self.get(path).status_code
        except httpx.TransportError as error:
            return str(error)

    def wait_for_bundle(self, bundle_id: str, key: str) -> None:
        """Until the service embeds with a bundle that went live."""
        deadline = time.monotonic() + PATIENCE
        while (bundle := self.get("/v1/status", key).json()["bundle"])["id"] != bundle_id:
            assert time.monotonic() < deadline, bundle
            self.get("/readyz")  # whoever asks makes the service look
            time.sleep(0.2)
