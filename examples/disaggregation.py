"""An OpenAI-compatible proxy in front of vLLM engines that compute prompts and engines that generate.

    python examples/disaggregation.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 [--port 8000]

Each request goes to a decoder, and at the same time, with `max_tokens` 1, to a prefiller. Both share a store through
`KVStoreConnector`; the decoder is told that the prompt is being computed, and loads each chunk as it appears. If the
prefiller fails, the decoder is asked anew, without: it takes what is stored and computes the rest. See
docs/disaggregation.md. Needs fastapi, httpx and uvicorn, which vLLM brings along.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

logger = logging.getLogger("disaggregation")

_PATHS = ("/v1/completions", "/v1/chat/completions")
_REST_S = 5.0  # an engine that could not be reached is asked after the others for so long
_HEADERS = ("authorization", "x-request-id", "x-session-id")  # handed on


class Engines:
    """Engines that do the same, in turn; those that failed a moment ago come last."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._turns = itertools.count()
        self._failed: dict[str, float] = {}

    def in_order(self) -> list[str]:
        """All of them, the one whose turn it is first."""
        turn = next(self._turns) % len(self._urls)
        order = self._urls[turn:] + self._urls[:turn]
        now = time.monotonic()
        return sorted(order, key=lambda url: now - self._failed.get(url, -_REST_S) < _REST_S)

    def failed(self, url: str) -> None:
        """It could not be reached."""
        self._failed[url] = time.monotonic()


@dataclass
class Question:
    """A client's request. `headers`: those that are handed on."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    def for_prefill(self) -> dict[str, Any]:
        """Its prompt alone: one token is generated, and thrown away."""
        left_out = {"stream_options", "min_tokens", "n", "best_of", "echo", "max_completion_tokens"}
        left_out |= {"logprobs", "top_logprobs", "prompt_logprobs"}
        body = {name: value for name, value in self.body.items() if name not in left_out}
        return {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}

    def for_decode(self, awaits: bool) -> dict[str, Any]:
        """All of it, and whether its prompt is being computed elsewhere."""
        body = {name: value for name, value in self.body.items() if name != "kv_transfer_params"}
        return {**body, "kv_transfer_params": {"do_remote_prefill": True}} if awaits else body


class Begun(NamedTuple):
    """An engine's answer: of a stream, something has come; of another one, all."""

    answer: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]


class PrefillFailed(Exception):
    """The decoder waits for what will not come."""


