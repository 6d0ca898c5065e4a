"""One HTTP/1.1 connection: heads, bodies by length, in chunks and to the end, cuts, silence, early answers."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore_backends.s3.http import Body, Connection, Head, LinkError, Stopped, Timing, request_head
from tests.servers.certificate import make_certificate

PATIENT = Timing(time.monotonic() + 3600, 30.0)


class Pair:
    """A connection and the server's end of it."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        self.connection = Connection(ours)

    def says(self, *parts: bytes, end: bool = False) -> None:
        for part in parts:
            self.peer.sendall(part)
        if end:
            self.peer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.connection.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    both.close()


def read(pair: Pair, size: int, timing: Timing = PATIENT, method: str = "GET") -> tuple[Head, Body, bytes]:
    head = pair.connection.read_head(timing)
    body = Body(pair.connection, method, head, timing)
    into = bytearray(size)
    return head, body, bytes(into[: body.readinto(memoryview(into))])


def test_a_head_is_parsed_and_the_body_lands_where_it_should(pair: Pair) -> None:
    pair.says(b'HTTP/1.1 206 Partial\r\nContent-Length: 10\r\nETag:  "e" \r\nX-A: 1\r\nx-a: 2\r\n\r\n0123456789')
    head, body, got = read(pair, 4)
    assert head == (206, {"content-length": "10", "etag": '"e"', "x-a": "1, 2"}, True)
    assert (got, body.left, body.ended) == (b"0123", 6, False)
    assert body.read(100) == b"456789"
    assert body.ended


