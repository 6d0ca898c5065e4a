"""A proxy in front of OpenAI-compatible servers that sends each prompt where its KV cache is.

    pip install -c constraints.txt '.[control]'        # in this project's checkout
    python examples/router.py --listen 127.0.0.1:8000 --controller http://127.0.0.1:9090 --context context.yaml \\
        --engine n0=http://10.0.0.1:8000 --engine n1=http://10.0.0.2:8000

An engine is named as the kvstore node that it stores in (`kvstore serve --name`). The prompt is tokenised by an engine
(POST /tokenize, as vLLM has it), the controller says where most of it lies, weighed against the tokens that wait to be
prefilled at each engine, which the proxy counts: from the moment it sends a prompt to the first byte of the answer.
Answers are passed on as they come. Nothing here is needed for a request to be served: without tokenizer or controller
it goes to the engine with the least to do, and an engine that cannot be reached is passed over for a while. A request
is sent a second time only if nothing of it can have arrived: a completion is made once, or not at all (502).

The answer's headers say what was decided: X-KVStore-Instance, X-KVStore-Hit-Tokens. Each request that an engine told
the tokens of (of streams with stream_options.include_usage) is counted at /metrics, and with --event-log it is a line
`token_usage` (docs/metrics.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from kvstore.control import Client, ControlSettings
from kvstore.control.messages import Route
from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.keys import DEFAULT_CHUNK_SIZE, KeyContext, chunk_keys
from kvstore.metrics import Metrics
from kvstore.telemetry import CONTENT_TYPE, RequestReport, exposition, report_request
from kvstore.telemetry.logs import attach_event_log
from kvstore_cli.ctl import context_of

logger = logging.getLogger("router")

PROMPTS = ("/v1/completions", "/v1/chat/completions")
MOST_BODY = 32 << 20
DECIDE_S = 0.5
MOST_TAIL = 4096
USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
AWAY_S = 5.0  # an engine that could not be reached gets nothing for so long
NEVER = 50  # prompts without a single hit, and then it is said once what that may mean
BLIND_S = 2.0  # and a controller or tokenizer that did not answer in time is not asked for so long
TOKENIZED = (
    "model", "prompt", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs",
)  # fmt: skip
"""Fields of a completion that decide its tokens; POST /tokenize has them, too."""
ID = re.compile(r"[\x21-\x7e]{1,128}")
OURS = {"x-request-id", "x-kvstore-instance", "x-kvstore-hit-tokens"}
# Of one connection, not of the message (RFC 9110, 7.6.1); httpx and uvicorn set their own.
HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host", "content-length", "expect",
}  # fmt: skip


@dataclass(slots=True)
class Engine:
    """An OpenAI-compatible server.

    Attributes:
        name: of the kvstore node that it stores in.
        url: without a path.
        waiting: tokens sent to it that it has not prefilled yet.
        away_until: it could not be reached; seconds of `time.monotonic()`.
    """

    name: str
    url: str
    waiting: float = 0.0
    away_until: float = 0.0

    @property
    def here(self) -> bool:
        return time.monotonic() >= self.away_until


@dataclass(frozen=True, slots=True)
class Decision:
    """Engines in the order in which they are tried, what the first one has of the prompt, and what the prompt costs."""

    engines: Sequence[Engine]
    hit_tokens: int
    tokens: int


class Router:
    """Decides, and passes on.

    Args:
        control: of a controller.
        context: what besides the tokens decides the keys.
        namespace: of the nodes.
        chunk_size: tokens of a chunk.
        decide_s: for tokenizer and controller together; then the prompt goes to whoever has the least to do.
    """

    def __init__(
        self, engines: Sequence[Engine], control: Client, context: KeyContext, *, namespace: str = "",
        chunk_size: int = DEFAULT_CHUNK_SIZE, decide_s: float = DECIDE_S,
    ) -> None:  # fmt: skip
        self._decide_s = decide_s
        self.engines = engines
        self._control = control
        self._context = context
        self._namespace = namespace
        self._chunk_size = chunk_size
        self._blind_until = 0.0
        self._strangers: set[str] = set()  # engines that do not report, of which it has been said
        self._missed = 0  # prompts routed until the first hit; -1: there was one, or it has been said
        self.metrics = Metrics()
        # Answers may take minutes; that an engine is not there shows at once. Idle connections are let go before an
        # engine does so (5 s): what is sent just then is lost, and may not be sent again.
        timeout = httpx.Timeout(None, connect=2.0, pool=10.0)
        limits = httpx.Limits(max_connections=2048, keepalive_expiry=2.0)
        self.http = httpx.AsyncClient(timeout=timeout, limits=limits)

    def by_load(self) -> list[Engine]:
        """Those that can be reached first, then those with the least to do."""
        return sorted(self.engines, key=lambda engine: (not engine.here, engine.waiting, engine.name))

    async def decide(self, path: str, body: Mapping[str, Any], authorization: str | None) -> Decision:
        """Where a prompt goes."""
        engines = self.by_load()
        tokens = 0
        if time.monotonic() < self._blind_until:
            return Decision(engines, 0, tokens)
        try:
            async with asyncio.timeout(self._decide_s):
                ids = await self._tokens(engines[0], path, body, authorization)
                tokens = len(ids)
                here = {engine.name: engine for engine in engines if engine.here}
                keys = chunk_keys(ids, context=self._context, chunk_size=self._chunk_size)
                if not keys or len(here) < 2:
                    return Decision(engines, 0, tokens)
                waiting: dict[str, float | None] = {name: engine.waiting for name, engine in here.items()}
                route = await asyncio.to_thread(
                    self._control.route, keys=keys, candidates=waiting, namespace=self._namespace,
                    chunk_size=self._chunk_size, timeout=self._decide_s,
                )  # fmt: skip
        except (KVStoreError, httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, TimeoutError | TransientError):
                self._blind_until = time.monotonic() + BLIND_S
            logger.warning("routed by load alone: %s: %s", type(error).__name__, error)
            return Decision(engines, 0, tokens)
        self._look(route)
        ranked = [here[score.instance] for score in route.scores]
        return Decision([*ranked, *(engine for engine in engines if engine not in ranked)], route.hit_tokens, tokens)

    def _look(self, route: Route) -> None:
        """Say, once, what looks like a mistake of whoever set this up."""
        strangers = {score.instance for score in route.scores if not score.reports} - self._strangers
        if strangers:
            self._strangers |= strangers
            logger.warning(
                "no node of the name %s reports to %s: name an engine as its node (kvstore serve --name)",
                ", ".join(sorted(strangers)), self._control.url,
            )  # fmt: skip
        if self._missed < 0:
            return
        self._missed = -1 if route.hit_tokens else self._missed + 1
        if self._missed == NEVER:
            self._missed = -1
            logger.warning(
                "none of the first %d prompts had a hit: does the context name the engines' revision and shard, and "
                "--chunk-size theirs? `kvstore ctl context URL KEY` reads a context from a record", NEVER,
            )  # fmt: skip

    async def _tokens(
        self, engine: Engine, path: str, body: Mapping[str, Any], authorization: str | None
    ) -> list[int]:  # fmt: skip
        """Token ids of the prompt of a request. Raises for what is no text: the engine will say what is wrong."""
        prompt = body.get("prompt")
        if path == PROMPTS[0] and isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked = {name: body[name] for name in TOKENIZED if name in body}
        headers = {} if authorization is None else {"authorization": authorization}
        answer = await self.http.post(f"{engine.url}/tokenize", json=asked, headers=headers)
        answer.raise_for_status()
        found: list[int] = answer.json()["tokens"]
        return found

    async def prompt(self, request: Request) -> Response:
        """A completion: decided, sent, and passed on as it comes."""
        began = time.monotonic()
        data = await _body(request)
        if data is None:
            return _error(413, f"the body is longer than {MOST_BODY} bytes")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        decision = await self.decide(request.url.path, body, request.headers.get("authorization"))
        cost = max(1.0, decision.tokens - decision.hit_tokens)
        telling = _Telling(began, body.get("model"), self.metrics)
        return await self._send(request, data, decision.engines, decision.hit_tokens, cost, telling)

    async def other(self, request: Request) -> Response:
        """Everything else: any engine will do."""
        data = await _body(request)
        if data is None:
            return _error(413, f"the body is longer than {MOST_BODY} bytes")
        return await self._send(request, data, self.by_load(), 0, 0.0, None)

    async def _send(
        self, request: Request, data: bytes, engines: Sequence[Engine], hit_tokens: int, cost: float,
        telling: _Telling | None,
    ) -> Response:  # fmt: skip
        given = request.headers.get("x-request-id", "")
        request_id = given if ID.fullmatch(given) else secrets.token_hex(16)
        headers = [*_end_to_end(request.headers.items()), ("x-request-id", request_id)]
        if "accept-encoding" not in request.headers:
            headers.append(("accept-encoding", "identity"))  # else httpx asks for what this client may not understand
        path = request.scope["raw_path"].decode("latin-1")  # as it was written: %2F is no slash
        query = request.scope["query_string"].decode("latin-1")
        for place, engine in enumerate(engines):
            sent = self.http.build_request(
                request.method, f"{engine.url}{path}{'?' if query else ''}{query}", headers=headers, content=data
            )
            engine.waiting += cost
            try:
                answer = await _unless_gone(request, self.http.send(sent, stream=True))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # nothing has been sent yet
                engine.waiting -= cost
                engine.away_until = time.monotonic() + AWAY_S
                logger.warning("engine %s at %s cannot be reached: %s", engine.name, engine.url, error)
                continue
            except httpx.HTTPError as error:
                engine.waiting -= cost
                return _error(502, f"engine {engine.name} broke off: {type(error).__name__}")
            except BaseException:
                engine.waiting -= cost
                raise
            kept = [*_end_to_end(answer.headers.multi_items()), ("x-request-id", request_id)]
            kept.append(("x-kvstore-instance", engine.name))
            kept.append(("x-kvstore-hit-tokens", str(hit_tokens if place == 0 else 0)))
            if telling is not None:
                telling.request_id = request_id
            return _Passed(engine, answer, cost, kept, telling)
        return _error(503, "no engine can be reached")

    async def close(self) -> None:
        await self.http.aclose()
        self._control.close()


class _BrokenOffError(Exception):
    """An engine ended in the middle of its answer."""


class _Passed(StreamingResponse):
    """An answer on its way, piece by piece as it was encoded. The prompt counts as waiting until its first byte; a
    client that goes away ends the engine's work; and an answer that breaks off breaks off here, too."""

    def __init__(
        self, engine: Engine, answer: httpx.Response, cost: float, headers: Sequence[tuple[str, str]],
        telling: _Telling | None,
    ) -> None:  # fmt: skip
        super().__init__(self._pieces(), answer.status_code)
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._telling = telling
        self._engine = engine
        self._answer = answer
        self._cost = cost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except _BrokenOffError as error:
            # Without its end, so that nobody takes what there is for all of it: the server hangs up then.
            logger.warning("engine %s broke off in the middle of an answer: %s", self._engine.name, error)
        except ClientDisconnect:
            pass
        finally:
            self._prefilled()
            await self._answer.aclose()

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._answer.aiter_raw():
                self._prefilled()
                if self._telling is not None:
                    self._telling.piece(piece)
                yield piece
        except httpx.HTTPError as error:
            raise _BrokenOffError(f"{type(error).__name__} {error}") from error
        if self._telling is not None and self._answer.status_code == 200:
            self._telling.ended(self._answer.headers.get("content-type", ""))

    def _prefilled(self) -> None:
        self._engine.waiting -= self._cost
        self._cost = 0.0


