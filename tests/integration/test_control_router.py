"""examples/router.py, as a process, in front of two servers that speak the completions API and keep a record of each
chunk of a prompt in a node of their own; nodes report to a controller. All of it over HTTP and `node://`, on loopback.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

import kvstore
from kvstore.control import Client, ControlSettings
from kvstore.control.server import HttpServer
from kvstore.keys import chunk_keys
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import NodeServer
from tests.control_support import CONTEXT, controller, eventually, reporting

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"
CHUNK = 16


class Engine:
    """A server of completions: a token is a byte, the next one follows from a hash of all before it, and what a real
    one would keep of a chunk is here 4 KiB derived from it. It looks up what its store has, and stores what is new."""

    def __init__(self, name: str, node: NodeServer) -> None:
        self.name = name
        self.store = kvstore.open_store(f"node://{node.address}")
        self.prompts: list[str] = []
        self.gone = 0
        self.gate = threading.Event()  # behind the first token of a prompt that says "slowly"
        self.hold = threading.Event()  # before the first token of one that says "later"
        self.app = FastAPI()
        self.app.post("/tokenize")(self.tokenize)
        self.app.post("/v1/completions")(self.completions)
        self.app.get("/v1/models")(self.models)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        return {"tokens": list(body["prompt"].encode())}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "org/model", "owned_by": self.name}]}

    def prefill(self, prompt: str) -> int:
        """Tokens that were there already."""
        keys = chunk_keys(list(prompt.encode()), context=CONTEXT, chunk_size=CHUNK)
        known = self.store.hit_prefix(keys)
        self.store.put_many({key: bytes(key) * 128 for key in keys[known:]})
        return known * CHUNK

    async def completions(self, request: Request) -> Any:
        import asyncio

        body = await request.json()
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            return JSONResponse({"error": {"message": "a prompt is text here"}}, 400)
        self.prompts.append(prompt)
        if "later" in prompt:
            await asyncio.to_thread(self.hold.wait, 60)
        cached = await asyncio.to_thread(self.prefill, prompt)
        usage = {
            "prompt_tokens": len(prompt.encode()), "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        tokens = self.generate(prompt, body["max_tokens"])
        if not body.get("stream"):
            return {"object": "text_completion", "choices": [{"text": "".join(tokens), "index": 0}], "usage": usage}

        async def events() -> AsyncIterator[str]:
            try:
                for number, token in enumerate(tokens):
                    if number == 1 and "slowly" in prompt:
                        while not self.gate.is_set():
                            await asyncio.sleep(0.01)
                    yield f"data: {json.dumps({'choices': [{'text': token, 'index': 0}]})}\n\n"
                if body.get("stream_options", {}).get("include_usage"):
                    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
                yield "data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.gone += 1
                raise

        return StreamingResponse(events(), media_type="text/event-stream")

    @staticmethod
    def generate(prompt: str, count: int) -> list[str]:
        state = hashlib.sha256(prompt.encode())
        tokens = []
        for _ in range(count):
            tokens.append(chr(ord("a") + state.digest()[0] % 26))
            state.update(tokens[-1].encode())
        return tokens


class Place:
    """The whole: two engines with their nodes, a controller, the router."""

    def __init__(self, folder: Path) -> None:
        self.stack = contextlib.ExitStack()
        try:
            self._open(folder)
        except BaseException:
            self.stack.close()
            raise

    def _open(self, folder: Path) -> None:
        stack = self.stack
        # One after the other, so that closing the controller's server is the test's to do.
        self.controller = contextlib.ExitStack()
        stack.callback(self.controller.close)
        _, self.control_url = self.controller.enter_context(controller())
        self.engines: dict[str, Engine] = {}
        self.servers: dict[str, HttpServer] = {}
        words = []
        for name in ("n0", "n1"):
            node = stack.enter_context(NodeServer(memory_bytes=64 << 20))
            instance = NodeInstance(node, name=name)
            stack.callback(instance.close)
            stack.enter_context(reporting(instance, self.control_url))
            engine = self.engines[name] = Engine(name, node)
            stack.callback(engine.store.close)
            server = self.servers[name] = HttpServer(engine.app, ControlSettings())
            stack.callback(server.close, 1.0)
            stack.callback(engine.gate.set)
            stack.callback(engine.hold.set)
            words += ["--engine", f"{name}={server.url}"]
        (folder / "context.yaml").write_text(
            "model: org/model\ndtype: bfloat16\nlayout: {num_layers: 2, num_kv_heads: 2, head_dim: 64}\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.host = f"127.0.0.1:{port}"
        log = stack.enter_context((folder / "router.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, str(ROUTER), "--listen", self.host, "--controller", self.control_url, "--context",
             str(folder / "context.yaml"), "--chunk-size", str(CHUNK), "--event-log", "stdout",
             "--decide-timeout", "30", *words],
            env={name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")},
            stdout=stack.enter_context((folder / "events").open("w")), stderr=log,
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.terminate)
        self.log = folder / "router.log"
        self.events = folder / "events"
        self.client = stack.enter_context(Client(self.control_url))

        def ready() -> bool:
            assert process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                return bool(self.get("/healthz")[1]["engines"])
            return False

        eventually(ready, within=60)
        eventually(lambda: [worker.state for worker in self.client.workers()] == ["ready", "ready"])

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://{self.host}{path}", timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self, prompt: Any, tokens: int = 3) -> tuple[str, int, dict[str, Any]]:
        """(instance, hit tokens that the router counted on, answer)."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps({"model": "org/model", "prompt": prompt, "max_tokens": tokens}),
                {"content-type": "application/json"},
            )  # fmt: skip
            response = connection.getresponse()
            answer = json.load(response)
            assert response.status == 200, answer
            headers = response.headers
            return headers["x-kvstore-instance"], int(headers["x-kvstore-hit-tokens"]), answer
        finally:
            connection.close()

    def stream(
        self, prompt: str, tokens: int, **more: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.request(
            "POST", "/v1/completions",
            json.dumps({"model": "org/model", "prompt": prompt, "max_tokens": tokens, "stream": True, **more}),
            {"content-type": "application/json", "x-request-id": "r-17"},
        )  # fmt: skip
        return connection, connection.getresponse()

    def known(self, prompt: str) -> dict[str, int]:
        found = self.client.lookup(tokens=list(prompt.encode()), context=CONTEXT, chunk_size=CHUNK)
        return {place.instance: place.hit_tokens for place in found.places}

    def waiting(self) -> dict[str, float]:
        return {engine["name"]: engine["waiting"] for engine in self.get("/healthz")[1]["engines"]}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    with found.stack:
        yield found


def _prompt(name: str, length: int = 640) -> str:
    return (f"{name}, be of help. " * length)[:length]


def test_prompts_go_where_their_beginning_is_and_answers_come_as_they_are_made(place: Place) -> None:
    # The first of a kind goes where its first chunk hashes to; then it stays there, with what is cached.
    homes: dict[str, str] = {}
    for number in range(8):
        prompt = _prompt(f"assistant {number}")
        homes[prompt], hits, answer = place.complete(prompt)
        assert hits == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["choices"][0]["text"] == "".join(Engine.generate(prompt, 3))
    assert set(homes.values()) == {"n0", "n1"}
    for prompt, home in homes.items():
        eventually(lambda prompt=prompt, home=home: place.known(prompt) == {home: 640})  # type: ignore[misc]
        instance, hits, answer = place.complete(prompt + " And now something else, of some length.")
        assert (instance, hits) == (home, 640)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 640

    # A stream: its first event is here before the engine has made the second.
    prompt = next(iter(homes)) + " slowly"
    engine = place.engines[homes[next(iter(homes))]]
    connection, response = place.stream(prompt, 5)
    assert response.headers["content-type"].startswith("text/event-stream")
    first = response.readline()
    assert first.startswith(b"data: {")
    assert not engine.gate.is_set()
    assert place.waiting() == {"n0": 0, "n1": 0}  # it is prefilled
    engine.gate.set()
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (first + rest).count(b"data: ") == 6
    connection.close()
    engine.gate.clear()

    # What the engine says of tokens, and when the first one came, is a line of the event log.
    connection, response = place.stream(prompt, 5, stream_options={"include_usage": True})
    while not place.engines[homes[next(iter(homes))]].gate.is_set():
        response.readline()
        engine.gate.set()
    response.read()
    connection.close()
    engine.gate.clear()
    eventually(lambda: '"r-17"' in place.events.read_text())
    lines = [json.loads(line) for line in place.events.read_text().splitlines()]
    assert {line["message"] for line in lines} == {"token_usage"}
    (told,) = [line for line in lines if line.get("request_id") == "r-17"]
    assert (told["model_name"], told["input_tokens"], told["output_tokens"]) == ("org/model", 647, 5)
    assert told["tokens_saved"] == 640
    assert told["recompute_ratio"] == pytest.approx(7 / 647, abs=1e-6)
    assert told["ttft_ms"] > 0
    assert told["itl_ms"] > 0
    whole = [line for line in lines if line.get("request_id") != "r-17"]
    assert len(whole) == 16
    assert all("ttft_ms" not in line for line in whole), "of an answer in one piece nobody knows it"

    # Who goes away ends the engine's work.
    connection, response = place.stream(prompt, 5)
    response.readline()
    response.close()
    connection.close()
    eventually(lambda: engine.gone == 1)
    assert place.waiting() == {"n0": 0, "n1": 0}

    # Other paths go to any engine; errors are passed on as the engine said them.
    status, models = place.get("/v1/models")
    assert (status, models["data"][0]["id"]) == (200, "org/model")
    assert place.get("/v1/nothing")[0] == 404
    request = urllib.request.Request(f"http://{place.host}/v1/completions", b"{", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as error:
        assert error.code == 400
        assert "not JSON" in json.load(error)["error"]["message"]


def test_load_engines_that_are_gone_and_no_controller(place: Place) -> None:
    prompt = _prompt("the one that everybody asks", 320)
    home, _, _ = place.complete(prompt)
    other = {"n0": "n1", "n1": "n0"}[home]
    eventually(lambda: place.known(prompt) == {home: 320})
    assert place.complete(prompt)[0] == home

    # While much waits there, it goes elsewhere, and back when that is done.
    threads = [
        threading.Thread(target=place.complete, args=(prompt + f" later {number} " + _prompt(str(number), 900),))
        for number in range(3)
    ]
    threads[0].start()
    eventually(lambda: place.waiting()[home] > 500)
    assert place.complete(prompt)[0] == other
    for engine in place.engines.values():
        engine.hold.set()
    threads[0].join()
    eventually(lambda: place.waiting() == {"n0": 0, "n1": 0})
    eventually(lambda: place.known(prompt) == {"n0": 320, "n1": 320})

    # Token ids instead of text: decided without a tokenizer; the engine has its own opinion of them.
    connection = http.client.HTTPConnection(place.host, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": list(prompt.encode()), "max_tokens": 1}),
                       {"content-type": "application/json"})  # fmt: skip
    response = connection.getresponse()
    assert response.status == 400
    assert response.headers["x-kvstore-hit-tokens"] == "320"
    assert json.load(response)["error"]["message"] == "a prompt is text here"
    connection.close()

    # An engine that cannot be reached is passed over, whatever it has.
    place.servers[home].close(0.0)
    begun = time.monotonic()
    instance, _, answer = place.complete(prompt)
    assert instance == other
    assert answer["choices"][0]["text"] == "".join(Engine.generate(prompt, 3))
    assert place.complete(prompt)[0] == other
    assert time.monotonic() - begun < 30

    # Without a controller prompts are served all the same.
    place.controller.close()
    assert place.complete(prompt)[0] == other
    assert "routed by load alone" in place.log.read_text() or "cannot be reached" in place.log.read_text()

    # And without any engine that is said.
    place.servers[other].close(0.0)
    with pytest.raises(AssertionError, match="no engine can be reached"):
        place.complete(prompt)
    assert place.get("/healthz")[0] == 503
