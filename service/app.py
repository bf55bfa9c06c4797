"""The factory: settings in, a complete web application out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from service import problems
from service.middleware import BodyLimit, RequestContext
from service.observability.metrics import Telemetry
from service.observability.tracing import Tracing
from service.routes import items, jobs, media, search, status
from service.schemas.items import GivenImage
from service.server.shutdown import draining
from service.settings import Settings
from service.state import ServiceState, open_state

WEB = Path(str(files("service").joinpath("web")))

_MOST_HELD = 512 * 1024 * 1024
"""Bytes of the bodies that all processes hold at once."""


class _State(TypedDict):
    service: ServiceState


class _Application(FastAPI):
    """FastAPI whose description also holds the schemas that errors and bodies refer to without its knowing."""

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        for shape in (problems.Problem, GivenImage):
            description["components"]["schemas"][shape.__name__] = shape.model_json_schema()
        return description


def create_app(settings: Settings) -> FastAPI:
    """The service over the bundle and the gallery of `settings`, which it opens when it starts.

    Starting fails with a LookalikeError when either cannot be opened or the two do not belong together.
    """

    telemetry = Telemetry(Tracing.from_environment())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[_State]:
        async with open_state(settings, telemetry) as state:
            with draining(state):
                yield {"service": state}
        telemetry.tracing.close()

    # The interactive description pages load scripts from elsewhere; /openapi.json says the same.
    app = _Application(
        title="Lookalike",
        summary="Find products by a photo.",
        version=_version(),
        lifespan=lifespan,
        telemetry=telemetry.tracing.for_fastapi(),
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_held=max(_MOST_HELD // settings.workers, 2 * settings.max_body_bytes),
        telemetry=telemetry,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", "Content-Type", "If-Match", "If-None-Match", "X-API-Key"],
            expose_headers=["ETag", "Location", "Retry-After", "X-Request-Id"],
        )
    app.add_middleware(RequestContext, telemetry=telemetry)
    for routes in (search, items, jobs, status, media):
        app.include_router(routes.router)
    app.mount("/web", StaticFiles(directory=WEB), name="web")
    app.add_api_route("/", _page, include_in_schema=False)
    return app


async def _page() -> FileResponse:
    return FileResponse(WEB / "index.html")


def _version() -> str:
    try:
        return version("lookalike")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