class _Telling:
    """What is known of a request in the end: when a stream's first token came; what the engine says of tokens."""

    def __init__(self, began: float, model: Any, metrics: Metrics) -> None:
        self.request_id = ""
        self._model = model[:256] if isinstance(model, str) else ""
        self._metrics = metrics
        self._began = began
        self._first = self._last = 0.0
        self._tail = b""  # the usage is at the end

    def piece(self, piece: bytes) -> None:
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._tail = (self._tail + piece)[-MOST_TAIL:]

    def ended(self, kind: str) -> None:
        found = USAGE.findall(self._tail)
        if not found:
            return
        try:
            usage, stream = json.loads(found[-1]), kind.startswith("text/event-stream")
            given, made = int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            report_request(
                RequestReport(
                    self.request_id, self._model, given, made, None if cached is None else int(cached),
                    ttft_s=self._first - self._began if stream else None,
                    itl_s=(self._last - self._first) / (made - 1) if stream and made > 1 else None,
                ),
                metrics=self._metrics,
            )  # fmt: skip
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("an engine's usage makes no sense: %s: %s", type(error).__name__, error)


def _end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers of the message: without those of the connection and those that it names, and without our own."""
    given = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in given if name == "connection" for word in value.split(",")}
    return [(name, value) for name, value in given if name not in HOP_BY_HOP | OURS | named]


async def _unless_gone(request: Request, answering: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The answer's beginning. Raises `ClientDisconnect`: nobody waits for it any more; the end of its connection tells
    the engine."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.create_task(answering), asyncio.create_task(gone())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        for task in (answer, leaving):
            task.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


async def _body(request: Request) -> bytes | None:
    """The body; None: it is too long."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _error(status: int, message: str) -> Response:
    """As OpenAI's API says it."""
    return JSONResponse({"error": {"message": message, "type": "router_error", "code": status}}, status)


