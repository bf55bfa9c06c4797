"""Fetching a photo by its address: only public hosts on the list, through every trick that names another one."""

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import LookalikeError
from service.fetching import Address, Fetcher, FetchError, is_public

PHOTO = b"\xff\xd8\xff photo" * 100
LIMIT = 10_000


# What may be connected to


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1", "169.253.1.1"]
    + ["2606:4700::1111", "2a00:1450:4001::5", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


PRIVATE = {
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12:3456::1", "fec0::1"],
    "link-local": ["169.254.0.1", "fe80::1", "fe80::1%eth0"],
    "metadata": ["169.254.169.254", "fd00:ec2::254"],
    "carrier-grade NAT": ["100.64.0.1", "100.127.255.255"],
    "multicast": ["224.0.0.1", "224.0.1.1", "239.255.255.250", "ff02::1", "ff0e::1"],
    "broadcast and reserved": ["255.255.255.255", "240.0.0.1", "5f00::1", "100::1", "100:0:0:1::1", "4000::1"],
    "protocol assignments": ["192.0.0.8", "192.0.0.9", "192.88.99.1", "2001:1::1", "2001:20::1"],
    "documentation and benchmarks": [
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "198.18.0.1",
        "2001:db8::1",
        "3fff::1",
    ],
    "IPv4-mapped": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "IPv4-compatible and translated": ["::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1"],
    "NAT64": ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "64:ff9b:1::808:808"],
    "6to4": ["2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::1"],
    "Teredo": ["2001::1", "2001:0:808:808::f5ff:fffe"],
}


@pytest.mark.parametrize(("kind", "address"), [(kind, it) for kind, those in PRIVATE.items() for it in those])
def test_addresses_that_are_not_of_the_internet_are_refused(kind: str, address: str) -> None:
    assert not is_public(ip_address(address)), kind


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_judged_as_itself(inner: IPv4Address) -> None:
    mapped, nat64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
    for network in (mapped, nat64):
        assert is_public(network[int(inner)]) == is_public(inner)
    assert not is_public(IPv6Address((0x2002 << 112) | (int(inner) << 80)))
    if not inner.is_global:
        assert not is_public(inner)


# What an address may look like. Nothing here may reach the network, so nothing is answered for the test.


class Offline(Fetcher):
    """Its resolver knows a few names, and the rest of it is as in service."""

    names = {
        "shop.example.com": ["10.0.0.1"],
        "both.example.com": ["93.184.216.34", "10.0.0.1"],
        "six.example.com": ["2606:4700::1111", "::ffff:169.254.169.254"],
    }

    async def resolve(self, host: str) -> Sequence[str]:
        if host not in self.names:
            raise OSError("Name or service not known")
        return self.names[host]


def refusal(fetcher: Fetcher, url: str) -> FetchError:
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetcher.fetch(url))
    assert caught.value.problem and caught.value.remedy
    return caught.value


def everywhere(fetcher: type[Fetcher] = Fetcher, **options: Any) -> Fetcher:
    return fetcher(["*"], **{"max_bytes": LIMIT, "timeout": 20, "allow_http": True, **options})


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://0.0.0.0/"]
    + ["http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/latest/", "http://[64:ff9b::7f00:1]/"],
)
def test_an_inner_address_is_refused_by_the_real_resolver(url: str) -> None:
    assert refusal(everywhere(), url).reason == "host_not_public"


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.0.0.1", "0x7f.1", "127.1", "0177.0.0.1", "017700000001", "127.0.0.01", "127.0.0.1."]
    + ["[fe80::1%25eth0]", "[2606:4700::1111%25eth0]", "1.2.3.4.5", "256.1.1.1", "shop.0x", "a%2eexample.com", "a b", "-"[:0]],
)  # fmt: skip
def test_other_spellings_of_an_address_are_no_host(host: str) -> None:
    assert refusal(everywhere(Offline), f"http://{host}/photo.jpg").reason == "bad_url"


