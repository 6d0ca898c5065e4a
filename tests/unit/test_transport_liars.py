"""What a client bears from a server that lies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest

from kvstore_transport import (
    ConnectionLost,
    Limits,
    ProtocolError,
    TransportError,
    connect,
)
from kvstore_transport.control import Control
from kvstore_transport.frames import Flags, Header, Kind, pack_header
from tests.transport_support import ECHO, plan_into, soon, tls_contexts
from tests.unit.server_support import HELLO, LIMITS

# A server that lies.


@contextmanager
def lying_server(*frames: bytes, sums: bool = False, hold: bool = False) -> Iterator[str]:
    """Greets, reads one request without a body, says `frames`."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def run() -> None:
        sock, _ = listener.accept()
        control = Control(sock, "client", stall_s=30.0)
        try:
            control.receive_frame(limits=LIMITS, deadline=soon())
            said = {"transport": "tcp", "note": "", "way": {}, "proof": b""}
            control.send_frame(Header(Kind.WELCOME), msgpack.packb({**HELLO, **said}), deadline=soon())
            control.receive_frame(limits=LIMITS, deadline=soon())
            control.send(frames, deadline=soon())
            if hold:
                done.wait(30)
        except TransportError:
            pass
        finally:
            control.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        thread.join(30)
        listener.close()


BODY = b"0123456789"


@pytest.mark.parametrize(
    "frames",
    [
        [pack_header(Header(Kind.REPLY, number=1, body_nbytes=1 << 40), b"")],
        [pack_header(Header(Kind.REPLY, number=2), b"")],
        [pack_header(Header(Kind.REQUEST, number=1), b"")],
        [pack_header(Header(Kind.GRANT, number=1), b"")],
        [pack_header(Header(Kind.RELEASE, number=1), b"")],
        [pack_header(Header(Kind.REPLY, 0, Flags.LEASE, 1, 0, 10), b""), BODY],
        [pack_header(Header(Kind.REPLY, 0, Flags.BODY_SUM, 1, 0, 10, 0, 7), b""), BODY],
        [pack_header(Header(Kind.REPLY, number=1, body_nbytes=11), b""), BODY + b"x"],
        [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)],
    ],
)
def test_a_lying_server_is_a_protocol_error(frames: list[bytes]) -> None:
    into = bytearray(10)
    with (
        lying_server(*frames) as address,
        connect(address, transport="tcp", deadline=soon()) as channel,
        pytest.raises(ProtocolError, match=address),
    ):
        channel.call(ECHO, b"", plan=plan_into(memoryview(into)), deadline=soon())
    assert not channel.usable


def test_a_reply_without_the_sum_that_was_agreed_upon() -> None:
    frame = pack_header(Header(Kind.REPLY, number=1, body_nbytes=10), b"")
    with (
        lying_server(frame, BODY) as address,
        connect(address, transport="tcp", body_sums=True, deadline=soon()) as channel,
        pytest.raises(ProtocolError, match="checksum"),
    ):
        channel.call(ECHO, b"", plan=plan_into(memoryview(bytearray(10))), deadline=soon())


@pytest.mark.parametrize("cut", [20, 48, 50, 57])
def test_a_reply_that_is_cut_off(cut: int) -> None:
    frame = pack_header(Header(Kind.REPLY, number=1, body_nbytes=10), b"meta") + b"meta" + BODY
    with (
        lying_server(frame[:cut]) as address,
        connect(address, transport="tcp", deadline=soon()) as channel,
        pytest.raises(ConnectionLost),
    ):
        channel.call(ECHO, b"", plan=plan_into(memoryview(bytearray(10))), deadline=soon())


def test_something_else_listens_there() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def web() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            sock.recv(100)

    thread = threading.Thread(target=web)
    thread.start()
    with pytest.raises(ProtocolError, match="no frame of ours"):
        connect(f"127.0.0.1:{listener.getsockname()[1]}", transport="tcp", deadline=soon())
    thread.join(30)
    listener.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_accepts_and_never_answers(tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        context = tls_contexts()[1] if tls else None
        with pytest.raises(ConnectionLost, match=r"no handshake within 0\.2 s"):
            connect(address, transport="tcp", tls=context, limits=Limits(handshake_s=0.2), deadline=soon())
