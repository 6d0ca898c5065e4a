"""Fixtures that start a server of each kind of transport, and a handler that can be held up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_transport import (
    Answer,
    Channel,
    Handler,
    Incoming,
)
from tests.transport_support import (
    ECHO,
    KINDS,
    MIB,
    Kind,
    Memory,
    Service,
    Toy,
    params,
    plan_into,
    soon,
)

LARGE = 16 * MIB  # more than sockets take in that nobody reads from (4 MiB of the sender's, 128 KiB of the receiver's)


@pytest.fixture(params=params(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if why := found.missing():
        pytest.skip(why)
    return found


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def serve(kind: Kind, memory: Memory, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a server with the given handler; options as those of `Server`."""
    services: list[Service] = []

    def start(handler: Handler, **options: Any) -> Service:
        services.append(Service(kind, handler, tmp_path, **options))
        return services[-1]

    yield start
    for service in services:
        service.__exit__()


class Held:
    """A handler that waits, where it is told to, until `go` is set. `where`: "before", or "after" receiving."""

    def __init__(self, where: str, then: Handler | None = None) -> None:
        self.where = where
        self.then = then or Toy()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.raised: list[BaseException] = []
        self.ended = threading.Event()

    def __call__(self, incoming: Incoming) -> Answer:
        try:
            if self.where == "after":
                answer = self.then(incoming)
            self.entered.set()
            assert self.go.wait(60)
            if self.where == "before":
                answer = self.then(incoming)
            return answer
        except BaseException as error:
            self.raised.append(error)
            raise
        finally:
            self.ended.set()


def echo(channel: Channel, data: bytes, *, meta: bytes = b"m") -> bytes:
    into = bytearray(len(data))
    reply = channel.call(ECHO, meta, [memoryview(data)], plan=plan_into(memoryview(into)), deadline=soon())
    assert (reply.status, reply.meta, reply.body_nbytes) == (ECHO, meta, len(data))
    return bytes(into)
