"""Authorises requests: the API key, its scope, and its rate limit."""

from math import ceil
from time import monotonic
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from service.auth.api_keys import KeyFileUnreadable, Scope
from service.problems import FORBIDDEN, KEY_INVALID, KEY_MISSING, KEYS_UNREADABLE, TOO_MANY_REQUESTS, ProblemError
from service.state import ServiceState, StateDep

_bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer lk_...`")
_header = APIKeyHeader(name="X-API-Key", auto_error=False, description="or the same key as `X-API-Key`")


class RequireScope:
    """A dependency of every route that needs a scope; without a key file every request is allowed."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def __call__(  # async, because FastAPI would run a plain function in a thread
        self,
        request: Request,
        state: StateDep,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None,
        header: Annotated[str | None, Security(_header)] = None,
    ) -> None:
        if state.keys is None:
            return
        key_id = self._check_key(state, bearer.credentials if bearer else header, request)
        wait = state.rates.take(key_id, monotonic())
        if wait:
            state.telemetry.refused("rate")
            raise ProblemError(
                TOO_MANY_REQUESTS,
                f"The limit of this key is {state.settings.rate:g} requests per second.",
                retry_after=ceil(wait),
            )

    def _check_key(self, state: ServiceState, token: str | None, request: Request) -> str:
        """Returns the id of a key that has the scope."""
        assert state.keys is not None
        if not token:
            raise ProblemError(KEY_MISSING)
        try:
            key = state.keys.verify(token)
        except KeyFileUnreadable:  # whose message names a path, and this request may be anybody's
            raise ProblemError(KEYS_UNREADABLE) from None
        if key is None:
            raise ProblemError(KEY_INVALID)
        request.state.key_id = key.id  # for the log, even when the scope is missing
        if not key.allows(self._scope):
            raise ProblemError(FORBIDDEN, f"The key {key.name!r} lacks the scope {self._scope}.")
        request.state.key_scope = key.scope
        return key.id


MaySearch = Depends(RequireScope("search"))
MayWrite = Depends(RequireScope("write"))
MayAdmin = Depends(RequireScope("admin"))
