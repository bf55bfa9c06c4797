"""A real Prometheus with the shipped rules watches a real service: every expression answers, and an alert fires."""

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

from service.auth.api_keys import KeyRing
from tests.deploy.monitoring import FOLDER, expressions, program
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

DEADLINE = 90
"""Seconds that something may take on a busy machine before a test gives up."""


def test_it_answers_every_panel_and_calls_when_the_service_is_gone(tmp_path: Path) -> None:
    server = program("prometheus")
    keys = KeyRing(tmp_path / "keys.json")
    (tmp_path / "lookalike.key").write_text(keys.create("prometheus", ["search"]))
    client = {"X-API-Key": keys.create("shop", ["search"])}
    with running_service(tmp_path) as (address, service), running_prometheus(server, tmp_path, address) as ask:
        answered: dict[str, int] = {}

        def all_panels_have_something_to_show() -> bool:
            for _ in range(5):  # more than the key may send
                httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}, headers=client)
            answered.update({place: len(ask("query", query=asked)["result"]) for place, asked in expressions().items()})
            return all(number for place, number in answered.items() if place.startswith("panel"))

        until(all_panels_have_something_to_show, lambda: answered)
        assert ask("query", query="min(up)")["result"][0]["value"][1] == "1"
        assert ask("query", query="lookalike_gallery_items")["result"][0]["value"][1] == "8"
        groups = ask("rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}

        def firing() -> set[str]:
            alerts = ask("alerts")["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

        # Nothing is wrong but that the shop sends more than its key may, and that is told.
        until(lambda: firing() == {"LookalikeKeyTooFast"}, firing)
        service.kill()
        until(lambda: "LookalikeDown" in firing(), firing)


def until(reached: Callable[[], bool], state: Callable[[], object]) -> None:
    """Waits for something that needs a few scrapes."""
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline, state()
        time.sleep(0.5)


@contextmanager
def running_service(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`lookalike serve` over a small gallery, with keys."""
    gallery = make_tiny_gallery(folder / "gallery", make_tiny_bundle(folder / "bundle"))
    settings = {"gallery": str(gallery), "keys": str(folder / "keys.json"), "port": 0, "rate": 2, "burst": 2}
    (folder / "settings.toml").write_text("\n".join(f"{name} = {value!r}" for name, value in settings.items()))
    command = [sys.executable, "-m", "lookalike", "serve", "--port", "0"]
    environment = {"LOOKALIKE_CONFIG": str(folder / "settings.toml")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the service did not start"
        try:
            yield found[0], process
        finally:
            process.kill()


@contextmanager
def running_prometheus(server: str, folder: Path, address: str) -> Iterator[Callable[..., Any]]:
    """The shipped configuration, but with this service's address and key, and in seconds instead of minutes."""
    config = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    for shipped, here in (
        ("serve:8000", address.removeprefix("http://")),
        ("/run/secrets/lookalike.key", str(folder / "lookalike.key")),
        ("interval: 15s", "interval: 1s"),
    ):
        assert shipped in config
        config = config.replace(shipped, here)
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

    def ask(what: str, **parameters: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(lambda: is_ready(port, process), (folder / "prometheus.log").read_text)
            yield ask
        finally:
            process.kill()


def is_ready(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "Prometheus ended"
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