@pytest.mark.parametrize(
    "url",
    ["", "photo.jpg", "//shop.example.com/a.jpg", "file:///etc/passwd", "ftp://shop.example.com/a", "data:image/png,x"]
    + ["gopher://shop.example.com:80/", "https://user:word@shop.example.com/", "https://user@shop.example.com/"]
    + [
        "https://trusted.example.com\\@shop.example.com/",
        "https://shop.example.com:port/",
        "https://a\r\nb.example.com/",
    ]
    + ["unix:/run/docker.sock", "http://[::1/", "https://" + "a" * 64 + ".example.com/", "https://" + "a" * 70_000],
)
def test_what_is_not_the_address_of_a_photo_is_refused(url: str) -> None:
    assert refusal(everywhere(Offline), url).reason == "bad_url"


def test_plain_http_is_refused_unless_allowed() -> None:
    strict = Offline(["*"], max_bytes=LIMIT)
    assert "https://" in refusal(strict, "http://shop.example.com/").problem
    assert refusal(strict, "http://shop.example.com/").reason == "bad_url"
    assert refusal(everywhere(Offline), "http://shop.example.com/").reason == "host_not_public"


@pytest.mark.parametrize("host", ["shop.example.com", "both.example.com", "six.example.com", "unknown.example.com"])
def test_one_address_that_is_not_public_spoils_a_host_and_none_is_told(host: str) -> None:
    error = refusal(everywhere(Offline), f"https://{host}/photo.jpg?signature=secret")
    assert error.reason == "host_not_public"
    assert str(error) == f"The host {host} has no public address. Give an address on the public internet."


ALLOWED = ["cdn.example.com", "*.shop.example", "*.port.example:8443", "one.example:8080", "münchen.example"]


@pytest.mark.parametrize(
    "url",
    [
        "https://cdn.example.com/a",
        "https://CDN.Example.COM:443/a",
        "http://cdn.example.com:80/",
        "https://a.shop.example/",
    ]
    + ["https://a.b.shop.example/", "https://x.port.example:8443/", "https://one.example:8080/"]
    + ["https://münchen.example/", "https://xn--mnchen-3ya.example/"],
)
def test_hosts_on_the_list_pass_to_the_next_check(url: str) -> None:
    fetcher = Offline(ALLOWED, max_bytes=LIMIT, allow_http=True)
    assert refusal(fetcher, url).reason == "host_not_public"


@pytest.mark.parametrize(
    "url",
    ["https://example.com/", "https://cdn.example.com.evil.example/", "https://evilcdn.example.com/"]
    + [
        "https://shop.example/",
        "https://evilshop.example/",
        "https://cdn.example.com:8443/",
        "http://cdn.example.com:443/",
    ]
    + ["https://cdn.example.com:80/", "https://x.port.example/", "https://one.example/", "https://93.184.216.34/"]
    + ["https://cdn.example.com:22/", "https://[2606:4700::1111]/"],
)
def test_hosts_and_ports_that_are_not_on_the_list_are_refused(url: str) -> None:
    fetcher = Offline(ALLOWED, max_bytes=LIMIT, allow_http=True)
    assert refusal(fetcher, url).reason == "host_not_allowed"


def test_an_empty_list_allows_nothing() -> None:
    assert refusal(Offline([], max_bytes=LIMIT), "https://cdn.example.com/").reason == "host_not_allowed"


@pytest.mark.parametrize(
    "pattern",
    ["", " ", "*cdn.com", "cdn.*.com", "**", "*.", "*.*", "https://cdn.com", "cdn.com/path", "me@cdn.com", "cdn.com:x"]
    + ["0x7f.1", "cdn..com", ".cdn.com", "cdn.com."],
)
def test_a_pattern_that_is_no_host_is_a_mistake_of_the_operator(pattern: str) -> None:
    with pytest.raises(LookalikeError, match=r"it is no host\. Write cdn\.example\.com"):
        Fetcher([pattern], max_bytes=LIMIT)


# The transfer itself, from a real server on this machine: the one difference is that loopback is permitted.


