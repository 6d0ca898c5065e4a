"""The paths of the control API: one table for nodes and controllers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

from kvstore.errors import ConfigError

from .access import DeniedError, Principal
from .messages import (
    Acted,
    Address,
    Finished,
    InstanceHealth,
    Lookup,
    ReportReply,
    Route,
    Started,
    Worker,
)
from .node import LateError
from .requests import (
    All,
    CheckFinish,
    Chunks,
    Clear,
    Decompress,
    LookupRequest,
    Move,
    OfModel,
    OfPrefix,
    Pin,
    Prompt,
    Report,
    RouteRequest,
    TokensOf,
    ToTier,
    Transcode,
    Unpin,
)
from .service import Ask, Service, Target

__all__ = ["DEFAULT_SECONDS", "control_routes", "operator", "report_routes"]

DEFAULT_SECONDS = 5.0
"""A request's `timeout_s`, if it gives none."""
_INLINE_TOKENS = 8192  # more are hashed in a thread


class ErrorText(BaseModel):
    """What went wrong: name of the class in `kvstore.errors`, and a sentence."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorText


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "It makes no sense; the message names what."},
    401: {"model": ErrorBody, "description": "No token, or not one that may do this."},
    404: {"model": ErrorBody, "description": "No such instance, tier or event."},
    408: {"model": ErrorBody, "description": "The body did not come in time."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    422: {"model": ErrorBody, "description": "The body or a parameter is not as described."},
    503: {"model": ErrorBody, "description": "Not now: busy, or on the way down."},
    504: {"model": ErrorBody, "description": "Not done within `timeout_s`."},
}

_bearer = HTTPBearer(auto_error=False, description="The token of the namespace, or the admin's.")


async def sender(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> Principal:  # fmt: skip
    """Whoever it is. FastAPI reads the header for its document; `Access` reads it for us."""
    found: Principal = request.app.state.access.recognise(request.headers.get("authorization"))
    return found


Sender = Annotated[Principal, Depends(sender)]


async def principal(who: Sender) -> Principal:
    """Somebody who may see something."""
    if not who.known:
        raise DeniedError("this needs a token: 'Authorization: Bearer TOKEN'")
    return who


Who = Annotated[Principal, Depends(principal)]
Timeout = Annotated[
    float, Query(gt=0, le=600, description="Seconds within which the answer must be there; the server has a limit too.")
]
InstanceNames = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=128)]], Query(max_length=1024, description="All, if none.")
]


async def operator(request: Request, who: Sender) -> None:
    """For what shows all of a server: the page's data and the metrics."""
    settings = request.app.state.settings
    if not who.operator and not (request.scope["path"] == "/metrics" and settings.open_metrics):
        none = "" if settings.admin_token else ", and this server was started without one"
        raise DeniedError(f"this needs the admin token{none}")


def _ask(
    request: Request, who: Principal, timeout_s: float, namespace: str | None = None,
    instances: Sequence[str] | None = None,
) -> Ask:  # fmt: skip
    if namespace is not None:
        who.check(namespace)
    most: float = request.app.state.settings.max_seconds
    return Ask(who, namespace or "", instances, time.monotonic() + min(timeout_s, most))


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _prompt(request: Request, chunks: Chunks) -> Prompt:
    contexts = request.app.state.settings.contexts
    if isinstance(chunks, TokensOf) and len(chunks.tokens) > _INLINE_TOKENS:
        return await asyncio.to_thread(chunks.prompt, contexts)
    return chunks.prompt(contexts)


async def known_query(request: Request) -> None:
    """A parameter that does not exist is an error, as everywhere: it may be a misspelt one."""
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise ConfigError(
                f"unknown parameter {name[:80]!r} in the query; known here: {', '.join(sorted(known)) or 'none'}"
            )


control_routes = APIRouter(prefix="/v1", responses=ERRORS, tags=["control"], dependencies=[Depends(known_query)])
report_routes = APIRouter(prefix="/v1", responses=ERRORS, tags=["nodes"], dependencies=[Depends(known_query)])


