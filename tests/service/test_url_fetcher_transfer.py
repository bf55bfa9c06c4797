"""Fetching photos from a real server on this machine: limits, redirects, names that change, TLS.

The one difference to the service is that loopback is permitted.
"""

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from index._util.addresses import Address
from service.url_fetcher import Fetcher
from tests.service.test_url_fetcher import LIMIT, refusal

PHOTO = b"\xff\xd8\xff photo" * 100


class Host(BaseHTTPRequestHandler):
    """A host of photos, and of everything that can go wrong with one."""

    asked: list[tuple[str, dict[str, str]]]
    released: threading.Event

    def do_GET(self) -> None:
        self.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        name, _, rest = self.path.removeprefix("/").partition("?")[0].partition("/")
        getattr(self, f"send_{name}")(rest)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_photo(self, kind: str) -> None:
        self.answer(200, PHOTO, content_type=kind or "image/jpeg")

    def send_untyped(self, _: str) -> None:
        self.answer(200, PHOTO)

    def send_status(self, code: str) -> None:
        self.answer(int(code), PHOTO, content_type="image/jpeg")

    def send_encoded(self, encoding: str) -> None:
        self.answer(200, PHOTO, content_type="image/jpeg", content_encoding=encoding)

    def send_size(self, size: str) -> None:
        self.answer(200, b"x" * int(size), content_type="image/jpeg")

    def send_declared(self, size: str) -> None:
        self.answer(200, content_type="image/jpeg", content_length=size)

    def send_endless(self, _: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/jpeg")
        self.end_headers()
        while True:  # until the other side hangs up
            self.wfile.write(b"x" * 1000)

    def send_never(self, part: str) -> None:
        if part == "body":
            self.answer(200, b"x", content_type="image/jpeg", content_length="100")
        self.released.wait(60)

    def send_broken(self, _: str) -> None:
        self.answer(200, b"x", content_type="image/jpeg", content_length="100")

    def send_nonsense(self, _: str) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    def send_hops(self, count: str) -> None:
        self.answer(302, location=f"/hops/{int(count) - 1}" if int(count) > 1 else "../photo")

    def send_to(self, target: str) -> None:
        self.answer(307, location=target)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up on us are what the tests are about."""


@contextmanager
def hosting(tls: ssl.SSLContext | None = None) -> Iterator[tuple[int, type[Host]]]:
    """The port of a server and the requests that it received."""

    class Handler(Host):
        asked = []
        released = threading.Event()

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1], Handler
    finally:
        Handler.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def hosted() -> Iterator[tuple[int, type[Host]]]:
    with hosting() as found:
        yield found


@pytest.fixture
def port(hosted: tuple[int, type[Host]]) -> int:
    return hosted[0]


@pytest.fixture
def asked(hosted: tuple[int, type[Host]]) -> list[tuple[str, dict[str, str]]]:
    hosted[1].asked.clear()
    return hosted[1].asked


class Local(Fetcher):
    """Finds every name on this machine, and may connect to it; answers of the resolver can be given in order."""

    def __init__(self, port: int, *answers: list[str], **options: Any) -> None:
        settings = {"max_bytes": LIMIT, "timeout": 20, "allow_http": True, **options}
        super().__init__([f"*.example.com:{port}"], **settings)
        self.answers = list(answers)
        self.resolved: list[str] = []

    def allows(self, address: Address) -> bool:
        return address.is_loopback or super().allows(address)

    async def resolve(self, host: str) -> Sequence[str]:
        self.resolved.append(host)
        return self.answers.pop(0) if self.answers else ["127.0.0.1"]


@cache
def local(port: int) -> Local:
    return Local(port)


def fetch(fetcher: Fetcher, url: str) -> bytes:
    return asyncio.run(fetcher.fetch(url))


@pytest.mark.parametrize("kind", ["image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", "binary/octet-stream"])
def test_a_photo_is_fetched(port: int, asked: list[tuple[str, dict[str, str]]], kind: str) -> None:
    assert fetch(local(port), f"http://shop.example.com:{port}/photo/{kind.replace(' ', '')}") == PHOTO


def test_a_request_contains_the_host_name_and_nothing_else(
    port: int, asked: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    fetch(local(port), f"http://shop.example.com:{port}/photo/image/jpeg?size=1&x=%20y#part")
    ((path, headers),) = asked
    assert path == "/photo/image/jpeg?size=1&x=%20y"
    assert headers == {
        "host": f"shop.example.com:{port}",
        "accept": "image/*",
        "accept-encoding": "identity",
        "user-agent": "lookalike",
    }


@pytest.mark.parametrize("path", ["photo/text/html", "photo/application/json", "untyped", "encoded/gzip", "encoded/br"])
def test_a_body_that_is_not_an_image_is_refused(port: int, path: str) -> None:
    assert refusal(local(port), f"http://shop.example.com:{port}/{path}").reason == "not_an_image"


@pytest.mark.parametrize("status", [204, 206, 300, 302, 304, 401, 404, 500])
def test_only_a_success_is_taken(port: int, status: int) -> None:
    error = refusal(local(port), f"http://shop.example.com:{port}/status/{status}")
    assert error.reason == "bad_status" and str(status) in error.problem


def test_the_limit_of_bytes_is_exact(port: int) -> None:
    assert len(fetch(local(port), f"http://shop.example.com:{port}/size/{LIMIT}")) == LIMIT
    assert refusal(local(port), f"http://shop.example.com:{port}/size/{LIMIT + 1}").reason == "too_large"


@pytest.mark.parametrize("path", ["endless", "declared/99999999999"])
def test_a_photo_too_large_is_given_up_while_it_arrives_or_before(port: int, path: str) -> None:
    error = refusal(local(port), f"http://shop.example.com:{port}/{path}")
    assert error.reason == "too_large" and "10,000" in error.problem


@pytest.mark.parametrize("path", ["never/head", "never/body"])
def test_a_host_that_keeps_us_waiting_is_left(port: int, path: str) -> None:
    error = refusal(Local(port, timeout=0.2), f"http://shop.example.com:{port}/{path}")
    assert error.reason == "timeout" and "0.2 seconds" in error.problem


def test_a_slow_resolver_counts_towards_the_time(port: int) -> None:
    class Slow(Local):
        async def resolve(self, host: str) -> Sequence[str]:
            await asyncio.sleep(60)
            return await super().resolve(host)

    assert refusal(Slow(port, timeout=0.1), f"http://shop.example.com:{port}/photo").reason == "timeout"


@pytest.mark.parametrize("path", ["broken", "nonsense"])
def test_a_host_that_closes_the_connection_is_reported(port: int, path: str) -> None:
    assert refusal(local(port), f"http://shop.example.com:{port}/{path}").reason == "unreachable"


def test_a_closed_port_is_reported() -> None:
    with hosting() as (port, _):
        pass
    assert refusal(local(port), f"http://shop.example.com:{port}/photo").reason == "unreachable"


def test_the_next_address_is_tried_when_one_does_not_answer(port: int) -> None:
    fetcher = Local(port, ["127.0.0.2", "127.0.0.1"])
    assert fetch(fetcher, f"http://shop.example.com:{port}/photo") == PHOTO


def test_redirects_are_followed_to_their_limit(port: int, asked: list[tuple[str, dict[str, str]]]) -> None:
    fetcher = Local(port, max_redirects=3)
    assert fetch(fetcher, f"http://shop.example.com:{port}/hops/3") == PHOTO
    assert [path for path, _ in asked] == ["/hops/3", "/hops/2", "/hops/1", "/photo"]
    assert refusal(fetcher, f"http://shop.example.com:{port}/hops/4").reason == "too_many_redirects"
    assert refusal(Local(port, max_redirects=0), f"http://shop.example.com:{port}/hops/1").reason == (
        "too_many_redirects"
    )


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://elsewhere.org:{port}/photo", "host_not_allowed"),
        ("http://127.0.0.1:{port}/photo", "host_not_allowed"),
        ("//elsewhere.org:{port}/photo", "host_not_allowed"),
        ("http://shop.example.com/photo", "host_not_allowed"),
        ("http://2130706433:{port}/photo", "bad_url"),
        ("http://me@shop.example.com:{port}/photo", "bad_url"),
        ("file:///etc/passwd", "bad_url"),
        ("http://[::1", "bad_url"),
    ],
)
def test_a_redirect_is_checked_like_the_first_address(
    port: int, asked: list[tuple[str, dict[str, str]]], target: str, reason: str
) -> None:
    where = target.format(port=port)
    assert refusal(local(port), f"http://shop.example.com:{port}/to/{where}").reason == reason
    assert len(asked) == 1


def test_a_name_is_resolved_once_so_that_it_cannot_change_after_the_check(port: int) -> None:
    fetcher = Local(port, ["127.0.0.1"], ["10.0.0.1"])
    assert fetch(fetcher, f"http://shop.example.com:{port}/photo") == PHOTO
    assert fetcher.resolved == ["shop.example.com"]


def test_a_name_that_changed_before_a_redirect_is_checked_again(port: int) -> None:
    fetcher = Local(port, ["127.0.0.1"], ["169.254.169.254"])
    error = refusal(fetcher, f"http://shop.example.com:{port}/hops/1")
    assert error.reason == "host_not_public"
    assert fetcher.resolved == ["shop.example.com", "shop.example.com"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of shop.example.com and its key, self-signed."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("openssl is not installed")
    file = tmp_path_factory.mktemp("tls") / "shop.pem"
    name = ["-subj", "/CN=shop.example.com", "-addext", "subjectAltName=DNS:shop.example.com"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"]
    command = [openssl, "req", "-x509", *kind, *name, "-keyout", str(file), "-out", f"{file}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    with file.open("a") as both:
        both.write(Path(f"{file}.crt").read_text())
    return file


def test_tls_is_for_the_name_and_not_for_the_address(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    named: list[str | None] = []
    context.sni_callback = lambda _, name, __: named.append(name)
    with hosting(context) as (port, _):
        assert refusal(Local(port), f"https://shop.example.com:{port}/photo").reason == "unreachable"
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        assert fetch(Local(port, allow_http=False), f"https://shop.example.com:{port}/photo") == PHOTO
        downgrade = f"https://shop.example.com:{port}/to/http://shop.example.com:{port}/photo"
        assert refusal(Local(port, allow_http=False), downgrade).reason == "bad_url"
        assert refusal(Local(port), f"https://other.example.com:{port}/photo").reason == "unreachable"
    assert named == ["shop.example.com"] * 3 + ["other.example.com"]
