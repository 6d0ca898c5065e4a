"""examples/router.py, as a process, in front of engines that break off, hang, or speak in unusual ways; and clients
that go away. The engines are sockets: what they say, byte for byte, and when, is the test's to choose."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.control import Client
from tests.control_support import CONTEXT, eventually

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
STREAM = (
    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"choices": [{"text": "a", "index": 0}]}\n\n'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _answer(body: Any, headers: bytes = b"", status: bytes = b"200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%s%scontent-length: %d\r\n\r\n%s" % (
        status, headers, b"" if b"connection:" in headers else b"connection: close\r\n", len(data), data,
    )  # fmt: skip


class Engine:
    """Answers /tokenize; everything else is `say(connection, head, body)`'s. One connection, one request."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[tuple[bytes, bytes]] = []
        self.tokenized: list[tuple[bytes, Any]] = []
        self.say: Callable[[socket.socket, bytes, bytes], None] = lambda c, h, b: c.sendall(_answer({"by": self.port}))
        self.tokenize: Callable[[socket.socket], object] = lambda c: c.sendall(_answer({"tokens": [1] * 64}))
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            if self.listener.gettimeout() == 0.0:
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
            data = b""
            while b"\r\n\r\n" not in data:
                part = connection.recv(65536)
                if not part:
                    return
                data += part
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            while len(body) < length:
                body += connection.recv(65536)
            if b" /tokenize " in head:
                self.tokenized.append((head, json.loads(body)))
                self.tokenize(connection)
            else:
                self.requests.append((head, body))
                self.say(connection, head, body)

    def close(self) -> None:
        self.listener.setblocking(False)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=10):
            self._accepting.join()
        self.join()
        self.listener.close()

    def join(self) -> None:
        """All of its connections have ended."""
        while self._threads:
            self._threads.pop().join()


