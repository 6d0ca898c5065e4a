"""What the tests of the handshake share: servers and clients that say what a test likes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from kvstore_transport import (
    Answer,
    Limits,
    Server,
    TransportError,
    connect,
)
from kvstore_transport.control import Control
from kvstore_transport.frames import Header, Kind
from tests.transport_support import soon

HELLO_LIMITS = Limits(max_meta=64 << 10, max_body=0)


def answer(incoming: Any) -> Answer:
    return Answer(0, incoming.peer.transport.encode())


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    with Server(answer, **{"listen": ("127.0.0.1", 0), **options}) as server:
        yield server


def transport_of(server: Server, **options: Any) -> str:
    """Which transport both sides agreed upon; each is asked."""
    with connect(server.address or server.path, deadline=soon(), **options) as channel:
        theirs = channel.call(0, b"", deadline=soon()).meta.decode()
        assert theirs == channel.peer.transport
        return theirs


@contextmanager
def scripted_server(answers: Callable[[Control, dict[str, Any], bytes], None]) -> Iterator[str]:
    """A server that reads one HELLO and then does as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = listener.accept()
        control = Control(sock, "client", stall_s=30.0)
        try:
            _, meta = control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
            answers(control, msgpack.unpackb(meta), meta)
        except TransportError:
            pass
        finally:
            control.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(30)
        listener.close()


def say(control: Control, kind: Kind, **fields: Any) -> None:
    control.send_frame(Header(kind), msgpack.packb(fields), deadline=soon())


def welcome(**changes: Any) -> dict[str, Any]:
    return {
        "protocol": 1,
        "version": "1",
        "transport": "tcp",
        "note": "",
        "way": {},
        "max_meta": 1000,
        "max_body": 1000,
        "facts": {},
        "proof": b"",
        **changes,
    }


@contextmanager
def raw_client(server: Server) -> Iterator[Control]:
    host, _, port = server.address.rpartition(":")
    control = Control(socket.create_connection((host, int(port))), "server", stall_s=30.0)
    try:
        yield control
    finally:
        control.close()


def hello(**changes: Any) -> dict[str, Any]:
    return {
        "protocol": 1,
        "version": "1",
        "namespace": "",
        "nonce": bytes(16),
        "client": bytes(16),
        "wishes": ["tcp"],
        "ways": {"tcp": {}},
        "max_meta": 64 << 10,
        "max_body": 1000,
        "sums": False,
        "facts": {},
        **changes,
    }


def heard(control: Control) -> tuple[Kind, dict[str, Any]]:
    header, meta = control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
    return header.kind, msgpack.unpackb(meta)


def identify(namespace: str) -> bytes | None:
    return {"": b"", "team": b"the secret"}.get(namespace)