class Proxy:
    """See the module."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], client: httpx.AsyncClient, short: int) -> None:
        self._prefillers, self._decoders = Engines(prefill), Engines(decode)
        self._client = client
        self._short = short

    async def answer(self, question: Question) -> Response:
        """The decoder's answer, as it gives it."""
        prefill: asyncio.Task[None] | None = None
        if self._size(question.body) >= self._short:
            prefill = asyncio.create_task(self._prefill(question))
            prefill.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ask for it
        try:
            try:
                begun = await self._first(question, prefill)
            except PrefillFailed as error:
                logger.warning("%s; the decoder computes what is not stored", error)
                begun = await self._decode(question, awaits=False)
        except BaseException:
            if prefill is not None:
                prefill.cancel()
            raise
        kind = begun.answer.headers.get("content-type", "application/json")
        return StreamingResponse(_passed_on(begun, prefill), begun.answer.status_code, media_type=kind)

    async def _first(self, question: Question, prefill: asyncio.Task[None] | None) -> Begun:
        """The decoder's answer once it begins; unless the prefill fails before."""
        if prefill is None:
            return await self._decode(question, awaits=False)
        decode = asyncio.create_task(self._decode(question, awaits=True))
        try:
            await asyncio.wait((decode, prefill), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()  # raises PrefillFailed
            return await decode
        except BaseException:
            decode.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await (await decode).answer.aclose()
            raise

    async def _prefill(self, question: Question) -> None:
        """Raises `PrefillFailed` if no prefiller computes it."""
        why = "there is no prefiller"
        for url in self._prefillers.in_order():
            try:
                answer = await self._client.post(
                    url + question.path, json=question.for_prefill(), headers=question.headers
                )
            except httpx.HTTPError as error:
                why = f"prefiller {url}: {type(error).__name__} {error}".rstrip()
                self._prefillers.failed(url)
                if not isinstance(error, httpx.ConnectError):
                    break  # it had begun: what it stored is of use, and beginning anew elsewhere takes longer
                continue
            if answer.is_success:
                return
            why = f"prefiller {url}: status {answer.status_code}"
            if answer.status_code < 500:
                break  # the request is no good; the decoder says so to the client
            self._prefillers.failed(url)
        raise PrefillFailed(why)

    async def _decode(self, question: Question, *, awaits: bool) -> Begun:
        """The answer of the first decoder that begins one; of those that say that they are broken, the last one's.

        Raises:
            httpx.HTTPError: the last one cannot be asked.
        """
        urls = self._decoders.in_order()
        for url in urls:
            request = self._client.build_request(
                "POST", url + question.path, json=question.for_decode(awaits), headers=question.headers
            )
            try:
                begun = await self._begin(request)
            except httpx.HTTPError as error:
                logger.warning("decoder %s: %s %s", url, type(error).__name__, error)
                self._decoders.failed(url)
                if url == urls[-1]:
                    raise
                continue
            if begun.answer.status_code < 500 or url == urls[-1]:
                return begun
            logger.warning("decoder %s: status %d", url, begun.answer.status_code)
            self._decoders.failed(url)
            await begun.answer.aclose()
        raise AssertionError("there is at least one decoder")

    async def _begin(self, request: httpx.Request) -> Begun:
        """A stream's headers come before its first token; only with that it has begun. What is no stream is of use only
        as a whole."""
        answer = await self._client.send(request, stream=True)
        try:
            rest = answer.aiter_bytes()
            first = await anext(rest, b"")
            if not _is_stream(answer):
                first += b"".join([part async for part in rest])
            return Begun(answer, first, rest)
        except BaseException:
            await answer.aclose()
            raise

    async def models(self) -> Response:
        """What the decoders serve."""
        answer = None
        for url in self._decoders.in_order():
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._client.get(url + "/v1/models")
                break
        return _trouble(502, "no decoder can be reached") if answer is None else Response(
            answer.content, answer.status_code, media_type="application/json"
        )  # fmt: skip

    @staticmethod
    def _size(body: dict[str, Any]) -> int:
        """Of the prompt, in characters, or tokens where it has token ids; enough to tell short ones."""
        prompt = body.get("prompt", body.get("messages", ""))
        return len(prompt) if isinstance(prompt, str) else len(json.dumps(prompt))


async def _passed_on(begun: Begun, prefill: asyncio.Task[None] | None) -> AsyncIterator[bytes]:
    """An engine's answer, byte by byte. If the engine dies in the middle of a stream, it ends with an error."""
    answer = begun.answer
    try:
        yield begun.first
        async for part in begun.rest:
            yield part
    except httpx.HTTPError as error:
        message = {"error": {"message": f"the decoder failed: {error}", "type": "server_error", "code": 502}}
        yield f"data: {json.dumps(message)}\n\n".encode()
    finally:  # the client may have gone: the engines stop. In that case every `await` here is cancelled in its turn
        if prefill is not None:
            prefill.cancel()
        await answer.aclose()


def _is_stream(answer: httpx.Response) -> bool:
    kind: str = answer.headers.get("content-type", "")
    return kind.startswith("text/event-stream")


def _parsed(content: bytes) -> dict[str, Any]:
    """A request's body. Raises `ValueError`: it is none that could be sent on."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as httpx will
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


async def _gone(request: Request) -> None:
    """Until the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _trouble(status: int, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def build(prefill: Sequence[str], decode: Sequence[str], *, short: int = 1024, timeout: float = 600.0) -> FastAPI:
    """The proxy as an application.

    Args:
        prefill, decode: URLs of engines.
        short: prompts of fewer characters are not worth a prefiller; the decoder computes them.
        timeout: how long an engine may say nothing. Seconds.
    """

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        patience = httpx.Timeout(timeout, connect=2.0)
        plain = {"accept-encoding": "identity"}
        async with httpx.AsyncClient(timeout=patience, limits=limits, headers=plain) as client:
            app.state.proxy = Proxy(prefill, decode, client, short)
            yield

    app = FastAPI(lifespan=running)

    async def ask(request: Request) -> Response:
        try:
            body = _parsed(await request.body())
        except ValueError as error:
            return _trouble(400, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        proxy: Proxy = app.state.proxy
        answer = asyncio.create_task(proxy.answer(Question(request.url.path, body, headers)))
        gone = asyncio.create_task(_gone(request))
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        (gone if answer.done() else answer).cancel()  # nobody wants it any more: the engines stop
        try:
            return await answer
        except asyncio.CancelledError:
            return Response(status_code=499)
        except httpx.HTTPError as error:
            return _trouble(502, f"no decoder can be reached: {type(error).__name__} {error}")

    async def models() -> Response:
        proxy: Proxy = app.state.proxy
        return await proxy.models()

    async def health() -> Response:
        return Response()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _trouble(error.status_code, str(error.detail))

    app.add_exception_handler(HTTPException, refused)
    for path in _PATHS:
        app.add_api_route(path, ask, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    return app


def main() -> int:
    parser = argparse.ArgumentParser(description="a proxy for disaggregated prefill")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="may be given several times")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be given several times")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--short", type=int, default=1024, help="characters; the decoder computes shorter prompts")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    uvicorn.run(build(args.prefill, args.decode, short=args.short), host=args.host, port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