class Place:
    """Two engines, a controller without nodes, the router."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self.engines = [Engine(), Engine()]
        for engine in self.engines:
            stack.callback(engine.close)
        head = subprocess.Popen(
            [sys.executable, "-m", "kvstore_cli", "ctl", "serve", "--http", "127.0.0.1:0", "--json"],
            env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert head.stdout is not None
        stack.callback(head.stdout.close)
        stack.callback(head.wait)
        stack.callback(head.terminate)
        url = json.loads(head.stdout.readline())["url"]
        (folder / "context.yaml").write_text(
            "model: org/model\ndtype: bfloat16\nlayout: {num_layers: 2, num_kv_heads: 2, head_dim: 64}\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = folder / "router.log"
        words = [f"--engine=n{number}={engine.url}" for number, engine in enumerate(self.engines)]
        self.process = subprocess.Popen(
            [sys.executable, str(ROUTER), "--listen", self.host, "--controller", url, "--context",
             str(folder / "context.yaml"), "--chunk-size", "16", "--decide-timeout", "30", *words],
            env=ENVIRONMENT,
            stderr=stack.enter_context(self.log.open("w")),
        )  # fmt: skip
        stack.callback(self.process.wait)
        stack.callback(self.process.terminate)
        eventually(self._ready, within=60)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            return self.ask("/healthz", method="GET")[0] == 200
        return False

    def ask(self, path: str = "/v1/completions", body: Any = None, method: str = "POST", **headers: str) -> Any:
        """(status, headers, body)."""
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=60)) as connection:
            connection.request(method, path, self.body() if body is None and method == "POST" else body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    @staticmethod
    def body(**more: Any) -> bytes:
        return json.dumps({"model": "org/model", "prompt": "x" * 64, "max_tokens": 3, **more}).encode()

    def all_say(self, say: Callable[[socket.socket, bytes, bytes], None]) -> None:
        for engine in self.engines:
            engine.say = say
            engine.requests.clear()
            engine.tokenized.clear()

    def requests(self) -> list[tuple[bytes, bytes]]:
        return [request for engine in self.engines for request in engine.requests]

    def waiting(self) -> list[float]:
        return [engine["waiting"] for engine in json.loads(self.ask("/healthz", method="GET")[2])["engines"]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        found = Place(stack, tmp_path_factory.mktemp("router"))
        yield found
        assert "Traceback" not in found.log.read_text()


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    yield shared
    for engine in shared.engines:
        engine.join()


def _hang_up(connection: socket.socket, head: bytes, body: bytes) -> None:
    return


def test_a_completion_that_has_arrived_is_never_sent_again(place: Place) -> None:
    """The engine takes it and hangs up: it may have been made, and paid for. 502, and no second engine sees it."""
    place.all_say(_hang_up)
    status, _, text = place.ask()
    assert status == 502
    assert b"broke off" in text
    assert len(place.requests()) == 1
    place.all_say(lambda connection, head, body: connection.sendall(b"HTTP/1.1 2"))
    assert place.ask()[0] == 502
    assert len(place.requests()) == 1
    assert place.waiting() == [0, 0]


def test_an_engine_that_dies_in_the_middle_of_an_answer_leaves_it_without_an_end(place: Place) -> None:
    """Else a client would take half an answer for a whole one."""
    place.all_say(lambda connection, head, body: connection.sendall(STREAM + _chunk(EVENT) + _chunk(EVENT)))
    with contextlib.closing(http.client.HTTPConnection(place.host, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", place.body(stream=True))
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead) as cut:
            response.read()
        assert cut.value.partial == EVENT * 2
    half = _answer({"choices": [{"text": "a" * 500}]})[:-100]
    place.all_say(lambda connection, head, body: connection.sendall(half))
    with pytest.raises(http.client.IncompleteRead):
        place.ask()
    assert len(place.requests()) == 1
    assert place.waiting() == [0, 0]
    assert place.log.read_text().count("broke off in the middle of an answer") == 2


def test_who_goes_away_before_the_answer_begins_ends_the_engines_work(place: Place) -> None:
    """A completion in one piece has no headers before its end: the engine would work for nobody."""
    begun, ended = threading.Event(), threading.Event()

    def say(connection: socket.socket, head: bytes, body: bytes) -> None:
        begun.set()
        if connection.recv(1) == b"":  # ends with the router's side of the connection
            ended.set()

    place.all_say(say)
    connection = http.client.HTTPConnection(place.host, timeout=60)
    connection.request("POST", "/v1/completions", place.body())
    try:
        assert begun.wait(30)
        assert sum(place.waiting()) == 64
    finally:
        connection.close()
    assert ended.wait(20)
    eventually(lambda: place.waiting() == [0, 0])


def test_headers_paths_and_bodies_pass_as_they_were_written(place: Place) -> None:
    said = b"set-cookie: a=1\r\nset-cookie: b=2\r\nconnection: close, x-mine\r\nx-mine: 1\r\nx-kvstore-instance: x\r\n"
    said += b"date: yesterday\r\nserver: engine\r\n"
    place.all_say(lambda connection, head, body: connection.sendall(_answer(body, said)))
    body = json.dumps({"model": "m", "prompt": "x" * 64, "n": 3, "logit_bias": {"1": 0.5}, "ü": "ü"}).encode()
    status, headers, text = place.ask(
        "/v1/completions?trace=a%2Fb&c", body, authorization="Bearer of-the-client", connection="keep-alive, x-hop",
        **{"x-hop": "1", "x-request-id": "r-1", "content-type": "application/json"},
    )  # fmt: skip
    assert (status, text) == (200, body)
    assert headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert headers.get_all("x-request-id") == ["r-1"]
    assert (headers.get_all("date"), headers.get_all("server")) == (["yesterday"], ["engine"])  # not ours as well
    assert headers.get_all("x-kvstore-instance")[0] in ("n0", "n1")
    assert len(headers.get_all("x-kvstore-instance")) == 1
    assert "x-mine" not in headers
    ((head, sent),) = place.requests()
    assert sent == body
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"post /v1/completions?trace=a%2fb&c http/1.1"
    assert b"authorization: bearer of-the-client" in lines
    assert b"x-request-id: r-1" in lines
    assert b"accept-encoding: identity" in lines  # http.client says so; nothing else may be put in its place
    assert not any(line.startswith((b"x-hop", b"x-mine")) for line in lines)
    answer = socket.create_connection(place.host.split(":"), timeout=60)
    with answer:  # a client that wants nothing compressed, since it says nothing of it
        answer.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        while answer.recv(65536):
            pass
    (head,) = [head for head, _ in place.requests() if b"/v1/models" in head]
    assert b"gzip" not in head
    status, headers, _ = place.ask("/v1/files/a%2F..%2Fb", method="GET", **{"x-request-id": "no good"})
    assert any(head.startswith(b"GET /v1/files/a%2F..%2Fb HTTP/1.1") for head, _ in place.requests())
    assert len(headers["x-request-id"]) == 32


def test_the_tokenizer_is_asked_with_all_that_decides_the_tokens(place: Place) -> None:
    place.all_say(lambda connection, head, body: connection.sendall(_answer({"choices": []})))
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"thinking": False},
            "add_generation_prompt": True, "temperature": 1}  # fmt: skip
    assert place.ask("/v1/chat/completions", json.dumps(chat), authorization="Bearer k")[0] == 200
    ((head, asked),) = [each for engine in place.engines for each in engine.tokenized]
    assert asked == {name: value for name, value in chat.items() if name != "temperature"}
    assert b"authorization: bearer k" in head.lower()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[1]", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"", 400),
        (json.dumps({"prompt": None}).encode(), 200),  # the engine says what is wrong
        (json.dumps({"prompt": [["a"], 1.5], "model": 7}).encode(), 200),
        (json.dumps({"prompt": [-1, 1 << 70]}).encode(), 200),
    ],
)  # fmt: skip
def test_bodies_that_make_no_sense_hurt_nobody(place: Place, body: bytes, status: int) -> None:
    place.all_say(lambda connection, head, body: connection.sendall(_answer({"usage": {"prompt_tokens": "many"}})))
    assert place.ask(body=body)[0] == status
    assert len(place.requests()) == (status == 200)
    assert place.waiting() == [0, 0]


def test_a_body_that_is_too_long_is_not_passed_on(place: Place) -> None:
    place.all_say(_hang_up)
    with contextlib.closing(http.client.HTTPConnection(place.host, timeout=60)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(1 << 40))
        connection.endheaders()
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.send(b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError), connection.getresponse() as response:
            assert response.status == 413
    assert place.requests() == []
    assert place.ask("/healthz", method="GET")[0] == 200


def test_what_engines_say_of_requests_is_counted(place: Place) -> None:
    usage = {"prompt_tokens": 64, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}

    def numbers() -> dict[str, float]:
        lines = place.ask("/metrics", method="GET")[2].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = numbers()
    place.all_say(lambda connection, head, body: connection.sendall(_answer({"choices": [], "usage": usage})))
    place.ask()
    last = b"data: %s\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
    place.all_say(lambda connection, head, body: connection.sendall(
        STREAM + _chunk(EVENT) * 3 + _chunk(last) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    ))  # fmt: skip
    assert place.ask(body=place.body(stream=True))[2].endswith(b"[DONE]\n\n")
    after = eventually(lambda: (now := numbers()).get("kvstore_requests_total", 0) >= 2 and now)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("kvstore_requests_total") == 2
    assert grown('kvstore_request_tokens_total{what="input"}') == 128
    assert grown('kvstore_request_tokens_total{what="saved"}') == 96
    assert grown('kvstore_request_tokens_total{what="output"}') == 6
    assert grown("kvstore_request_ttft_seconds_count") == 1


def test_what_looks_like_a_mistake_in_the_setup_is_said_once(place: Place) -> None:
    """No node of these names reports, and nothing is ever found."""
    place.all_say(lambda connection, head, body: connection.sendall(_answer({})))
    never = "none of the first 50 prompts had a hit"
    for _ in range(200):
        assert place.ask()[0] == 200
        if never in place.log.read_text():
            break
    for _ in range(60):
        place.ask()
    log = place.log.read_text()
    assert log.count(never) == 1
    assert "kvstore ctl context URL KEY" in log
    assert log.count("no node of the name n0, n1 reports") == 1
    assert log.splitlines()[0] == f"router: listening on http://{place.host}"
    assert log.count("listening on") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--listen", "8000"], "'8000' is not HOST:PORT"),
        (["--listen", "127.0.0.1:x"], "is not HOST:PORT"),
        (["--controller", "127.0.0.1:9090"], "http://HOST:PORT"),
        (["--context", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--context", "{folder}/wrong.yaml"], "layout has no field 'heads'"),
    ],
)
def test_options_that_make_no_sense_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("model: m\ndtype: bfloat16\nlayout: {heads: 2}\n")
    good = ["--controller", "http://127.0.0.1:1", "--engine", "n0=http://127.0.0.1:2", "--context", "{folder}/ok.yaml"]
    (tmp_path / "ok.yaml").write_text(
        "model: org/model\ndtype: bfloat16\nlayout: {num_layers: 2, num_kv_heads: 2, head_dim: 64}\n"
    )
    command = [word.format(folder=tmp_path) for word in (*good, *words)]  # the last one of a flag counts
    done = subprocess.run(
        [sys.executable, str(ROUTER), *command], env=ENVIRONMENT, check=False, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("router: ")
    assert done.stderr.count("\n") == 1


def test_a_tokenizer_that_hangs_is_waited_for_once_and_not_by_everybody(place: Place) -> None:
    """Its time over, prompts are routed by load alone for a while, at once."""
    release = threading.Event()
    for engine in place.engines:
        engine.tokenize = lambda connection: release.wait(60)
    try:
        place.all_say(_hang_up)
        assert asyncio.run(_three(place)) == 1
    finally:
        release.set()


async def _three(place: Place) -> int:
    """Three prompts, decided in this process by a router of little patience: how many asked a tokenizer."""
    spec = importlib.util.spec_from_file_location("router_example", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["router_example"] = module
    spec.loader.exec_module(module)
    engines = [module.Engine(f"n{number}", engine.url) for number, engine in enumerate(place.engines)]
    router = module.Router(engines, Client("http://127.0.0.1:1"), CONTEXT, decide_s=0.2)
    for _ in range(3):
        decision = await router.decide("/v1/completions", {"prompt": "x" * 64}, None)
        assert (decision.hit_tokens, len(decision.engines)) == (0, 2)
    await router.close()
    return sum(len(engine.tokenized) for engine in place.engines)
