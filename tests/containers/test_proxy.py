"""Tests of the shipped proxy configurations in front of a real service: URLs, uploads and events pass unchanged."""

import io
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from index.gallery.store.sqlite_jobs import SQLiteJobs
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PROXY = Path(__file__).parents[2] / "deploy" / "proxy"
MEBI = 1 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if not path:
        pytest.skip(f"{name} is not installed; Debian: apt-get install {name}.")
    return path


def caddy(folder: Path, upstream: str) -> tuple[list[str], dict[str, str], str]:
    """Returns the command of Caddy without a certificate, which would need the ports 80 and 443."""
    address = f"http://localhost:{free_port()}"
    command = [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(PROXY / "Caddyfile")]
    return command, {"DOMAIN": address, "UPSTREAM": upstream, "HOME": str(folder)}, address


def nginx(folder: Path, upstream: str) -> tuple[list[str], dict[str, str], str]:
    """Returns the command of nginx with a self-signed certificate."""
    port, certificate = free_port(), f"{folder}/search.example.com"
    subprocess.run(
        f"{program('openssl')} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost "
        f"-keyout {certificate}.key -out {certificate}.pem".split(),
        check=True,
        capture_output=True,
    )
    site = (PROXY / "nginx.conf").read_text()
    for shipped, replacement in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/certs/search.example.com", certificate),
        ("/etc/ssl/private/search.example.com", certificate),
        ("127.0.0.1:8000", upstream),
    ):
        assert shipped in site
        site = site.replace(shipped, replacement)
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; pid {folder}/pid; events {{}} "
        f"http {{ access_log off; {paths} include {folder}/site.conf; }}"
    )
    command = [program("nginx"), "-e", f"{folder}/errors", "-c", f"{folder}/nginx.conf"]
    return command, {}, f"https://localhost:{port}"


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    return make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))


@pytest.fixture(scope="module", params=[caddy, nginx])
def client(
    request: pytest.FixtureRequest, containers_enabled: None, gallery: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Returns a client that connects through a proxy."""
    with run_server("serve", "--gallery", gallery) as service:
        command, variables, address = request.param(tmp_path_factory.mktemp("proxy"), service.removeprefix("http://"))
        with (
            run_proxy(command, variables) as process,
            httpx.Client(base_url=address, verify=False, timeout=60) as client,
        ):
            while not is_healthy(client):
                assert process.poll() is None, "the proxy ended"
                time.sleep(0.1)
            yield client


@contextmanager
def run_proxy(command: list[str], variables: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_item_id_with_a_slash_passes_the_proxy(client: httpx.Client) -> None:
    for name in ("kitchen%2Fmug%2003", "a%252Fb", "..%2F..%2Fmug"):
        response = client.put(f"/v1/items/{name}", json={"title": name})
        assert response.status_code in (200, 201), response.text
        assert client.get(f"/v1/items/{name}").json()["title"] == name
    assert client.get("/v1/items/kitchen/mug%2003").status_code == 404


def large_photo(size: int) -> bytes:
    """Returns an uncompressed photo of about this many bytes."""
    out = io.BytesIO()
    Image.new("RGB", (2000, size // 6000), "blue").save(out, "BMP")
    return out.getvalue()


def test_largest_photo_passes_and_a_larger_one_is_refused_by_the_service(client: httpx.Client) -> None:
    headers = {"content-type": "image/bmp"}
    largest = large_photo(20 * MEBI - 10_000)
    assert len(largest) > 19.9 * MEBI
    assert client.post("/v1/search", content=largest, headers=headers).status_code == 200
    refused = client.post("/v1/search", content=large_photo(20 * MEBI + 100_000), headers=headers)
    assert refused.status_code == 413 and refused.json()["type"] == "/problems/body-too-large"


def test_events_of_a_job_are_streamed_while_it_runs(client: httpx.Client, gallery: Path) -> None:
    with closing(SQLiteJobs(gallery)) as history:
        job = history.begin("catalogue.csv", "b" * 16)
        job.hold()
        with client.stream("GET", f"/v1/jobs/{job.record.id}/events") as events:
            lines = (line for line in events.iter_lines() if line)
            assert next(lines) == "event: progress"
            assert json.loads(next(lines).removeprefix("data: "))["state"] == "running"
            job.update(state="done")
            assert next(lines) == "event: ended"


def test_search_works_through_the_proxy(client: httpx.Client) -> None:
    results = client.post("/v1/search", files={"image": tiny_photo(2, 3)}).json()
    assert results["items"][0]["id"] == "ball-blue"
    assert client.get(results["items"][0]["image"]["url"]).headers["content-type"] == "image/jpeg"
