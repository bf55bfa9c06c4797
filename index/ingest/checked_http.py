"""An HTTP client for the photos of a source, whose rows may only lead to allowed addresses (SSRF).

Every connection is checked by the address that it really goes to, so that neither a redirect nor a second resolution of
a name leads elsewhere. Behind a proxy of the operator, the proxy connects: then only what a name resolves to on this
machine can be checked, and the proxy must refuse internal addresses itself.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import aiohttp

from index._util.addresses import AllowedAddresses, ForbiddenAddress

_Handler = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]
# Connections are opened in the context of the request that needs them, and are reused for its host only.
_is_trusted: ContextVar[bool] = ContextVar("is_trusted", default=False)


class CheckedHTTP:
    """Makes sessions that connect to allowed addresses only."""

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed = allowed

    async def session(self, **options: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(socket_factory=self._socket)
        return aiohttp.ClientSession(connector=connector, middlewares=[self._check], **options)

    async def _check(self, request: aiohttp.ClientRequest, handler: _Handler) -> aiohttp.ClientResponse:
        """Runs for a request and again for each of its redirects."""
        host = request.url.raw_host or ""
        allowed = self._allowed.allows_host(host)
        if request.proxy and not allowed:
            await self._check_proxied(host)
        token = _is_trusted.set(allowed or bool(request.proxy))
        try:
            return await handler(request)
        finally:
            _is_trusted.reset(token)

    async def _check_proxied(self, host: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return  # only the proxy can resolve it
        if not all(self._allowed.allows(str(address[0])) for *_, address in found):
            raise ForbiddenAddress

    def _socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not (_is_trusted.get() or self._allowed.allows(address[0])):
            raise ForbiddenAddress
        return socket.socket(family, kind, protocol)
