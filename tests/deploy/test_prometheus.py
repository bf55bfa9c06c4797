"""Tests of a real Prometheus with the shipped rules: every panel has data, and alerts fire."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.auth.api_keys import KeyRing
from tests.deploy.monitoring import FOLDER, expressions, program
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 90
"""Long enough for a busy machine."""


def test_panels_have_data_and_alerts_fire_when_the_service_is_gone(tmp_path: Path) -> None:
    server = program("prometheus")
    keys = KeyRing(tmp_path / "keys.json")
    (tmp_path / "lookalike.key").write_text(keys.create("prometheus", ["search"]))
    client = {"X-API-Key": keys.create("shop", ["search"])}
    with start_service(tmp_path) as (address, service), start_prometheus(server, tmp_path, address) as query_api:
        counts: dict[str, int] = {}

        def all_panels_have_data() -> bool:
            for _ in range(5):  # more than the rate limit of the key
                httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}, headers=client)
            for place, expression in expressions().items():
                counts[place] = len(query_api("query", query=expression)["result"])
            return all(count for place, count in counts.items() if place.startswith("panel"))

        wait_until(all_panels_have_data, lambda: counts)
        assert query_api("query", query="min(up)")["result"][0]["value"][1] == "1"
        assert query_api("query", query="lookalike_gallery_items")["result"][0]["value"][1] == "8"
        groups = query_api("rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}

        def firing() -> set[str]:
            alerts = query_api("alerts")["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

        # The only alert: the shop exceeds the rate limit of its key.
        wait_until(lambda: firing() == {"LookalikeKeyTooFast"}, firing)
        service.kill()
        wait_until(lambda: "LookalikeDown" in firing(), firing)


def wait_until(condition: Callable[[], bool], state: Callable[[], object]) -> None:
    """Waits for a condition that needs a few scrapes."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.5)


@contextmanager
def start_service(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Runs `lookalike serve` over a small gallery, with keys."""
    gallery = make_tiny_gallery(folder / "gallery", make_tiny_bundle(folder / "bundle"))
    settings = {"gallery": str(gallery), "keys": str(folder / "keys.json"), "port": 0, "rate": 2, "burst": 2}
    (folder / "settings.toml").write_text("\n".join(f"{name} = {value!r}" for name, value in settings.items()))
    command = [sys.executable, "-m", "lookalike", "serve", "--port", "0"]
    environment = {"LOOKALIKE_CONFIG": str(folder / "settings.toml")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        found = re.search(r"http://[^\s\"]+", process.stdout.readline())
        assert found, "the service did not start"
        try:
            yield found[0], process
        finally:
            process.kill()


@contextmanager
def start_prometheus(server: str, folder: Path, address: str) -> Iterator[Callable[..., Any]]:
    """Runs Prometheus with the shipped configuration, but for this service, and in seconds instead of minutes."""
    config = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    for shipped, replacement in (
        ("serve:8000", address.removeprefix("http://")),
        ("/run/secrets/lookalike.key", str(folder / "lookalike.key")),
        ("interval: 15s", "interval: 1s"),
    ):
        assert shipped in config
        config = config.replace(shipped, replacement)
    (folder / "prometheus.yml").write_text(config)
    rules = (FOLDER / "alerts.yml").read_text(encoding="utf-8")
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 1s", rules))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        server,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'metrics'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]

    def query_api(path: str, **parameters: str) -> Any:
        response = httpx.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=parameters).json()
        assert response["status"] == "success", (parameters, response)
        return response["data"]

    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until(lambda: is_ready(port, process), (folder / "prometheus.log").read_text)
            yield query_api
        finally:
            process.kill()


def is_ready(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "Prometheus ended"
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
