"""Fetches a photo from the address in a request, without giving the client access to our network (SSRF).

The host must be on the operator's list, all its addresses must be public, and the connection goes to an address that
was checked: the name is never resolved a second time. Redirects pass the same checks.
"""

import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from typing import Literal, NamedTuple

import anyio
import httpcore
import httpx

from index._util.addresses import HOST_NAME, Address, is_public
from index.errors import LookalikeError

log = logging.getLogger(__name__)

Reason = Literal[
    "bad_url",
    "host_not_allowed",
    "host_not_public",
    "unreachable",
    "timeout",
    "too_many_redirects",
    "bad_status",
    "not_an_image",
    "too_large",
]

_PORTS = {"https": 443, "http": 80}
_REDIRECTS = {301, 302, 303, 307, 308}
_OCTETS = {"application/octet-stream", "binary/octet-stream"}
_PATTERN = re.compile(r"(\*\.?)?([^*:/?#@\s]*)(?::(\d{1,5}))?")


class FetchError(LookalikeError):
    """A photo could not be fetched; `reason` is stable, for programs.

    The message is sent to the client, so it contains nothing about our network.
    """

    kind = "fetch"

    def __init__(self, reason: Reason, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.reason: Reason = reason


class Fetcher:
    """Fetches photos from allowed hosts: `cdn.example.com`, `*.example.com`, or `*` for every public one.

    `*.example.com` does not include `example.com` itself. Ports are those of the scheme, unless a pattern names
    one: `cdn.example.com:8443`. Addresses begin with https unless `allow_http`. `timeout` is the total time in
    seconds. Certificates are verified with those of the package certifi, or of SSL_CERT_FILE.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        *,
        max_bytes: int,
        timeout: float = 10.0,
        max_redirects: int = 3,
        allow_http: bool = False,
    ) -> None:
        self._allowed = [HostPattern.parse(it) for it in allowed]
        self._schemes = ("https", "http") if allow_http else ("https",)
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._max_redirects = max_redirects
        self._tls = httpx.create_ssl_context()

    async def fetch(self, url: str, on_bytes: Callable[[int], None] = lambda size: None) -> bytes:
        """Returns the bytes at an address; raises FetchError. `on_bytes` is called with the size of each piece."""
        # Without idle connections no connection outlives its check: each redirect is resolved and checked again.
        pool = httpcore.AsyncConnectionPool(
            self._tls, max_keepalive_connections=0, network_backend=_CheckedNetwork(self)
        )
        try:
            with anyio.fail_after(self._timeout):
                async with pool:
                    return await self._follow(pool, self._parse(url), on_bytes)
        except (TimeoutError, httpcore.TimeoutException):
            raise FetchError(
                "timeout", f"The photo did not arrive within {self._timeout:g} seconds.", "Send the photo itself."
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError) as error:
            log.info("fetching failed: %r", error)
            raise FetchError(
                "unreachable", "The photo's host could not be reached, or closed the connection.", "Try again later."
            ) from None

    def allows(self, address: Address) -> bool:
        """Whether a connection to this address is allowed."""
        return is_public(address)

    async def resolve(self, host: str) -> Sequence[str]:
        """Returns every address of a host; raises OSError when it has none."""
        found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(place[0]) for *_, place in found))

    async def checked_addresses(self, host: str) -> Sequence[str]:
        """Returns the addresses of a host if connecting to all of them is allowed; raises FetchError otherwise."""
        try:
            addresses = await self.resolve(host)
        except (OSError, UnicodeError) as error:
            log.info("fetching from %s: %s", host, error)
            addresses = []
        refused = [it for it in addresses if not self.allows(ip_address(it))]
        if refused or not addresses:
            if refused:
                log.warning("fetching from %s refused: it has the addresses %s", host, ", ".join(refused))
            # The same error for both: a client must not learn which internal names exist.
            raise FetchError(
                "host_not_public", f"The host {host} has no public address.", "Give an address on the public internet."
            )
        return addresses

    def _parse(self, text: str, base: httpx.URL | None = None) -> httpx.URL:
        """Parses and checks an address. The same parser reads what is checked and what is sent."""
        try:
            url = base.join(text) if base else httpx.URL(text)
        except httpx.InvalidURL as error:
            raise _bad_url(f"The photo's address cannot be read: {error}.") from None
        if url.scheme not in self._schemes:
            raise _bad_url(f"The photo's address must begin with {' or '.join(f'{it}://' for it in self._schemes)}.")
        if url.userinfo:
            raise _bad_url("The photo's address contains a user or a password.")
        host = url.raw_host.decode("ascii")
        if not _is_host(host):
            raise _bad_url(f"The photo's address has the invalid host {host[:80]!r}.")
        if not any(it.matches(url) for it in self._allowed):
            raise FetchError(
                "host_not_allowed",
                f"Photos are not fetched from {url.netloc.decode('ascii')}.",
                "Send the photo itself, or have the operator allow the host.",
            )
        return url

    async def _follow(
        self, pool: httpcore.AsyncConnectionPool, url: httpx.URL, on_bytes: Callable[[int], None]
    ) -> bytes:
        for _ in range(self._max_redirects + 1):
            target = httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port or _PORTS[url.scheme], target=url.raw_path
            )
            headers = [
                ("Host", url.netloc.decode("ascii")),
                ("Accept", "image/*"),
                ("Accept-Encoding", "identity"),
                ("User-Agent", "lookalike"),
            ]
            async with pool.stream("GET", target, headers=headers) as response:
                reply = httpx.Headers(response.headers)
                if response.status not in _REDIRECTS or "location" not in reply:
                    return await self._read_body(response, reply, on_bytes)
                url = self._parse(reply["location"], url)
        raise FetchError(
            "too_many_redirects",
            f"The photo's address redirects more than {self._max_redirects} times.",
            "Give the final address.",
        )

    async def _read_body(
        self, response: httpcore.Response, headers: httpx.Headers, on_bytes: Callable[[int], None]
    ) -> bytes:
        if response.status != 200:
            raise FetchError(
                "bad_status", f"The photo's host answered with status {response.status}.", "Check the address."
            )
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (media_type.startswith("image/") or media_type in _OCTETS):
            raise _not_an_image(f"The photo's host sent {media_type[:80] or 'no Content-Type'} instead of an image.")
        # Without an encoding the body cannot expand; `identity` was requested, and photos are compressed already.
        if (encoding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
            raise _not_an_image(f"The photo's host sent it encoded as {encoding[:80]}.")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        async for piece in response.aiter_stream():
            on_bytes(len(piece))
            body += piece
            if len(body) > self._max_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> FetchError:
        return FetchError("too_large", f"The photo has more than {self._max_bytes:,} bytes.", "Use a smaller photo.")


class HostPattern(NamedTuple):
    """An entry of the allow-list; a leading dot matches every subdomain, an empty host matches any."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "HostPattern":
        wild, name, port = match.groups() if (match := _PATTERN.fullmatch(text)) else ("", "", None)
        try:
            host = httpx.URL(f"https://{name}").raw_host.decode("ascii")
        except httpx.InvalidURL:
            host = ""
        if name if wild == "*" else not _is_host(host):
            raise LookalikeError(
                f"{text!r} is not a valid host to fetch photos from.",
                "Write cdn.example.com, *.example.com, cdn.example.com:8443, or * for every public host.",
            )
        return cls(f".{host}" if wild == "*." else host, int(port) if port else None)

    def matches(self, url: httpx.URL) -> bool:
        if self.port is None:
            if url.port is not None:  # httpx omits the default port of the scheme
                return False
        elif self.port != (url.port or _PORTS[url.scheme]):
            return False
        host = url.raw_host.decode("ascii")
        return not self.host or (host.endswith(self.host) if self.host.startswith(".") else host == self.host)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """The network of the connection pool: connects only to addresses that were checked."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception | None = None
        for address in await self._fetcher.checked_addresses(host):
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError as error:
                failure = error
        raise failure or httpcore.ConnectError(f"{host} has no address")


def _is_host(text: str) -> bool:
    """Whether this is a host name, or an IP address in its canonical form."""
    if HOST_NAME.fullmatch(text):
        return True
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # a zone names a network interface of this machine


def _bad_url(problem: str) -> FetchError:
    return FetchError(
        "bad_url", problem, "Give the complete address of a photo, such as https://cdn.example.com/1.jpg."
    )


def _not_an_image(problem: str) -> FetchError:
    return FetchError("not_an_image", problem, "Give the address of the photo itself, not of a page.")
