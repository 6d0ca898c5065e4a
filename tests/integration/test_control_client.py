"""`Client` against networks that misbehave: names, addresses, sends, answers; threads and forks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.control import Client
from kvstore.errors import TransientError
from tests.control_support import eventually, keys_of, plain_node
from tests.servers.certificate import make_certificate

LATE = 20.0  # a call of half a second is over by then on the busiest machine


@contextlib.contextmanager
def _soon() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < LATE


def _hanging(count: int) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvstore-resolve"][:count]


def test_a_resolver_that_hangs_costs_the_deadline_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    real, go, asked = socket.getaddrinfo, threading.Event(), []

    def getaddrinfo(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host == "kv.example" and more.get("flags", 0) != socket.AI_NUMERICHOST:
            asked.append(host)
            go.wait(60)
            return real("127.0.0.1", port, *args, **more)
        return real(host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with plain_node("n0", admin_token=b"a", tokens={}) as (_, url):
        port = url.rpartition(":")[2]
        with Client(f"http://kv.example:{port}", token="a", timeout=0.2) as client, _soon():
            for _ in range(3):
                with pytest.raises(TransientError, match="no answer by the deadline"):
                    client.workers()
            assert asked == ["kv.example"]
            assert len(_hanging(9)) == 1
            go.set()
            eventually(lambda: not _hanging(1))
            assert client.workers(timeout=30)[0].instance == "n0"
            assert len(asked) == 2  # what was resolved is not remembered: names move


def test_a_name_that_there_is_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        Client("http://kv.example:1") as client,
        pytest.raises(TransientError, match=r"kv.example.*Name or service not known"),
    ):
        client.workers()


def test_addresses_are_tried_one_after_the_other_and_all_of_them_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo
    addresses: list[tuple[str, int]] = []

    def getaddrinfo(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != "kv.example":
            return real(host, port, *args, **more)
        if more.get("flags", 0) == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with contextlib.ExitStack() as stack:
        _, url = stack.enter_context(plain_node("n0", admin_token=b"a", tokens={}))
        # Full: a listener whose queue has no place left takes no connection, and says nothing.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        closed = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        nobody = closed.getsockname()
        closed.close()
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        client = stack.enter_context(Client("http://kv.example:1", token="a"))
        addresses = [full.getsockname()] * 3
        with _soon(), pytest.raises(TransientError, match="no answer by the deadline"):
            client.workers(timeout=0.5)
        addresses = [nobody, full.getsockname(), ("127.0.0.1", int(url.rpartition(":")[2]))]
        with _soon():
            assert client.workers(timeout=3)[0].instance == "n0"
        client.close()
        addresses = [nobody]
        with pytest.raises(TransientError, match="refused"):
            client.lookup(keys=keys_of(1, 1), timeout=3)


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_reads_byte_by_byte_does_not_stretch_the_deadline(tls: bool, tmp_path: Path) -> None:
    """Each send makes progress; all of them together must not take longer than the call may."""
    cert = str(make_certificate(tmp_path / "both.pem"))
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError), connection:
            sock: socket.socket = connection
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(cert)
                sock = context.wrap_socket(connection, server_side=True)
            with sock:
                while not stop.wait(0.02) and sock.recv(2000):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        body = {"events": ["x" * 1000] * 8000}
        late = pytest.raises(TransientError, match="no answer by the deadline")
        with Client(url, ca=cert if tls else "") as client, _soon(), late:
            client.report(body, timeout=1.0)
        stop.set()
        thread.join()


def test_an_answer_that_is_nested_without_end_is_no_answer() -> None:
    answer = b"[" * 200_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(head + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with (
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
            pytest.raises(TransientError, match="not JSON"),
        ):
            client.workers()
        thread.join()


def test_what_may_have_been_done_is_not_sent_twice_and_what_may_be_is() -> None:
    """A server that takes requests and hangs up: on a kept connection a question is asked again, an order is not."""
    seen: list[bytes] = []
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"

    def serve(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                for answered in (True, False):
                    data = connection.recv(65536)
                    if b"/v1/stop" in data or not data:
                        return
                    while not data.endswith((b"\r\n\r\n", b"}")):
                        data += connection.recv(65536)
                    seen.append(data.partition(b"?")[0])
                    if answered and b"GET" in data:
                        connection.sendall(good)
                    else:
                        break

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert client.workers() == []
            assert client.health() == []  # on the same connection, cut; then on a new one
            assert seen == [b"GET /v1/workers", b"GET /v1/health", b"GET /v1/health"]
            with pytest.raises(TransientError):
                client.clear(everything=True)
            assert seen[3:] == [b"POST /v1/clear"]
        with socket.create_connection(listener.getsockname()) as last:
            last.sendall(b"/v1/stop")
            thread.join()


def test_the_child_of_a_fork_has_connections_of_its_own_and_the_parents_go_on() -> None:
    with plain_node("n0") as (_, url), Client(url) as client:
        assert client.workers()[0].instance == "n0"
        (kept,) = client._connections._kept
        with client._connections._lock:  # as if another thread held it just now
            child = os.fork()
            if not child:
                signal.alarm(60)
                status = 1
                with contextlib.suppress(BaseException):
                    status = int(client.workers(timeout=20)[0].instance != "n0" or client._connections._kept == [kept])
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert client.workers()[0].instance == "n0"
        assert client._connections._kept == [kept]


def test_a_server_is_its_process_alone_and_closing_it_in_a_child_does_nothing() -> None:
    from kvstore.control import ControlSettings
    from kvstore.control.app import build_app
    from kvstore.control.server import HttpServer
    from kvstore.metrics import Metrics
    from tests.control_support import PlainInstance

    settings = ControlSettings()
    with HttpServer(build_app(PlainInstance(), settings=settings, metrics=Metrics()), settings) as server:
        child = os.fork()
        if not child:
            begun = time.monotonic()
            server.close()
            os._exit(int(time.monotonic() - begun > 3))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        with Client(server.url) as client:
            assert client.workers()[0].instance == "n0"


def test_one_client_for_many_threads() -> None:
    keys = keys_of(1, 8)
    with plain_node("n0") as (instance, url), Client(url, timeout=60) as client:
        instance.put("", "memory", keys)
        wrong: list[object] = []

        def ask(number: int) -> None:
            for _ in range(20):
                found = client.lookup(keys=keys[: number + 1])
                if (found.chunks, found.hit_chunks) != (number + 1, number + 1):
                    wrong.append(found)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(client._connections._kept) <= 8


@pytest.mark.slow  # mypy reads all of kvstore for it
def test_a_program_that_uses_the_client_is_checked_by_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from kvstore.control import Client, Job
from kvstore.keys import KeyContext


def warm(url: str, prompt: list[int], context: KeyContext) -> tuple[str, int, dict[str, float]]:
    with Client(url, token="t", timeout=2.0) as control:
        found = control.lookup(tokens=prompt, context=context, instances=["n0"])
        control.pin(tokens=prompt, context=context, ttl_s=60)
        finished = control.wait(control.clear(model="m"), timeout=60)
        job: Job = finished.jobs["n0"]
        route = control.route(tokens=prompt, context=context, candidates={"n0": 1.0, "n1": None})
        loads = {worker.instance: worker.load for worker in control.workers()}
        return route.instance, found.hit_tokens + job.done, loads
""")
    (tmp_path / "wrong.py").write_text(
        "from kvstore.control import Client\nname: int = Client('http://a').workers()[0].instance\n"
    )
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    right = subprocess.run([*words, str(program)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert right.returncode == 0, right.stdout
    wrong = subprocess.run(
        [*words, str(tmp_path / "wrong.py")], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "Incompatible types" in wrong.stdout
