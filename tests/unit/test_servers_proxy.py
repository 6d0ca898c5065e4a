"""Each fault of the proxy is the fault it claims to be, at the byte it claims, as often as scripted."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest

from tests.servers.fault_proxy import Answer, Cut, Drip, FaultProxy, Flip, IgnoreRange, Link, Request, Run, Silence
from tests.servers.null_server import NullServer

DATA = bytes(range(256)) * 2000
PATH = "/proxy/object"


class Client:
    def __init__(self, proxy: FaultProxy, timeout: float = 10.0) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)

    def __call__(self, method: str, path: str = PATH, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def partly(self) -> tuple[bytes, BaseException | None]:
        """GET, read byte by byte as long as it goes: what came, and what ended it (None: the server closed)."""
        self.connection.request("GET", PATH)
        answer, got = self.connection.getresponse(), bytearray()
        try:
            while piece := answer.read1(1 << 16):
                got += piece
        except (OSError, http.client.HTTPException) as error:
            return bytes(got), error
        finally:
            answer.close()
            self.connection.close()
        return bytes(got), None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@pytest.fixture(autouse=True)
def _stored(null_proxy: FaultProxy) -> None:
    with Client(null_proxy) as client:
        assert client("PUT", body=DATA)[0] == 200
    null_proxy.requests.clear()


def test_without_a_script_nothing_changes(null_proxy: FaultProxy) -> None:
    with Client(null_proxy) as client:
        before = null_proxy.connections
        assert client("GET") == (200, DATA)
        assert client("GET", Range="bytes=5-9") == (206, DATA[5:10])
        assert client("HEAD") == (200, b"")
        assert client("GET", "/proxy/nothing")[0] == 404
        assert null_proxy.connections - before == 1, "one connection, kept alive"
    assert [request.method for request in null_proxy.requests] == ["GET", "GET", "HEAD", "GET"]
    assert null_proxy.requests[1].headers["range"] == "bytes=5-9"


@pytest.mark.parametrize(("how", "error"), [("rst", ConnectionResetError), ("fin", None), ("stall", TimeoutError)])
def test_a_cut_is_at_the_byte_it_names(null_proxy: FaultProxy, how: str, error: type[BaseException] | None) -> None:
    null_proxy.next(Cut(how, after=1234))  # type: ignore[arg-type]
    with Client(null_proxy, timeout=0.3) as client:
        got, ended = client.partly()
        assert got == DATA[:1234]
        assert ended is None if error is None else isinstance(ended, error)
        assert client("GET") == (200, DATA), "one request only"


def test_an_answer_that_never_begins(null_proxy: FaultProxy) -> None:
    null_proxy.next(Cut("rst", after=None), only="PUT")
    with Client(null_proxy) as client:
        with pytest.raises(ConnectionResetError):
            client("PUT", "/proxy/lost", b"stored all the same")
        client.connection.close()
        assert client("GET", "/proxy/lost") == (200, b"stored all the same")


def test_a_request_cut_in_its_body_stores_nothing(null_proxy: FaultProxy) -> None:
    null_proxy.next(Cut("rst", after=1000, where="request"))
    with Client(null_proxy) as client:
        with pytest.raises(ConnectionError):
            client("PUT", "/proxy/half", DATA * 8)
        client.connection.close()
        assert client("GET", "/proxy/half")[0] == 404


@pytest.mark.parametrize("forward", [False, True])
def test_silence(null_proxy: FaultProxy, forward: bool) -> None:
    null_proxy.next(Silence(forward=forward), only="PUT")
    name = f"/proxy/silent{forward}"
    with Client(null_proxy, timeout=0.3) as client:
        with pytest.raises(TimeoutError):
            client("PUT", name, b"x")
        client.connection.close()
        assert client("GET", name)[0] == (200 if forward else 404)


def test_scripted_answers_come_in_order_and_as_often_as_said(null_proxy: FaultProxy) -> None:
    null_proxy.repeat(Answer(503, "SlowDown", (("Retry-After", "1"),)), 2, only="GET")
    null_proxy.next(Answer(400, "ExpiredToken"), match=lambda request: request.method == "GET")
    assert null_proxy.pending == 3
    with Client(null_proxy) as client:
        assert client("HEAD")[0] == 200, "not meant for it"
        answers = [client("GET") for _ in range(4)]
        assert [status for status, _ in answers] == [503, 503, 400, 200]
        assert b"<Code>SlowDown</Code>" in answers[0][1]
        assert b"<Code>ExpiredToken</Code>" in answers[2][1]
        assert client("PUT", "/proxy/answered", DATA)[0] == 200
    assert null_proxy.pending == 0
    assert null_proxy.count("GET") == 4


def test_every_lasts_until_it_is_cleared(null_proxy: FaultProxy) -> None:
    null_proxy.every(Answer(500, "InternalError"), only="GET")
    with Client(null_proxy) as client:
        assert [client("GET")[0] for _ in range(5)] == [500] * 5
        assert client("HEAD")[0] == 200
        null_proxy.clear()
        assert client("GET")[0] == 200


def test_one_byte_is_flipped(null_proxy: FaultProxy) -> None:
    null_proxy.next(Flip(300_000))
    with Client(null_proxy) as client:
        _, got = client("GET")
    assert [at for at in range(len(DATA)) if got[at] != DATA[at]] == [300_000]
    assert got[300_000] == DATA[300_000] ^ 0xFF


def test_a_server_without_ranges(null_proxy: FaultProxy) -> None:
    null_proxy.next(IgnoreRange())
    with Client(null_proxy) as client:
        assert client("GET", Range="bytes=5-9") == (200, DATA)


def test_something_happens_just_before(null_proxy: FaultProxy, null_server: NullServer) -> None:
    def replace() -> None:
        other = http.client.HTTPConnection("127.0.0.1", null_server.port, timeout=5)
        other.request("PUT", PATH, b"new")
        other.getresponse().read()
        other.close()

    null_proxy.next(Run(replace))
    with Client(null_proxy) as client:
        assert client("GET") == (200, b"new")


def test_latency_and_a_shared_bandwidth(null_proxy: FaultProxy) -> None:
    null_proxy.always(Link(latency_s=0.05))
    with Client(null_proxy) as client:
        start = time.monotonic()
        client("HEAD")
        assert time.monotonic() - start >= 0.05
    null_proxy.always(Link(bytes_per_s=10e6))
    done: list[float] = []

    def fetch() -> None:
        with Client(null_proxy) as other:
            other("GET")
        done.append(time.monotonic())

    start = time.monotonic()
    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(done) - start >= 0.9 * 2 * len(DATA) / 10e6, "both bodies go over one link"


def test_a_trickle(null_proxy: FaultProxy) -> None:
    null_proxy.next(Drip(nbytes=1, every_s=0.01))
    with Client(null_proxy, timeout=5) as client:
        client.connection.request("GET", PATH)
        answer = client.connection.getresponse()
        start = time.monotonic()
        assert answer.read(20) == DATA[:20]
        assert time.monotonic() - start >= 0.15
        answer.close()


def test_refusal_and_recovery(null_proxy: FaultProxy) -> None:
    with Client(null_proxy) as client:
        assert client("GET")[0] == 200
        null_proxy.refuse()
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            client("GET")
        client.connection.close()
        with pytest.raises(ConnectionRefusedError):
            client("GET")
        client.connection.close()
        null_proxy.recover()
        assert client("GET") == (200, DATA)


def test_a_black_hole_accepts_nothing_and_answers_nothing(null_proxy: FaultProxy) -> None:
    with Client(null_proxy, timeout=0.3) as kept:
        assert kept("GET")[0] == 200
        null_proxy.black_hole()
        with pytest.raises(TimeoutError):  # an open connection falls silent
            kept("GET")
        for _ in range(5):
            with pytest.raises(TimeoutError):  # a new one is not even established
                socket.create_connection(("127.0.0.1", null_proxy.port), timeout=0.1)
    null_proxy.recover()
    with Client(null_proxy) as client:
        assert client("GET") == (200, DATA)


def test_open_connections_can_be_reset(null_proxy: FaultProxy) -> None:
    with Client(null_proxy) as client:
        client("HEAD")
        null_proxy.drop_connections()
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            client("HEAD")


def test_matching_sees_the_request(null_proxy: FaultProxy) -> None:
    def first_half(request: Request) -> bool:
        return request.headers.get("range", "").startswith("bytes=0-")

    null_proxy.next(Answer(503), match=first_half)
    with Client(null_proxy) as client:
        assert client("GET", Range="bytes=9-19")[0] == 206
        assert client("GET", Range="bytes=0-19")[0] == 503


def test_stopping_twice_and_with_open_connections_leaves_nothing(null_server: NullServer) -> None:
    before = threading.active_count()
    proxy = FaultProxy(null_server.port)
    client = Client(proxy)
    client("HEAD")
    proxy.every(Silence())
    client.connection.request("GET", PATH)
    proxy.stop()
    proxy.stop()
    client.connection.close()
    assert threading.active_count() == before
