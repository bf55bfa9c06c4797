"""Who may do what: the key of a request, its scope, and how often it may come."""

from math import ceil
from time import monotonic
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from service.auth.api_keys import Scope
from service.problems import FORBIDDEN, KEY_MISSING, KEY_WRONG, TOO_MANY, ProblemError
from service.state import ServiceState, StateDep

_bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer lk_...`")
_header = APIKeyHeader(name="X-API-Key", auto_error=False, description="or the same key as `X-API-Key`")


class Allowed:
    """A dependency of every route that needs a scope; without keys everybody has all of them."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def __call__(  # async, and so are its like: FastAPI would hand any other to a thread
        self,
        request: Request,
        state: StateDep,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None,
        header: Annotated[str | None, Security(_header)] = None,
    ) -> None:
        name = request.client.host if request.client else "unknown"
        if state.keys is not None:
            name = self._key_id(state, bearer.credentials if bearer else header, request)
        wait = state.rates.take(name, monotonic()) if state.keys is not None else 0.0
        if wait:
            state.telemetry.refused("rate")
            raise ProblemError(
                TOO_MANY, f"This key may send {state.settings.rate:g} requests a second.", retry_after=ceil(wait)
            )

    def _key_id(self, state: ServiceState, token: str | None, request: Request) -> str:
        assert state.keys is not None
        if not token:
            raise ProblemError(KEY_MISSING, KEY_MISSING.detail)
        key = state.keys.verify(token)
        if key is None:
            raise ProblemError(KEY_WRONG, KEY_WRONG.detail)
        request.state.key_id = key.id  # for the log, also when it may not do this
        if not key.allows(self._scope):
            raise ProblemError(FORBIDDEN, f"The key {key.name!r} lacks the scope {self._scope}.")
        return key.id


MaySearch = Depends(Allowed("search"))
MayWrite = Depends(Allowed("write"))
MayAdmin = Depends(Allowed("admin"))