def test_interim_answers_are_passed_over(pair: Pair) -> None:
    pair.says(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 None\r\n\r\n")
    head, body, got = read(pair, 4)
    assert (head.status, got, body.ended) == (204, b"", True)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_body_in_chunks(pair: Pair, piece: int) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\nA\r\n0123456789\r\n0\r\nt: 1\r\n\r\n"
    sender = threading.Thread(target=pair.says, args=[data[at : at + piece] for at in range(0, len(data), piece)])
    sender.start()
    _, body, got = read(pair, 6)
    assert got == b"abcd01"
    assert body.read(100) == b"23456789"
    assert body.ended
    sender.join()


def test_a_body_up_to_the_end(pair: Pair) -> None:
    pair.says(b"HTTP/1.0 200 OK\r\n\r\nall of it", end=True)
    head, body, got = read(pair, 100)
    assert not head.keep
    assert (got, body.ended) == (b"all of it", True)


def test_head_has_no_body_whatever_its_length_says(pair: Pair) -> None:
    pair.says(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
    _, body, got = read(pair, 10, method="HEAD")
    assert (got, body.ended) == (b"", True)


@pytest.mark.parametrize("end", ["close", "silence"])
def test_a_cut_body_tells_how_far_it_came(pair: Pair, end: str) -> None:
    pair.says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123", end=end == "close")
    with pytest.raises(Stopped) as caught:
        read(pair, 10, Timing(PATIENT.until, 0.05))
    assert caught.value.done == 4
    assert caught.value.error.kind == ("short" if end == "close" else "silence")


def test_a_cut_chunk_tells_how_far_it_came(pair: Pair) -> None:
    pair.says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\nA\r\n012", end=True)
    with pytest.raises(Stopped) as caught:
        read(pair, 14)
    assert caught.value.done == 7
    assert caught.value.error.kind == "short"


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_not_http_is_refused(pair: Pair, text: bytes) -> None:
    pair.says(text)
    with pytest.raises(LinkError) as caught:
        read(pair, 10)
    assert caught.value.kind == "protocol"


def test_a_chunk_without_a_length_is_refused(pair: Pair) -> None:
    pair.says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabcd\r\n")
    with pytest.raises(Stopped) as caught:
        read(pair, 4)
    assert caught.value.error.kind == "protocol"


def test_an_answer_that_is_too_long_for_memory_is_refused(pair: Pair) -> None:
    pair.says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789")
    head = pair.connection.read_head(PATIENT)
    with pytest.raises(LinkError, match="exceeds 9 bytes"):
        Body(pair.connection, "GET", head, PATIENT).read(9)


def test_a_silent_server_is_given_up_by_the_deadline_or_the_silence(pair: Pair) -> None:
    now = time.monotonic()
    for timing, kind in ((Timing(now + 0.05, 30.0), "deadline"), (Timing(now + 30, 0.05), "silence")):
        begin = time.monotonic()
        with pytest.raises(LinkError) as caught:
            pair.connection.read_head(timing)
        assert caught.value.kind == kind
        assert time.monotonic() - begin < 10.0
    with pytest.raises(LinkError) as caught:
        pair.connection.read_head(Timing(now - 1, 30.0))
    assert caught.value.kind == "deadline"


def test_a_dripping_server_is_given_up_at_the_deadline(pair: Pair) -> None:
    """Each byte comes in time, all of them never."""
    stop = threading.Event()

    def drip() -> None:
        pair.says(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.01):
            try:
                pair.peer.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(Stopped) as caught:
        read(pair, 100_000, Timing(begin + 0.2, 30.0))
    assert caught.value.error.kind == "deadline"
    assert time.monotonic() - begin < 10.0
    stop.set()
    thread.join()


def _drain(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


@pytest.mark.parametrize("sizes", [[0], [1] * 3000, [5 << 20, 0, 3, 4 << 20], [17] * 600 + [1 << 20]])
def test_views_are_sent_in_order(pair: Pair, sizes: Sequence[int]) -> None:
    data = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    whole = b"head" + b"".join(data)
    got: list[bytes] = []
    peer = threading.Thread(target=lambda: got.append(_drain(pair.peer, len(whole))))
    peer.start()
    assert pair.connection.send(b"head", [memoryview(part) for part in data], PATIENT)
    peer.join()
    assert got == [whole]


def test_an_early_answer_stops_the_sending(pair: Pair) -> None:
    """A server that refuses (412) and reads no further; the answer is read, not waited for."""
    pair.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    taken = threading.Thread(target=_drain, args=(pair.peer, 6 << 20))
    taken.start()
    pair.says(b"HTTP/1.1 412 Failed\r\nContent-Length: 0\r\n\r\n")
    views = [memoryview(bytes(1 << 20))] * 64
    assert not pair.connection.send(b"head", views, Timing(time.monotonic() + 30, 5.0))
    assert pair.connection.read_head(PATIENT).status == 412
    pair.peer.shutdown(socket.SHUT_RDWR)
    taken.join()


def test_a_server_that_hangs_up_while_it_is_sent_to(pair: Pair) -> None:
    pair.peer.close()
    assert not pair.connection.send(b"head", [memoryview(bytes(1 << 22))] * 4, PATIENT)
    with pytest.raises(LinkError) as caught:
        pair.connection.read_head(PATIENT)
    assert caught.value.kind == "closed"


@pytest.mark.parametrize(("deadline", "silence", "kind"), [(0.1, 30.0, "deadline"), (30.0, 0.1, "silence")])
def test_a_server_that_takes_nothing_is_given_up(pair: Pair, deadline: float, silence: float, kind: str) -> None:
    views = [memoryview(bytes(1 << 20))] * 64
    begin = time.monotonic()
    with pytest.raises(LinkError) as caught:
        pair.connection.send(b"head", views, Timing(begin + deadline, silence))
    assert caught.value.kind == kind
    assert time.monotonic() - begin < 10.0


def test_a_request_head_has_no_expect_and_no_line_breaks() -> None:
    assert request_head("PUT", "/b/k", {"Host": "h", "Expect": "100-continue", "A": "1"}) == (
        b"PUT /b/k HTTP/1.1\r\nHost: h\r\nA: 1\r\nAccept-Encoding: identity\r\n\r\n"
    )
    assert request_head("GET", "/", {"accept-encoding": "x"}) == b"GET / HTTP/1.1\r\naccept-encoding: x\r\n\r\n"
    with pytest.raises(LinkError, match="header X holds a line break"):
        request_head("PUT", "/", {"X": "a\r\nB: c"})


def test_pull_takes_what_is_there_and_notices_the_end(pair: Pair) -> None:
    assert not pair.connection.readable()
    assert not pair.connection.pull()
    pair.says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert pair.connection.readable(5.0)
    assert pair.connection.pull()
    assert pair.connection.readable()
    assert pair.connection.read_head(PATIENT).status == 200
    pair.peer.close()
    with pytest.raises(LinkError):
        pair.connection.pull()


@pytest.mark.parametrize("sizes", [[10] * 5000, [3 << 20, 1, 70_000]])
def test_over_tls(tmp_path: Path, sizes: Sequence[int]) -> None:
    """Small views are joined into records, large ones are not; a body is decrypted into its destination."""
    pem = make_certificate(tmp_path / "server.pem")
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(pem)
    client_side = ssl.create_default_context(cafile=str(pem))
    ours, theirs = socket.socketpair()
    data = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    whole = b"".join(data)
    got: list[bytes] = []

    def serve() -> None:
        with server_side.wrap_socket(theirs, server_side=True) as peer:
            got.append(_drain(peer, len(whole) + 4))
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole)

    thread = threading.Thread(target=serve)
    thread.start()
    connection = Connection(client_side.wrap_socket(ours, server_hostname="localhost"))
    assert connection.send(b"head", [memoryview(part) for part in data], PATIENT)
    head = connection.read_head(PATIENT)
    into = bytearray(len(whole))
    assert Body(connection, "GET", head, PATIENT).readinto(memoryview(into)) == len(whole)
    assert into == whole
    connection.close()
    thread.join()
    assert got == [b"head" + whole]
