"""What stands before every request: its size, the time it may take to come, its id, and a count of how it ended."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from kvstore.metrics import SECOND_BUCKETS, Metric, Metrics
from kvstore.telemetry import request_scope

from .access import Access, DeniedError
from .settings import ControlSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CONTROL_METRICS", "Guard", "error_body"]

logger = logging.getLogger("kvstore.control")

CONTROL_METRICS: tuple[Metric, ...] = (
    Metric("kvstore_control_requests_total", "counter", "Requests to the control API, by route and class of status.",
           ("route", "status")),
    Metric("kvstore_control_request_seconds", "histogram", "Seconds per request, from its headers to its answer.",
           ("route",), SECOND_BUCKETS),
)  # fmt: skip
"""What every server of ours counts; of routes that do not exist the label is "none"."""

_LINGER_S = 1.0
_MOST_HELD = 64 << 20  # bytes of long bodies that are on their way, of all requests
_SHORT = 64 << 10  # a body up to here is never turned away: long ones cannot keep it out
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class _TooLargeError(Exception):
    pass


class _TooSlowError(Exception):
    pass


class _TooMuchError(Exception):
    pass


def error_body(kind: str, message: str) -> dict[str, dict[str, str]]:
    """The JSON of every error."""
    return {"error": {"type": kind, "message": message}}


class Guard:
    """ASGI middleware.

    * A body longer than `max_body` is refused with 413, before or while it comes; one that is not there after
      `max_seconds` with 408; one of whom no token of ours is known with 401, before anything of it is kept.
    * A body must say that it is JSON: what a web page may send without asking first is none.
    * On loopback, if anything is open there, the name in the Host header must be an address or localhost: a page on
      the internet cannot make a browser speak to the server by a name of its own (DNS rebinding).
    * Each request has an id, its own (X-Request-Id) or a new one, which log lines and the answer bear.
    """

    def __init__(self, app: ASGIApp, settings: ControlSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._held = 0
        self._access = Access(settings)
        self._by_address = settings.loopback and settings.any_open
        for metric in CONTROL_METRICS:
            metrics.define(metric)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        status = 500
        started = False

        async def answer(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                started = True
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        with request_scope(request_id):
            try:
                refusal = self._refusal(headers)
                if refusal is not None:
                    await _refuse(answer, receive, *refusal)
                else:
                    body = await self._body(receive)
                    await self._app(scope, _replayed(body, receive), answer)
            except (_TooLargeError, _TooSlowError, _TooMuchError) as error:
                if not started:
                    await _refuse(answer, receive, *self._too(error))
            except asyncio.CancelledError:  # its time at shutdown is over
                if started:
                    raise
                await _refuse(answer, receive, 503, "ClosedError", "the server is shutting down", linger=False)
            except Exception:
                logger.exception("%s %s failed", scope["method"], _route(scope))
                if started:
                    raise
                await _refuse(
                    answer, receive, 500, "InternalError", f"this should not happen; request {request_id} in the log"
                )
            finally:
                route = _route(scope)
                self._metrics.update(
                    (
                        ("kvstore_control_requests_total", (route, f"{status // 100}xx"), 1),
                        ("kvstore_control_request_seconds", (route,), time.perf_counter() - began),
                    )
                )

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._settings.max_body:
            return self._too(_TooLargeError())
        host = headers.get(b"host")  # browsers always send one; probes by HTTP/1.0 do not
        if self._by_address and host is not None and not _is_address(host.decode("latin-1")):
            text = "what needs no token is answered under this server's address only, not under a name: use 127.0.0.1"
            return 421, "DeniedError", text
        if length.lstrip(b"0") or b"transfer-encoding" in headers:
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                return 422, "ConfigError", "a body is JSON here, and says so: 'Content-Type: application/json'"
            try:
                given = headers.get(b"authorization")
                who = self._access.recognise(None if given is None else given.decode("latin-1"))
            except DeniedError as error:
                return 401, "DeniedError", error.message
            if not (who.known or who.reporter):
                return 401, "DeniedError", "this needs a token: 'Authorization: Bearer TOKEN'"
        return None

    def _too(self, error: Exception) -> tuple[int, str, str]:
        if isinstance(error, _TooLargeError):
            return 413, "ConfigError", f"the body is longer than {self._settings.max_body} bytes"
        if isinstance(error, _TooMuchError):
            return 503, "TransientError", "too many long requests are on their way; try again"
        return 408, "TransientError", f"the body has not come within {self._settings.max_seconds:g} s"

    async def _body(self, receive: Receive) -> bytes:
        """The whole body; what all requests together have waiting is bounded as well."""
        parts: list[bytes] = []
        size = held = 0
        try:
            async with asyncio.timeout(self._settings.max_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":  # he is gone
                        return b""
                    part = message.get("body", b"")
                    size += len(part)
                    parts.append(part)
                    if size > self._settings.max_body:
                        raise _TooLargeError
                    if size > _SHORT:
                        self._held += size - held
                        held = size
                        if self._held > _MOST_HELD:
                            raise _TooMuchError
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _TooSlowError from None
        finally:
            self._held -= held


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive`, with the body as one message."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _route(scope: Any) -> str:
    """Template of the route that was taken, for labels: a closed set."""
    route = scope.get("route")
    return getattr(route, "path", None) or "none"


def _is_address(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():  # no port, or an IPv6 address in brackets
        name = host
    name = name.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(
    send: Send, receive: Receive, status: int, kind: str, message: str, *, linger: bool = True
) -> None:  # fmt: skip
    """Answer; and if the body is still coming, read on for a moment: a connection that is closed with something unread
    is reset, and then the client may lose the answer."""
    from starlette.responses import JSONResponse

    closes = status in (401, 408, 413, 422, 503)
    unread = closes and linger
    headers = {"connection": "close"} if closes else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    response = JSONResponse(error_body(kind, message), status, headers)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": unread})
    if not unread:
        return
    try:
        async with asyncio.timeout(_LINGER_S):
            while True:
                part = await receive()
                if part["type"] != "http.request" or not part.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