class Host(BaseHTTPRequestHandler):
    """A host of photos, and of everything that can go wrong with one."""

    asked: list[tuple[str, dict[str, str]]]
    released: threading.Event

    def do_GET(self) -> None:
        self.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        name, _, rest = self.path.removeprefix("/").partition("/")
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
    """A server's port and its handler, which tells what it was asked."""
    handler = type("ThisHost", (Host,), {"asked": [], "released": threading.Event()})
    server = Server(("127.0.0.1", 0), handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1], handler
    finally:
        handler.released.set()
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

    def permits(self, address: Address) -> bool:
        return address.is_loopback or super().permits(address)

    async def resolve(self, host: str) -> Sequence[str]:
        self.resolved.append(host)
        return self.answers.pop(0) if self.answers else ["127.0.0.1"]


def fetch(fetcher: Fetcher, url: str) -> bytes:
    return asyncio.run(fetcher.fetch(url))


@pytest.mark.parametrize("kind", ["image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", "binary/octet-stream"])
def test_a_photo_is_fetched(port: int, asked: list[tuple[str, dict[str, str]]], kind: str) -> None:
    assert fetch(Local(port), f"http://shop.example.com:{port}/photo/{kind.replace(' ', '')}") == PHOTO


def test_the_host_is_asked_by_its_name_and_told_nothing_else(
    port: int, asked: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    fetch(Local(port), f"http://shop.example.com:{port}/photo/?size=1&x=%20y#part")
    ((path, headers),) = asked
    assert path == "/photo/?size=1&x=%20y"
    assert headers == {
        "host": f"shop.example.com:{port}",
        "accept": "image/*",
        "accept-encoding": "identity",
        "user-agent": "lookalike",
    }


@pytest.mark.parametrize("path", ["photo/text/html", "photo/application/json", "untyped", "encoded/gzip", "encoded/br"])
def test_what_is_no_image_is_not_taken(port: int, path: str) -> None:
    assert refusal(Local(port), f"http://shop.example.com:{port}/{path}").reason == "not_an_image"


@pytest.mark.parametrize("status", [204, 206, 300, 302, 304, 401, 404, 500])
def test_only_a_success_is_taken(port: int, status: int) -> None:
    error = refusal(Local(port), f"http://shop.example.com:{port}/status/{status}")
    assert error.reason == "bad_status" and str(status) in error.problem


def test_the_limit_of_bytes_is_exact(port: int) -> None:
    assert len(fetch(Local(port), f"http://shop.example.com:{port}/size/{LIMIT}")) == LIMIT
    assert refusal(Local(port), f"http://shop.example.com:{port}/size/{LIMIT + 1}").reason == "too_large"


@pytest.mark.parametrize("path", ["endless", "declared/99999999999"])
def test_a_photo_too_large_is_given_up_while_it_arrives_or_before(port: int, path: str) -> None:
    error = refusal(Local(port), f"http://shop.example.com:{port}/{path}")
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
def test_a_host_that_breaks_off_is_told(port: int, path: str) -> None:
    assert refusal(Local(port), f"http://shop.example.com:{port}/{path}").reason == "unreachable"


def test_a_port_that_nobody_listens_on_is_told() -> None:
    with hosting() as (port, _):
        pass
    assert refusal(Local(port), f"http://shop.example.com:{port}/photo").reason == "unreachable"


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
    assert refusal(Local(port), f"http://shop.example.com:{port}/to/{where}").reason == reason
    assert len(asked) == 1


def test_a_redirect_to_plain_http_is_refused_when_only_https_is_allowed() -> None:
    fetcher = Local(443, allow_http=False)
    base = fetcher._parsed("https://shop.example.com/photo")
    with pytest.raises(FetchError, match="must begin with https://"):
        fetcher._parsed("http://shop.example.com/photo", base)


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
    """A certificate of shop.example.com and its key, which nobody vouches for."""
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
        assert refusal(Local(port), f"https://other.example.com:{port}/photo").reason == "unreachable"
    assert named == ["shop.example.com", "shop.example.com", "other.example.com"]