@control_routes.post("/lookup")
async def lookup(request: Request, who: Who, body: LookupRequest, timeout_s: Timeout = DEFAULT_SECONDS) -> Lookup:
    """Who has how much of a prompt, and in which tiers. Only the leading chunks count."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    return await _service(request).lookup(ask, await _prompt(request, body.chunks))


@control_routes.post("/route")
async def route(request: Request, who: Who, body: RouteRequest, timeout_s: Timeout = DEFAULT_SECONDS) -> Route:
    """Where a prompt should go: the longest hit, weighed against what waits there."""
    candidates = None
    if body.candidates is not None:
        candidates = {candidate.instance: candidate.queued_tokens for candidate in body.candidates}
    ask = _ask(request, who, timeout_s, body.namespace)
    return await _service(request).route(ask, await _prompt(request, body.chunks), candidates)


@control_routes.get("/query_ip")
async def query_ip(
    request: Request, who: Who, instance: InstanceNames = [], timeout_s: Timeout = DEFAULT_SECONDS  # noqa: B006
) -> list[Address]:  # fmt: skip
    """Where instances are."""
    return list(await _service(request).addresses(_ask(request, who, timeout_s, None, instance or None)))


@control_routes.get("/workers")
async def workers(request: Request, who: Who, timeout_s: Timeout = DEFAULT_SECONDS) -> list[Worker]:
    """All instances, with what of their tiers the caller may see."""
    return list(await _service(request).workers(_ask(request, who, timeout_s)))


@control_routes.get("/health")
async def health(request: Request, who: Who, timeout_s: Timeout = DEFAULT_SECONDS) -> list[InstanceHealth]:
    """How all instances are."""
    return list(await _service(request).health(_ask(request, who, timeout_s)))


@control_routes.post("/pin")
async def pin(request: Request, who: Who, body: Pin, timeout_s: Timeout = DEFAULT_SECONDS) -> Acted:
    """Keep records where they are for `ttl_s` seconds."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    return await _service(request).pin(ask, (await _prompt(request, body.chunks)).keys, body.ttl_s)


@control_routes.post("/unpin")
async def unpin(request: Request, who: Who, body: Unpin, timeout_s: Timeout = DEFAULT_SECONDS) -> Acted:
    """Let pinned records go as others do."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    return await _service(request).unpin(ask, (await _prompt(request, body.chunks)).keys)


@control_routes.post("/clear")
async def clear(request: Request, who: Who, body: Clear, timeout_s: Timeout = DEFAULT_SECONDS) -> Started:
    """Remove records: all of a namespace, those of a model, those under a prefix, or single ones."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    what = body.what
    if isinstance(what, All):
        target = Target()
    elif isinstance(what, OfModel):
        target = Target(model=what.model)
    elif isinstance(what, OfPrefix):
        target = Target(prefix=(await _prompt(request, what.prefix)).keys)
    else:
        target = Target(keys=(await _prompt(request, what.chunks)).keys)
    return await _service(request).clear(ask, target)


@control_routes.post("/move")
async def move(request: Request, who: Who, body: Move, timeout_s: Timeout = DEFAULT_SECONDS) -> Started:
    """Move records to another tier, or to another instance (admin)."""
    instances = None if body.src.instance is None else [body.src.instance]
    ask = _ask(request, who, timeout_s, body.namespace, instances)
    to_tier, to_instance = (body.dst.tier, "") if isinstance(body.dst, ToTier) else ("", body.dst.instance)
    if to_instance:
        who.require_admin("moving records to another instance")
    keys = (await _prompt(request, body.chunks)).keys
    return await _service(request).move(ask, keys, src=body.src.tier, to_tier=to_tier, to_instance=to_instance)


@control_routes.post("/compress")
async def compress(request: Request, who: Who, body: Transcode, timeout_s: Timeout = DEFAULT_SECONDS) -> Started:
    """Encode stored records anew with a codec that loses nothing."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    keys = (await _prompt(request, body.chunks)).keys
    return await _service(request).transcode(ask, keys, codec=body.codec, level=body.level)


@control_routes.post("/decompress")
async def decompress(request: Request, who: Who, body: Decompress, timeout_s: Timeout = DEFAULT_SECONDS) -> Started:
    """Store records raw again."""
    ask = _ask(request, who, timeout_s, body.namespace, body.instances)
    keys = (await _prompt(request, body.chunks)).keys
    return await _service(request).transcode(ask, keys, codec="raw", level=None)


@control_routes.post("/check_finish")
async def check_finish(
    request: Request, who: Who, body: CheckFinish, timeout_s: Timeout = DEFAULT_SECONDS
) -> Finished:  # fmt: skip
    """How something that was started goes on."""
    return await _service(request).check_finish(_ask(request, who, timeout_s), body.event)


@report_routes.post("/report")
async def report(
    request: Request, who: Sender, body: Report, timeout_s: Timeout = DEFAULT_SECONDS
) -> ReportReply:  # fmt: skip
    """What came and went at a node. For nodes, with the controller's report token."""
    if not who.reporter:
        raise DeniedError("reports need the report token of the controller, or the admin's")
    try:
        async with asyncio.timeout(min(timeout_s, request.app.state.settings.max_seconds)):
            return await _service(request).report(body)
    except TimeoutError:  # what was taken in of it will be told again, and does no harm twice
        raise LateError("the deadline of the report has passed", operation="report") from None
