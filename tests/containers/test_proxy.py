"""The proxies that are delivered, in front of a real service: addresses, uploads and events pass as they are."""

import io
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from index.gallery.jobs import opened_jobs
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PROXY = Path(__file__).parents[2] / "deploy" / "proxy"
MEBI = 1 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if not found:
        pytest.skip(f"{name} is not installed; Debian: apt-get install {name}.")
    return found


def caddy(folder: Path, upstream: str) -> tuple[list[str], dict[str, str], str]:
    """Caddy, without a certificate: it would want the ports 80 and 443."""
    address = f"http://localhost:{free_port()}"
    command = [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(PROXY / "Caddyfile")]
    return command, {"DOMAIN": address, "UPSTREAM": upstream, "HOME": str(folder)}, address


def nginx(folder: Path, upstream: str) -> tuple[list[str], dict[str, str], str]:
    """nginx, with a certificate that nobody signed."""
    port, place = free_port(), f"{folder}/search.example.com"
    subprocess.run(
        f"{program('openssl')} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {place}.key -out {place}.pem".split(),
        check=True,
        capture_output=True,
    )
    site = (PROXY / "nginx.conf").read_text()
    for delivered, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/certs/search.example.com", place),
        ("/etc/ssl/private/search.example.com", place),
        ("127.0.0.1:8000", upstream),
    ):
        assert delivered in site
        site = site.replace(delivered, here)
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; pid {folder}/pid; events {{}} "
        f"http {{ access_log off; {places} include {folder}/site.conf; }}"
    )
    command = [program("nginx"), "-e", f"{folder}/errors", "-c", f"{folder}/nginx.conf"]
    return command, {}, f"https://localhost:{port}"


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    return make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))


@pytest.fixture(scope="module", params=[caddy, nginx])
def client(
    request: pytest.FixtureRequest, asked_for: None, gallery: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client on the far side of a proxy."""
    with run_server("serve", "--gallery", gallery) as service:
        command, variables, address = request.param(tmp_path_factory.mktemp("proxy"), service.removeprefix("http://"))
        with (
            running(command, variables) as process,
            httpx.Client(base_url=address, verify=False, timeout=60) as client,
        ):
            while not answers(client):
                assert process.poll() is None, "the proxy ended"
                time.sleep(0.1)
            yield client


@contextmanager
def running(command: list[str], variables: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_an_item_with_a_slash_in_its_id_is_reached(client: httpx.Client) -> None:
    for name in ("kitchen%2Fmug%2003", "a%252Fb", "..%2F..%2Fmug"):
        written = client.put(f"/v1/items/{name}", json={"title": name})
        assert written.status_code in (200, 201), written.text
        assert client.get(f"/v1/items/{name}").json()["title"] == name
    assert client.get("/v1/items/kitchen/mug%2003").status_code == 404


def photo_of(size: int) -> bytes:
    """A photo of nearly so many bytes, as large ones come: uncompressed."""
    out = io.BytesIO()
    Image.new("RGB", (2000, size // 6000), "blue").save(out, "BMP")
    return out.getvalue()


def test_the_largest_photo_passes_and_a_larger_one_is_refused_by_the_service(client: httpx.Client) -> None:
    sent = {"content-type": "image/bmp"}
    largest = photo_of(20 * MEBI - 10_000)
    assert len(largest) > 19.9 * MEBI
    assert client.post("/v1/search", content=largest, headers=sent).status_code == 200
    refused = client.post("/v1/search", content=photo_of(20 * MEBI + 100_000), headers=sent)
    assert refused.status_code == 413 and refused.json()["type"] == "/problems/body-too-large"


def test_the_events_of_a_job_come_while_it_runs(client: httpx.Client, gallery: Path) -> None:
    with opened_jobs(gallery) as history:
        job = history.begin("catalogue.csv", "b" * 16)
        job.hold()
        with client.stream("GET", f"/v1/jobs/{job.record.id}/events") as events:
            lines = (line for line in events.iter_lines() if line)
            assert next(lines) == "event: progress"
            assert json.loads(next(lines).removeprefix("data: "))["state"] == "running"
            job.update(state="done")
            assert next(lines) == "event: ended"


def test_a_photo_finds_its_product_through_the_proxy(client: httpx.Client) -> None:
    answer = client.post("/v1/search", files={"image": tiny_photo(2, 3)}).json()
    assert answer["items"][0]["id"] == "ball-blue"
    assert client.get(answer["items"][0]["image"]["url"]).headers["content-type"] == "image/jpeg"
