"""Servers, plain sockets and greeted connections to them, for the tests of what a server or a client must bear."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from kvstore_transport import (
    Limits,
    Server,
    connect,
)
from kvstore_transport.control import Control
from kvstore_transport.frames import Header, Kind
from tests.transport_support import ECHO, Toy, plan_into, soon

LIMITS = Limits(max_meta=1 << 20)
HELLO = {
    "protocol": 1,
    "version": "1",
    "namespace": "",
    "nonce": bytes(16),
    "client": bytes(16),
    "wishes": ["tcp"],
    "ways": {"tcp": {}},
    "max_meta": 1 << 20,
    "max_body": 1 << 30,
    "sums": False,
    "facts": {},
}


@contextmanager
def serving(handler: Any = None, **options: Any) -> Iterator[Server]:
    with Server(handler or Toy(), **{"listen": ("127.0.0.1", 0), **options}) as server:
        yield server


def plug(server: Server) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


@contextmanager
def greeted(server: Server, **changes: Any) -> Iterator[Control]:
    """A connection after the handshake, on which a test says what it likes."""
    control = Control(plug(server), "server", stall_s=30.0)
    try:
        control.send_frame(Header(Kind.HELLO), msgpack.packb({**HELLO, **changes}), deadline=soon())
        header, _ = control.receive_frame(limits=LIMITS, deadline=soon())
        assert header.kind == Kind.WELCOME
        yield control
    finally:
        control.close()


def is_well(server: Server) -> None:
    """A client is served as ever."""
    with connect(server.address or server.path, transport="tcp", deadline=soon()) as channel:
        into = bytearray(4)
        channel.call(ECHO, b"", [memoryview(b"well")], plan=plan_into(memoryview(into)), deadline=soon())
        assert into == b"well"


def ended(sock: socket.socket) -> bool:
    """Reads until the server ends the connection; True when it did."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True
