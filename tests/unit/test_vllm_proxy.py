"""examples/disaggregation.py between a client and engines that do what a test says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

PATIENCE_S = 30.0
PROMPT = "word " * 400
WAITS = {"do_remote_prefill": True}


def _module() -> Any:
    path = Path(__file__).parents[2] / "examples" / "disaggregation.py"
    spec = importlib.util.spec_from_file_location("disaggregation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["disaggregation"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


proxy_module = _module()


class EngineStub:
    """An HTTP server that answers as `does(handler, body)` says; `asked`: (path, body, headers)."""

    def __init__(self) -> None:
        stub = self
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.does: Callable[[Any, dict[str, Any]], None] = lambda handler, body: handler.reply({"text": "ok"})
        self.hung_up = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                stub.does(self, body)

            def reply(self, value: Any, status: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def begin_stream(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.send_header("connection", "close")
                self.end_headers()

            def part(self, data: str) -> None:
                self.wfile.write(f"{len(data):x}\r\n{data}\r\n".encode())
                self.wfile.flush()

            def die(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def until_hung_up(self) -> None:
                """What an engine that generates does, which nobody wants any more."""
                self.close_connection = True
                self.connection.settimeout(PATIENCE_S)
                if self.connection.recv(1) == b"":
                    stub.hung_up.set()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.asked]

    def close(self) -> None:
        """May be called twice."""
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


class World:
    """Two of each, a proxy, and a client."""

    def __init__(self, **options: Any) -> None:
        self.prefillers, self.decoders = [EngineStub(), EngineStub()], [EngineStub(), EngineStub()]
        app = proxy_module.build(
            [each.url for each in self.prefillers], [each.url for each in self.decoders], **options
        )  # fmt: skip
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", loop="asyncio"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def ask(self, path: str = "/v1/completions", **body: Any) -> Any:
        return self.client.post(path, json={"model": "m", "prompt": PROMPT, "max_tokens": 9, **body})

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        for each in (*self.prefillers, *self.decoders):
            each.close()


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as made:
        yield made


def test_both_are_asked_at_once_each_for_its_part(world: World) -> None:
    prefilled = threading.Event()

    def decoder(handler: Any, body: dict[str, Any]) -> None:
        assert prefilled.wait(PATIENCE_S)  # it waits, as an engine does, and the prefiller is asked meanwhile
        handler.reply({"choices": [{"text": "hello"}]})

    def prefiller(handler: Any, body: dict[str, Any]) -> None:
        prefilled.set()
        handler.reply({"kv_transfer_params": {}})

    world.decoders[0].does, world.prefillers[0].does = decoder, prefiller
    headers = {"authorization": "Bearer x", "x-other": "y"}
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 9, "n": 2, "min_tokens": 3, "temperature": 0}
    answer = world.client.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"choices": [{"text": "hello"}]})
    ((path, prefill, sent),) = world.prefillers[0].asked
    assert path == "/v1/completions"
    assert prefill == {"model": "m", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": False,
                       "kv_transfer_params": {"do_remote_decode": True}}  # fmt: skip
    assert sent["authorization"] == "Bearer x"
    assert "x-other" not in sent
    assert world.decoders[0].bodies() == [{**body, "kv_transfer_params": WAITS}]


def test_a_stream_comes_through_as_it_comes_and_engines_take_turns(world: World) -> None:
    go = threading.Event()

    def decoder(handler: Any, body: dict[str, Any]) -> None:
        handler.begin_stream()
        handler.part("data: one\n\n")
        assert go.wait(PATIENCE_S)
        handler.part("data: two\n\n")
        handler.part("")

    for each in world.decoders:
        each.does = decoder
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(2):
        go.clear()
        with world.client.stream("POST", "/v1/chat/completions", json={"messages": messages, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.iter_text()
            assert next(parts) == "data: one\n\n"
            go.set()
            assert "".join(parts) == "data: two\n\n"
    assert [len(each.asked) for each in (*world.prefillers, *world.decoders)] == [1, 1, 1, 1]
    assert world.prefillers[0].asked[0][0] == "/v1/chat/completions"


def test_short_prompts_go_to_the_decoder_alone(world: World) -> None:
    assert world.ask(prompt="hello").status_code == 200
    assert world.decoders[0].bodies() == [{"model": "m", "prompt": "hello", "max_tokens": 9}]
    assert not world.prefillers[0].asked
    assert world.ask(prompt=[1, 2, 3], kv_transfer_params={"do_remote_prefill": True}).status_code == 200
    assert "kv_transfer_params" not in world.decoders[1].bodies()[0], "clients do not say where KV is"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_prefiller_that_fails_is_given_up_at_once_and_the_decoder_asked_anew(
    world: World, how: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "disaggregation")

    def decoder(handler: Any, body: dict[str, Any]) -> None:
        if body.get("kv_transfer_params") == WAITS:
            if stream:
                handler.begin_stream()  # headers come before the first token
            handler.until_hung_up()
        else:
            handler.reply({"text": "computed"})

    def prefiller(handler: Any, body: dict[str, Any]) -> None:
        handler.die() if how == "dies" else handler.reply({"error": "broken"}, 500)

    for each in world.decoders:
        each.does = decoder
    for each in world.prefillers:
        each.does = prefiller
    assert world.ask(stream=stream).json() == {"text": "computed"}
    assert world.decoders[0].hung_up.wait(PATIENCE_S), "the first question was taken back"
    assert sum(len(each.asked) for each in world.prefillers) == (1 if how == "dies" else 2)
    assert "prefiller" in caplog.text


def test_engines_that_cannot_be_reached_are_passed_over(world: World) -> None:
    for each in (world.prefillers[0], world.decoders[0]):
        each.close()
    for _ in range(4):
        assert world.ask().json() == {"text": "ok"}
    assert [len(world.prefillers[1].asked), len(world.decoders[1].asked)] == [4, 4]
    assert all(body["kv_transfer_params"] == WAITS for body in world.decoders[1].bodies())
    assert world.client.get("/v1/models").json() == {"data": [{"id": "m"}]}
    assert world.client.get("/health").status_code == 200
    world.decoders[1].close()
    answer = world.ask()
    assert answer.status_code == 502
    assert "no decoder can be reached" in answer.json()["error"]["message"]
    assert world.client.get("/v1/models").status_code == 502


def test_a_request_that_is_no_good_is_the_decoders_to_refuse(world: World) -> None:
    for each in (*world.prefillers, *world.decoders):
        each.does = lambda handler, body: handler.reply({"error": "bad"}, 400)
    answer = world.ask()
    assert (answer.status_code, answer.json()) == (400, {"error": "bad"})
    for body in ("{", "[1]"):
        assert world.client.post("/v1/completions", content=body).status_code == 400


def test_a_decoder_that_dies_in_the_middle_ends_the_stream_with_an_error(world: World) -> None:
    def decoder(handler: Any, body: dict[str, Any]) -> None:
        handler.begin_stream()
        handler.part("data: one\n\n")
        handler.die()

    world.decoders[0].does = decoder
    lines = world.ask(stream=True).text.splitlines()
    assert lines[0] == "data: one"
    assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == 502
    assert "[DONE]" not in lines


@pytest.mark.parametrize("stream", [False, True])
def test_engines_stop_when_the_client_has_gone(world: World, stream: bool) -> None:
    asked = threading.Event()

    def decoder(handler: Any, body: dict[str, Any]) -> None:
        if stream:
            handler.begin_stream()
            handler.part("data: one\n\n")
        asked.set()
        handler.until_hung_up()

    def prefiller(handler: Any, body: dict[str, Any]) -> None:
        handler.until_hung_up()

    world.decoders[0].does, world.prefillers[0].does = decoder, prefiller
    with socket.create_connection(("127.0.0.1", int(world.url.rsplit(":", 1)[1]))) as client:
        body = json.dumps({"prompt": PROMPT, "stream": stream}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                       + f"content-length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
        assert asked.wait(PATIENCE_S)
        if stream:
            assert client.recv(1)
    assert world.decoders[0].hung_up.wait(PATIENCE_S)
    assert world.prefillers[0].hung_up.wait(PATIENCE_S)
