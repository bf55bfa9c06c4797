"""Tests of the shipped proxy configurations in front of a real service: URLs, uploads and events pass unchanged."""

import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
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


def nginx(folder: Path, upstream: str, *changes: tuple[str, str]) -> tuple[list[str], dict[str, str], str]:
    """Returns the command of nginx with a self-signed certificate, and with changes of the shipped configuration."""
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
        *changes,
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
        started = request.param(tmp_path_factory.mktemp("proxy"), service.removeprefix("http://"))
        with run_proxy(*started) as client:
            yield client


@contextmanager
def run_proxy(command: list[str], variables: dict[str, str], address: str) -> Iterator[httpx.Client]:
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        with httpx.Client(base_url=address, verify=False, timeout=60) as client:
            while not is_healthy(client):
                assert process.poll() is None, "the proxy ended"
                time.sleep(0.1)
            yield client
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


def test_browsers_are_bound_to_https_and_headers_of_the_service_pass(client: httpx.Client) -> None:
    for path in ("/healthz", "/v1/items/missing"):
        headers = client.get(path).headers
        assert headers["strict-transport-security"] == "max-age=31536000"
        assert headers.get_list("x-content-type-options") == ["nosniff"] and "content-security-policy" in headers
        assert not any(character.isdigit() for character in headers.get("server", "")), "the proxy shows its version"


def test_proxy_closes_a_connection_without_a_complete_head(client: httpx.Client) -> None:
    connection: socket.socket = socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=30)
    if client.base_url.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = context.wrap_socket(connection)
    with connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert connection.recv(1000)[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 400")


def test_nginx_limits_the_requests_of_an_address(containers_enabled: None, gallery: Path, tmp_path: Path) -> None:
    slower = (("rate=100r/s", "rate=1r/s"), ("burst=400", "burst=9"))
    with (
        run_server("serve", "--gallery", gallery) as service,
        run_proxy(*nginx(tmp_path, service.removeprefix("http://"), *slower)) as client,
    ):
        statuses = [client.get("/healthz").status_code for _ in range(30)]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 5


def caddy_of_two(folder: Path, one: str, two: str) -> tuple[list[str], dict[str, str], str]:
    return caddy(folder, f"{one} {two}")


def nginx_of_two(folder: Path, one: str, two: str) -> tuple[list[str], dict[str, str], str]:
    return nginx(folder, one, ("# server 10.0.0.2:8000", f"server {two}"))


@pytest.mark.parametrize("proxy", [caddy_of_two, nginx_of_two])
def test_requests_move_to_the_other_replica_when_one_is_killed(
    proxy: Callable[[Path, str, str], tuple[list[str], dict[str, str], str]],
    containers_enabled: None,
    gallery: Path,
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        (first, one), (_, two) = (stack.enter_context(run_replica(gallery)) for _ in range(2))
        client = stack.enter_context(run_proxy(*proxy(tmp_path, one, two)))
        photo = tiny_photo(2, 3)
        for turn in range(60):
            if turn == 20:
                first.kill()
                first.wait(30)
            assert client.get("/readyz").status_code == 200
            response = client.post("/v1/search", files={"image": photo})
            assert response.json()["items"][0]["id"] == "ball-blue"


@contextmanager
def run_replica(gallery: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Runs a service that a test may kill, and yields it with its address."""
    port = free_port()
    command = [sys.executable, "-m", "lookalike", "serve", "--gallery", str(gallery), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                while not is_healthy(client):
                    assert process.poll() is None, "the service ended"
                    time.sleep(0.1)
            yield process, f"127.0.0.1:{port}"
        finally:
            process.kill()