def build(router: Router) -> Starlette:
    """The proxy."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await router.close()

    async def healthz(_: Request) -> Response:
        engines = [{"name": engine.name, "here": engine.here, "waiting": engine.waiting} for engine in router.engines]
        return JSONResponse({"engines": engines}, 200 if any(engine["here"] for engine in engines) else 503)

    async def numbers(_: Request) -> Response:
        return Response(exposition(router.metrics), media_type=CONTENT_TYPE)

    async def gone(_: Request, __: Exception) -> Response:
        return _error(499, "the client has gone")

    return Starlette(
        routes=[
            Path("/healthz", healthz),
            Path("/metrics", numbers),
            *(Path(path, router.prompt, methods=["POST"]) for path in PROMPTS),
            Path("/{path:path}", router.other, methods=["GET", "POST", "DELETE"]),
        ],
        exception_handlers={ClientDisconnect: gone},
        lifespan=lifespan,
    )


class Server(uvicorn.Server):
    """Says in one line where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(
                f"router: listening on http://{f'[{host}]' if ':' in host else host}:{port}",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--controller", required=True, metavar="URL")
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=URL", help="repeat")
    parser.add_argument("--context", required=True, metavar="FILE", help="YAML with the fields of KeyContext")
    parser.add_argument("--namespace", default="", metavar="NAME", help="of the nodes")
    parser.add_argument("--chunk-size", type=int, default=DEFAULT_CHUNK_SIZE, metavar="TOKENS")
    parser.add_argument("--decide-timeout", type=float, default=DECIDE_S, metavar="SECONDS",
                        help="for tokenizer and controller; then by load alone")  # fmt: skip
    parser.add_argument("--ca", default="", metavar="FILE", help="what signed the controller's certificate")
    parser.add_argument("--event-log", default="off", choices=("off", "stdout", "stderr"))
    given = parser.parse_args()
    engines = []
    for text in given.engine:
        name, equals, url = text.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            parser.error(f"--engine {text!r}: write NAME=http://host:port")
        engines.append(Engine(name, url.rstrip("/")))
    try:
        host, port = ControlSettings(listen=given.listen, insecure=True).place()
        # Secrets come by the environment: a command line can be read by everybody on the host.
        control = Client(given.controller, token=os.environ.get("ROUTER_CONTROLLER_TOKEN", ""), ca=given.ca)
        context = context_of(given.context)
    except (KVStoreError, OSError) as error:
        parser.exit(2, f"router: {error}\n")
    router = Router(
        engines, control, context, namespace=given.namespace, chunk_size=given.chunk_size,
        decide_s=given.decide_timeout,
    )  # fmt: skip
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    attach_event_log(given.event_log)
    # The engines' `date` and `server` are passed on; a second one of each would be ours.
    config = uvicorn.Config(
        build(router), host=host, port=port, log_level="warning", access_log=False, date_header=False,
        server_header=False,
    )  # fmt: skip
    Server(config).run()


if __name__ == "__main__":
    main()
