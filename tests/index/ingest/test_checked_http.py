"""Photos over HTTP come from allowed addresses only: through redirects, names, literals and proxies."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from index.embedding.images import ImageError
from index.ingest.places import AllowedPlaces
from index.ingest.remote_files import FileReader, RetrySettings
from index.ingest.sources import Source

PHOTO = b"the bytes of a photo"
QUICK = RetrySettings(timeout=2, backoff=0.01)


class Server(BaseHTTPRequestHandler):
    """Redirects `/to/ADDRESS` there, and returns a photo for everything else; a proxy does the same."""

    def do_GET(self) -> None:
        requested: list[str] = self.server.requested  # type: ignore[attr-defined]
        requested.append(self.path)
        _, is_redirect, target = self.path.partition("/to/")
        self.send_response(302 if is_redirect else 200)
        if is_redirect:
            self.send_header("Location", target)
        self.send_header("Content-Length", str(len(PHOTO)))
        self.end_headers()
        self.wfile.write(PHOTO)

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the tests' output quiet."""


@contextmanager
def serve(address: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the port of a server, and what was requested."""
    server = ThreadingHTTPServer((address, 0), Server)
    server.requested = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port, server.requested  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def read(place: str, *allowed: str) -> bytes:
    return FileReader(AllowedPlaces.of([], allowed), QUICK).read(place, "/shop")


def refusal(place: str, *allowed: str) -> str:
    with pytest.raises(ImageError, match=r"leads to an address that is not public\. .*--allow-address") as caught:
        read(place, *allowed)
    assert caught.value.reason == "forbidden"
    return str(caught.value).replace(place, "")


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_an_internal_address_is_not_connected_to_and_its_ports_are_not_told_apart() -> None:
    with serve("127.0.0.1") as (port, requested), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hosts = ("127.0.0.1", "localhost", "LOCALHOST", "[::ffff:127.0.0.1]", "0.0.0.0", "127.9.9.9")
        texts = {refusal(f"http://{host}:{port}/a.jpg") for host in hosts}
        texts.add(refusal(f"http://127.0.0.1:{closed.getsockname()[1]}/a.jpg"))
        assert len(texts) == 1
        for metadata in ("169.254.169.254", "[fe80::1]", "10.0.0.1", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]"):
            refusal(f"http://{metadata}/latest/meta-data")
        for number in ("2130706433", "0x7f000001", "127.1", "0177.0.0.1"):
            with pytest.raises(ImageError):
                read(f"http://{number}:{port}/a.jpg")
    assert requested == []


def test_a_name_is_checked_by_the_address_that_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def rebind(host: Any, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "cdn.example.com" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    with serve("127.0.0.1") as (port, requested):
        refusal(f"http://cdn.example.com:{port}/a.jpg")
        assert requested == []
        assert read(f"http://cdn.example.com:{port}/a.jpg", "CDN.example.com") == PHOTO
        assert read(f"http://cdn.example.com:{port}/a.jpg", "127.0.0.0/8") == PHOTO
        refusal(f"http://cdn.example.com:{port}/a.jpg", "example.com", "10.0.0.0/8")


def test_a_redirect_leads_to_allowed_addresses_only() -> None:
    with serve("127.0.0.1") as (port, _), serve("127.0.0.2") as (inner, requested):
        start = f"http://127.0.0.1:{port}/to/"
        assert read(f"{start}/a.jpg", "127.0.0.1") == PHOTO
        for target in (f"http://127.0.0.2:{inner}/", f"//127.0.0.2:{inner}/", f"{start}http://127.0.0.2:{inner}/"):
            refusal(f"{start}{target}", "127.0.0.1")
        # A host that is allowed by its name passes nothing on to the next one.
        refusal(f"http://localhost:{port}/to/http://127.0.0.2:{inner}/", "localhost")
        with pytest.raises(ImageError):
            read(f"{start}file:///etc/passwd", "127.0.0.1")
        assert requested == []
        assert read(f"{start}http://127.0.0.2:{inner}/", "127.0.0.1", "127.0.0.2") == PHOTO


def test_a_connection_that_is_kept_open_serves_only_its_own_host() -> None:
    with serve("127.0.0.1") as (port, requested):
        files = FileReader(AllowedPlaces.of([], ["localhost"]), QUICK)
        assert files.read(f"http://localhost:{port}/a.jpg", "/shop") == PHOTO
        with pytest.raises(ImageError, match="not public"):
            files.read(f"http://127.0.0.1:{port}/a.jpg", "/shop")
    assert requested == ["/a.jpg"]


def test_the_table_itself_may_be_at_an_internal_address() -> None:
    with serve("127.0.0.1") as (port, requested), pytest.raises(Exception, match="no column 'item_id'"):
        Source([f"http://127.0.0.1:{port}/t.csv"]).check()
    assert requested == ["/t.csv"]


def test_a_proxy_connects_to_what_is_not_known_to_be_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve("127.0.0.1") as (port, requested):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        assert read("http://cdn.invalid/a.jpg") == PHOTO, "the proxy resolves what this machine cannot"
        for host in ("127.0.0.1", "localhost", "169.254.169.254", "2130706433"):
            refusal(f"http://{host}/a.jpg")
        refusal("http://cdn.invalid/to/http://10.0.0.1/a.jpg")
        assert requested == ["http://cdn.invalid/a.jpg", "http://cdn.invalid/to/http://10.0.0.1/a.jpg"]
        assert read("http://10.0.0.1/a.jpg", "10.0.0.1") == PHOTO
