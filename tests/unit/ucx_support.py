"""Both sides of a UCX connection in this process, over a pair of sockets."""

from __future__ import annotations

import math
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvstore_transport._ucx_engine import HOST, NET, UcxEngine
from kvstore_transport._ucx_library import Lane, Pending
from kvstore_transport.control import Control
from kvstore_transport.errors import TransportUnavailable
from kvstore_transport.frames import Header, Kind
from kvstore_transport.seam import Limits
from kvstore_transport.ucx import UcxBodies, UcxNetworkWay, UcxWay

MIB = 1 << 20
RANDOM = random.Random(4).randbytes(40 * MIB)
WAYS = {"shm": UcxWay, "tcp": UcxNetworkWay}

try:
    UcxEngine.get()
except TransportUnavailable as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def contexts() -> None:
    """UCX keeps descriptors per process from its first use on: before the audit of a test looks."""
    for kind in (HOST, NET):
        UcxEngine.get().devices(kind)


@pytest.fixture(autouse=True)
def no_lane_left_behind() -> Iterator[None]:
    yield
    assert UcxEngine.get().lanes() == 0


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


class Ends:
    """A connection: `a` sends, `b` receives, if nothing else is said."""

    def __init__(self, way: UcxWay, limits: Limits) -> None:
        left, right = socket.socketpair()
        self.a_control, self.b_control = (
            Control(sock, name, stall_s=limits.stall_s) for sock, name in ((left, "a"), (right, "b"))
        )
        self.pool = ThreadPoolExecutor(2)
        facts = way.facts(server=False)

        def opened(control: Control, server: bool) -> UcxBodies:
            return way.open(control, server=server, mine=facts, theirs=facts, limits=limits, deadline=soon())

        other = self.pool.submit(opened, self.b_control, True)
        self.a = opened(self.a_control, False)
        self.b = other.result(30)

    def send(self, views: Sequence[Any], *, number: int = 1, deadline: float = math.inf) -> Future[None]:
        nbytes = sum(map(len, views))
        return self.pool.submit(lambda: self.a.send(views, nbytes, number=number, deadline=deadline))

    def receive(self, views: Sequence[Any], *, number: int = 1, deadline: float = math.inf) -> None:
        self.b.receive(views, sum(map(len, views)), number=number, deadline=deadline)

    def move(self, views: Sequence[Any], into: Sequence[Any], *, number: int = 1) -> None:
        sending = self.send(views, number=number)
        self.receive(into, number=number)
        sending.result(30)

    def say(self, meta: bytes, *, number: int = 1, kind: Kind = Kind.GRANT) -> None:
        """What a lying sender says."""
        self.a_control.send_frame(Header(kind, number=number), meta, deadline=soon())

    def post(self, data: memoryview, index: int, *, number: int = 1) -> Pending:
        """A message of a lying sender."""
        lane: Lane | None = self.a._messages._lane
        assert lane is not None
        return lane.send(data, self.a._messages.tag(number, index))

    def answer(self, meta: bytes, *, number: int = 1, kind: Kind = Kind.GRANT) -> None:
        """What a lying receiver says."""
        self.b_control.send_frame(Header(kind, number=number), meta, deadline=soon())

    def hear(self) -> bytes:
        """The next frame of `b`, at `a`."""
        return self.a_control.receive_frame(limits=Limits(), deadline=soon())[1]

    def close(self) -> None:
        for bodies, control in ((self.a, self.a_control), (self.b, self.b_control)):
            bodies.close()
            control.close()
        self.pool.shutdown()


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(WAYS[request.param](), Limits(stall_s=20))
    yield ends
    ends.close()


def slices(nbytes: int, size: int, at: int = 0) -> list[memoryview]:
    whole = memoryview(RANDOM)[at : at + nbytes]
    return [whole[start : start + size] for start in range(0, nbytes, size)]


def room(nbytes: int, size: int) -> tuple[bytearray, list[memoryview]]:
    memory = bytearray(b"\xa5" * nbytes)
    view = memoryview(memory)
    return memory, [view[start : start + size] for start in range(0, nbytes, size)]
