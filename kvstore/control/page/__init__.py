"""The page of a daemon, at `/`: tiers, the last hour, slow operations, errors, breakers, nodes. No build step, no CDN.

    app = build_app(instance, settings=…, metrics=metrics, page=routes(instance, metrics, history))

`/` and what it loads below `/page/` say nothing of the daemon and are open to whoever reaches it. `/page/data` shows
all of it; the app lets only the admin have it (`kvstore.control.app`): without his token it is 401, and the page asks
for it. The page may load from this server and ask it, nobody else, and nobody may frame it (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING

from kvstore.control.access import Principal
from kvstore.control.instance import Instance
from kvstore.control.messages import Worker
from kvstore.control.service import Ask, Service
from kvstore.telemetry import History, Source

from .data import PageData

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ["PageData", "routes"]

_SCRIPT = "text/javascript; charset=utf-8"
_FILES = {"page.css": "text/css; charset=utf-8", "page.js": _SCRIPT, "draw.js": _SCRIPT}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_READER = Principal("", (), admin=True, operator=True, reporter=False)  # the app has asked for the admin's token
_WORKERS_S = 2.0
_TICK_S = 15.0
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a new version of the daemon has a new page
}


def routes(
    instance: Instance | None,
    metrics: Source,
    history: History,
    *,
    service: Service | None = None,
) -> APIRouter:
    """The routes of the page.

    Args:
        instance, metrics, history: see `PageData`.
        service: knows the other instances (a controller); None: nobody here does.
    """
    from fastapi import APIRouter
    from fastapi.responses import Response

    data = PageData(instance, metrics, history)

    async def ticking() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            await asyncio.to_thread(data.tick)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        """Remembers numbers while the app runs, so that the first who looks sees the last hour."""
        task = asyncio.create_task(ticking())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    router = APIRouter(include_in_schema=False, lifespan=lifespan)
    page = resources.files(__name__).joinpath("page.html").read_bytes()

    @router.get("/")
    async def index() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    def serve(name: str, kind: str) -> None:
        text = resources.files(__name__).joinpath(name).read_bytes()

        @router.get(f"/page/{name}")
        async def asset() -> Response:
            return Response(text, media_type=kind, headers=_HEADERS)

    for name, kind in _FILES.items():
        serve(name, kind)

    @router.get("/page/data")
    async def look() -> Response:
        workers: Sequence[Worker] = ()
        if service is not None:
            workers = await service.workers(Ask(_READER, "", None, time.monotonic() + _WORKERS_S))
        # In a thread: an instance's calls may wait for a lock.
        text = await asyncio.to_thread(lambda: json.dumps(data(workers), allow_nan=False, separators=(",", ":")))
        return Response(text, media_type="application/json", headers=_HEADERS)

    return router
