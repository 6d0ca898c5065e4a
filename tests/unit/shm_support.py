"""Both sides of a connection over shared memory in this process, over a pair of Unix-domain sockets."""

from __future__ import annotations

import gc
import math
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.buffers import Slab
from kvstore_transport import shm
from kvstore_transport.control import Control
from kvstore_transport.frames import Header, Kind
from kvstore_transport.seam import Limits
from kvstore_transport.shm import SharedBodies, SharedWay

MIB = 1 << 20
RANDOM = random.Random(4).randbytes(8 * MIB)


@pytest.fixture(autouse=True)
def no_memory_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shm, "_SMALL_BODY", 32 << 10)  # cheap bodies travel by their places
    monkeypatch.setattr(shm, "_SMALL_PIECE", 4 << 10)
    before = mapped(), len(shm._ATTACHMENTS)
    yield
    assert (mapped(), len(shm._ATTACHMENTS)) == before


class Ends:
    """A connection: `a` sends, `b` receives, if nothing else is said."""

    def __init__(self, limits: Limits) -> None:
        left, right = socket.socketpair()
        self.a_control, self.b_control = (
            Control(sock, name, stall_s=limits.stall_s) for sock, name in ((left, "a"), (right, "b"))
        )
        self.limits = limits
        self.pool = ThreadPoolExecutor(2)
        self.a = self.open(self.a_control)
        self.b = self.open(self.b_control)

    def open(self, control: Control) -> SharedBodies:
        facts = SharedWay().facts(server=True)
        return SharedWay().open(control, server=True, mine=facts, theirs=facts, limits=self.limits, deadline=math.inf)

    def send(self, views: Sequence[memoryview], *, number: int = 1, deadline: float = math.inf) -> Any:
        nbytes = sum(map(len, views))
        return self.pool.submit(lambda: self.a.send(views, nbytes, number=number, deadline=deadline))

    def receive(self, views: Sequence[memoryview], *, number: int = 1, deadline: float = math.inf) -> None:
        self.b.receive(views, sum(map(len, views)), number=number, deadline=deadline)

    def move(self, views: Sequence[memoryview], into: Sequence[memoryview], *, number: int = 1) -> None:
        sending = self.send(views, number=number)
        self.receive(into, number=number)
        sending.result(30)

    def grant(self, meta: bytes, *, number: int = 1, kind: Kind = Kind.GRANT) -> None:
        """What a lying sender says."""
        self.a_control.send_frame(Header(kind, number=number), meta, deadline=math.inf)

    def hear_at_a(self) -> None:
        self.a.heard(*self.a_control.receive_frame(limits=self.limits, deadline=time.monotonic() + 30))

    def close(self) -> None:
        for bodies, control in ((self.a, self.a_control), (self.b, self.b_control)):
            bodies.abort()
            bodies.close()
            control.close()
        self.pool.shutdown()


@contextmanager
def ends(**limits: Any) -> Iterator[Ends]:
    both = Ends(Limits(**{"stall_s": 30.0, **limits}))
    try:
        yield both
    finally:
        both.close()


@contextmanager
def slab(nbytes: int, fill: bytes = b"") -> Iterator[Slab]:
    memory = Slab(nbytes, shared=True)
    memory.view[: len(fill)] = fill
    try:
        yield memory
    finally:
        memory.close()


def mapped() -> int:
    """Mappings of shared slabs in this process, without those of garbage."""
    count = _mappings()
    if count:
        gc.collect()
        count = _mappings()
    return count


def _mappings() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("/memfd:kvstore-slab" in line for line in maps)


def private(nbytes: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * nbytes)


class Done:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def lease(both: Ends, view: memoryview, done: Callable[[], None], *, number: int = 1) -> memoryview:
    place = both.a.lend([view], len(view), number=number, done=done)
    assert place is not None
    if not both.b._slabs:
        both.b.heard(*both.b_control.receive_frame(limits=both.limits, deadline=time.monotonic() + 30))
    return both.b.take(place, len(view), number=number, deadline=math.inf)
