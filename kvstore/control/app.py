"""`build_app`, `build_controller_app`: the HTTP servers, as FastAPI applications.

GET  /healthz            200 as long as the process answers
GET  /readyz             200, or 503 with why not
GET  /metrics            for Prometheus (the admin's token, if there is one, unless `open_metrics`)
GET  /, /page/data       the page (kvstore.control.page); its data is the admin's
GET  /openapi.json       this API, described
/v1/…                    the control API (routes.py)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvstore import __version__
from kvstore.errors import (
    BackendError,
    ClosedError,
    ConfigError,
    KVStoreError,
    PermanentError,
    PoolExhausted,
    TransientError,
)
from kvstore.metrics import Metrics, error_class
from kvstore.telemetry import CONTENT_TYPE, exposition

from .access import Access, DeniedError
from .guard import Guard, error_body
from .instance import Instance, UnknownError
from .settings import ControlSettings

try:
    from fastapi import APIRouter, Depends, FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException
except ImportError as error:  # pragma: no cover - the tests have it
    raise ConfigError("the control API needs FastAPI: pip install 'kvstore[control]'", cause=error) from error

from .node import LateError, NodeService
from .routes import control_routes, operator, report_routes
from .service import Service

if TYPE_CHECKING:
    from kvstore.telemetry import Source

    from .controller import Controller

__all__ = ["build_app", "build_controller_app"]

_STATUS: tuple[tuple[type[KVStoreError], int], ...] = (
    (DeniedError, 401),
    (UnknownError, 404),
    (ConfigError, 400),
    (LateError, 504),
    (TransientError, 503),
    (PoolExhausted, 503),
    (ClosedError, 503),
    (PermanentError, 400),
    (BackendError, 503),
)
"""What an error means in HTTP; the first that fits."""


def build_app(
    instance: Instance, *, settings: ControlSettings, metrics: Metrics, sources: Sequence[Source] = (),
    page: APIRouter | None = None,
) -> FastAPI:  # fmt: skip
    """The HTTP server of a node.

    Args:
        instance: what is controlled.
        settings: who may do what.
        metrics: where requests are counted; shown at /metrics.
        sources: what is shown there besides.
        page: routes of "/" and "/page/…" (`kvstore.control.page`); None: there is no page.
    """
    service = NodeService(instance, threads=settings.threads)
    return _build(service, settings, metrics, sources, page, f"kvstore node {instance.info().name}")


def build_controller_app(
    controller: Controller, *, settings: ControlSettings, metrics: Metrics, sources: Sequence[Source] = (),
    page: APIRouter | None = None,
) -> FastAPI:  # fmt: skip
    """The HTTP server of a controller: as that of a node, and POST /v1/report. Args: as `build_app`."""
    app = _build(controller, settings, metrics, sources, page, "kvstore controller")
    app.include_router(report_routes)
    return app


def _build(
    service: Service, settings: ControlSettings, metrics: Metrics, sources: Sequence[Source],
    page: APIRouter | None, title: str,
) -> FastAPI:  # fmt: skip
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title=title, version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        summary="What a kvstore node or controller lets be seen and done.", separate_input_output_schemas=False,
    )  # fmt: skip
    app.state.service = service
    app.state.access = Access(settings)
    app.state.settings = settings
    app.state.exposition = lambda: exposition(metrics, *sources)
    app.add_exception_handler(KVStoreError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    app.include_router(control_routes)
    app.include_router(_probes)
    if page is not None:
        app.include_router(page, dependencies=[Depends(_page_data)], include_in_schema=False)
    return app


async def _page_data(request: Request) -> None:
    """The page itself holds nothing; what it asks for is the admin's."""
    path = request.scope["path"]  # not `request.url`: parts of that are the Host header's
    if path == "/page/data" or path.startswith("/page/data/"):
        who = request.app.state.access.recognise(request.headers.get("authorization"))
        await operator(request, who)


_probes = APIRouter(tags=["probes"])


@_probes.get("/healthz")
async def healthz() -> dict[str, bool]:
    """For liveness probes: the process answers."""
    return {"ok": True}


@_probes.get("/readyz", responses={503: {"description": "It takes nobody new; `problems` says why."}})
async def readyz(request: Request) -> Response:
    """For readiness probes: it takes new clients. Why not is for operators: it may name namespaces."""
    try:
        ready, problems = await request.app.state.service.readiness()
    except KVStoreError as error:
        ready, problems = False, [error.message]
    try:
        shown = request.app.state.access.recognise(request.headers.get("authorization")).operator
    except DeniedError:
        shown = False
    return JSONResponse({"ready": ready, "problems": list(problems) if shown else []}, 200 if ready else 503)


@_probes.get("/metrics", dependencies=[Depends(operator)], include_in_schema=False)
def metrics_text(request: Request) -> Response:
    """For Prometheus."""
    return Response(request.app.state.exposition(), media_type=CONTENT_TYPE)


async def _failed(_: Request, error: Exception) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {"retry-after": "1"} if status == 503 else {}
    kind = "DeniedError" if isinstance(error, DeniedError) else error_class(error)
    if isinstance(error, UnknownError):
        kind = "UnknownError"
    return JSONResponse(error_body(kind, str(error)), status, headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = []
    for each in error.errors()[:5]:
        where = ".".join(map(str, each["loc"]))
        parts.append(f"{where}: {each['msg']}")
    return JSONResponse(error_body("ConfigError", "; ".join(parts)), 422)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "UnknownError" if error.status_code == 404 else "ConfigError"
    return JSONResponse(error_body(kind, str(error.detail)), error.status_code, error.headers)
