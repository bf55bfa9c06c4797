"""Builds the web application from settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from service.admission import Admission
from service.middleware import CONTENT_POLICY, AnswerLimit, BodyLimit, RequestContext, StartErrors
from service.observability.metrics import Telemetry
from service.observability.tracing import Tracing
from service.openapi import DescribedApp
from service.problems import install_handlers
from service.routes import items, jobs, media, rankings, search, status
from service.server.shutdown import draining
from service.settings import Settings
from service.state import ServiceState, open_state

WEB = Path(str(files("service").joinpath("web")))


class _LifespanState(TypedDict):
    service: ServiceState


def create_app(settings: Settings) -> FastAPI:
    """Returns the application, which opens the gallery and the bundle of `settings` when it starts.

    Starting fails with a LookalikeError when either cannot be opened or the two do not belong together.
    """

    telemetry = Telemetry(Tracing.from_environment())
    admission = Admission(settings, telemetry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[_LifespanState]:
        app.openapi()  # made and kept now: requests are checked against it
        async with open_state(settings, telemetry, admission) as state:
            state.active_model.log_model()
            with draining(state):
                yield {"service": state}
        telemetry.tracing.close()

    # FastAPI's own documentation pages load scripts from other hosts and have inline ones.
    app = DescribedApp(
        title="Lookalike",
        summary="Find products by a photo.",
        version=_version(),
        lifespan=lifespan,
        telemetry=telemetry.tracing.for_fastapi(),
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    install_handlers(app)
    app.add_middleware(BodyLimit, settings=settings, admission=admission)
    app.add_middleware(AnswerLimit, admission=admission)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", "Content-Type", "If-Match", "If-None-Match", "X-API-Key"],
            expose_headers=["ETag", "Location", "Retry-After", "X-Request-Id"],
        )
    app.add_middleware(RequestContext, telemetry=telemetry)
    app.add_middleware(StartErrors)
    for routes in (search, items, rankings, jobs, status, media):
        app.include_router(routes.router)
    app.mount("/web/swagger", StaticFiles(packages=[("fastapi_offline", "static")]), name="swagger")
    app.mount("/web", StaticFiles(directory=WEB), name="web")
    app.add_api_route("/", _web_page, include_in_schema=False)
    app.add_api_route("/docs", _docs_page, include_in_schema=False)
    app.add_api_route("/redoc", _reference_page, include_in_schema=False)
    return app


async def _web_page() -> FileResponse:
    return FileResponse(WEB / "index.html")


async def _docs_page() -> FileResponse:
    return FileResponse(WEB / "docs.html")


async def _reference_page() -> FileResponse:
    # ReDoc fills an empty style element by script and adds one fixed style sheet: their two digests, no other style.
    digests = (
        "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-QMIg+bpjm3JdElJ388KYke01izlUW0UoNOeKjpMxdgc='"
    )
    policy = CONTENT_POLICY.replace("style-src 'self'", f"style-src 'self' {digests}")
    return FileResponse(WEB / "redoc.html", headers={"Content-Security-Policy": policy})


def _version() -> str:
    try:
        return version("lookalike")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
