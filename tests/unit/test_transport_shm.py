"""Bodies in shared memory, both sides in this process, over a pair of Unix-domain sockets."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffers import BufferPool, Slab
from kvstore_transport import _shm_places, shm
from kvstore_transport._shm_memory import Attachment
from kvstore_transport._shm_places import INLINE, Place, pack_places, pack_slabs
from kvstore_transport.control import Control, EarlyReply
from kvstore_transport.errors import (
    ConnectionLost,
    DeadlinePassed,
    ProtocolError,
    TransportClosed,
    TransportUnavailable,
)
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
    """Mappings of shared slabs in this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("/memfd:kvstore-slab" in line for line in maps)


def private(nbytes: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * nbytes)


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 32 << 10, (32 << 10) + 1, 256 << 10, (256 << 10) + 1, 8 * MIB])
def test_every_size_arrives_whole(nbytes: int, registered: bool) -> None:
    with ends() as both, slab(nbytes + 100) as memory:
        memory.view[50 : 50 + nbytes] = RANDOM[:nbytes]
        if registered:
            both.a.register(memory.view, memory.fd)
        into = private(nbytes + 2, 0xA5)
        both.move([memory.view[50 : 50 + nbytes].toreadonly()], [into[1 : 1 + nbytes]])
        assert into == b"\xa5" + RANDOM[:nbytes] + b"\xa5"


def test_64_mib_both_ways_at_both_sides() -> None:
    with ends() as both, slab(64 * MIB, RANDOM * 8) as one, slab(64 * MIB) as other:
        both.a.register(one.view, one.fd)
        both.b.register(other.view, other.fd)
        both.move([one.view], [other.view])
        assert other.view == one.view
        one.view[:] = bytes(64 * MIB)
        sending = both.pool.submit(lambda: both.b.send([other.view], 64 * MIB, number=2, deadline=math.inf))
        both.a.receive([one.view], 64 * MIB, number=2, deadline=math.inf)
        sending.result(30)
        assert one.view[: 8 * MIB] == RANDOM
        assert other.view == one.view


pieces = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200_000), st.integers(0, 70_000)), max_size=12)


@given(pieces=pieces, cuts=st.lists(st.integers(0, 10_000_000), max_size=12))
def test_any_views_into_any_destinations(pieces: list[tuple[int, int, int]], cuts: list[int]) -> None:
    """Registered, private, tiny, neighbouring and repeated views, cut anew at the receiver: as if joined."""
    memories = [Slab(300_000, shared=True), Slab(300_000, shared=True), Slab(300_000)]
    for index, memory in enumerate(memories):
        memory.view[:] = RANDOM[index * 300_000 : (index + 1) * 300_000]
    sources = [*(memory.view for memory in memories), memoryview(RANDOM)]
    try:
        with ends() as both:
            for memory in memories:
                both.a.register(memory.view, memory.fd)
            views = [sources[which][at : at + size] for which, at, size in pieces]
            whole = b"".join(views)
            into = private(len(whole))
            edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
            both.move(views, [into[begin:end] for begin, end in zip(edges, [*edges[1:], len(whole)], strict=True)])
            assert into == whole
            del views
    finally:
        for memory in memories:
            memory.close()


def test_thousands_of_scattered_pieces() -> None:
    with ends() as both, slab(8 * MIB, RANDOM) as memory:
        both.a.register(memory.view, memory.fd)
        order = list(range(0, 8 * MIB, 4096))
        random.Random(1).shuffle(order)
        into = private(8 * MIB)
        both.move(
            [memory.view[at : at + 4096] for at in order], [into[at : at + 1024] for at in range(0, 8 * MIB, 1024)]
        )
        assert into == b"".join(RANDOM[at : at + 4096] for at in order)


def test_large_bodies_in_registered_memory_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends() as both, slab(8 * MIB, RANDOM) as memory:
        both.a.register(memory.view, memory.fd)
        sent: list[int] = []
        original = Control.send

        def counting(self: Control, parts: Sequence[Any], **rest: Any) -> None:
            sent.append(sum(map(len, parts)))
            original(self, parts, **rest)

        monkeypatch.setattr(Control, "send", counting)
        into = private(8 * MIB)
        for number in range(3):
            both.move([memory.view], [into], number=number)
        assert into == RANDOM
        assert sum(sent) < 1024
        both.move(
            [memory.view[:100], memory.view[5000:9000], memory.view[: 6 * MIB]], [private(6 * MIB + 4100)], number=9
        )
        assert 4100 < sum(sent) < 5600  # the small ones do


def test_a_frame_and_the_places_of_its_body_go_out_together() -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        both.move([memory.view], [private(MIB)])  # the descriptor is passed
        assert both.a.joined
        both.a_control.hold_frame(Header(Kind.REPLY, number=2, body_nbytes=MIB), b"meta")
        assert select.select([both.b_control], [], [], 0)[0] == []
        sending = both.send([memory.view], number=2)
        header, meta = both.b_control.receive_frame(limits=both.limits, deadline=time.monotonic() + 30)
        assert (header.kind, header.number, meta) == (Kind.REPLY, 2, b"meta")
        into = private(MIB)
        both.receive([into], number=2)
        sending.result(30)
        assert into == RANDOM[:MIB]


def test_a_descriptor_is_passed_once_and_the_memory_opened_once() -> None:
    with slab(4 * MIB, RANDOM[: 4 * MIB]) as memory, ends() as first, ends() as second:
        opened = len(os.listdir("/proc/self/fd"))
        for both in (first, second):
            both.a.register(memory.view, memory.fd)
            both.a.register(memory.view, memory.fd)
            for number in range(3):
                into = private(MIB)
                both.move([memory.view[number * MIB : (number + 1) * MIB]], [into], number=number)
                assert into == RANDOM[number * MIB : (number + 1) * MIB]
        assert len(shm._ATTACHMENTS) == 1
        assert len(os.listdir("/proc/self/fd")) == opened + 1  # the mapping's
        assert mapped() == 2  # ours, and one for both connections


def test_more_slabs_than_one_message_or_one_connection_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shm_places, "MAX_SLABS", 100)
    with BufferPool(120 * 40_960, slab_bytes=40_960, shared=True, canary=False) as pool, ends() as both:
        for index, memory in enumerate(pool.slabs):
            memory.view[:] = bytes([index]) * 40_960
            both.a.register(memory.view, memory.fd)
        into = private(120 * 40_960)
        both.move([memory.view for memory in pool.slabs], [into])
        assert into == b"".join(bytes([index]) * 40_960 for index in range(120))
        assert len(shm._ATTACHMENTS) == 100


def test_memory_that_cannot_be_shared_is_sent(tmp_path: Path) -> None:
    with ends() as both, open(tmp_path / "file", "wb+") as file:
        file.truncate(MIB)
        unsealed = os.memfd_create("unsealed")
        os.ftruncate(unsealed, MIB)
        for fd in (None, unsealed, file.fileno(), 10_000):
            memory = memoryview(bytearray(RANDOM[:MIB]))
            both.a.register(memory, fd)
            into = private(MIB)
            both.move([memory], [into])
            assert into == RANDOM[:MIB]
        os.close(unsealed)
        assert len(shm._ATTACHMENTS) == 0


def test_registered_memory_stays_mapped_and_its_place_is_not_taken_for_another() -> None:
    """The owner closes a slab while the connection lives: other memory at its address would be sent wrongly."""
    with ends() as both:
        memory = Slab(MIB, shared=True)
        both.a.register(memory.view, memory.fd)
        memory.close()
        assert mapped() == 1
        with slab(MIB, RANDOM[:MIB]) as other:
            into = private(MIB)
            both.move([other.view], [into])  # not registered
            assert into == RANDOM[:MIB]
    assert mapped() == 0


def test_skipped_bodies_cost_nothing_and_the_next_one_is_right() -> None:
    with ends() as both, slab(2 * MIB, RANDOM[: 2 * MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        views = [memory.view[:MIB], memoryview(RANDOM)[:3000], memoryview(RANDOM)]
        sending = both.send(views)
        both.b.skip(sum(map(len, views)), number=1, deadline=math.inf)
        sending.result(30)
        into = private(MIB)
        both.move([memory.view[MIB:]], [into], number=2)
        assert into == RANDOM[MIB : 2 * MIB]


def test_a_reply_instead_of_a_release() -> None:
    with ends() as both, slab(MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view], number=7)
        both.b_control.send_frame(Header(Kind.REPLY, number=7), b"no", deadline=math.inf)
        with pytest.raises(EarlyReply) as caught:
            sending.result(30)
        assert caught.value.meta == b"no"
        assert both.a_control.usable


# --- leases ----------------------------------------------------------------------------------------------------------


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


def test_a_lease_is_the_memory_itself_and_read_only() -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        done = Done()
        view = lease(both, memory.view[100:70_000], done)
        assert view.readonly
        assert view == RANDOM[100:70_000]
        memory.view[100] ^= 0xFF
        assert view[0] == RANDOM[100] ^ 0xFF
        assert mapped() == 2
        assert done.count == 0
        both.b.release(1)
        both.hear_at_a()
        assert done.count == 1
        both.b.release(1)  # once is enough
        assert not both.a_control.peer_gone()
        view.release()
    assert mapped() == 0


def test_leases_come_back_in_any_order_from_any_thread_while_bodies_travel() -> None:
    with ends() as both, slab(8 * MIB, RANDOM) as memory:
        both.a.register(memory.view, memory.fd)
        numbers = list(range(100, 140))
        counts = {number: Done() for number in numbers}
        views = {n: lease(both, memory.view[n * 1000 : n * 1000 + 5000], counts[n], number=n) for n in numbers}
        random.Random(2).shuffle(numbers)

        def give_back(mine: list[int]) -> None:
            for number in mine:
                assert views[number] == RANDOM[number * 1000 : number * 1000 + 5000]
                both.b.release(number)

        threads = [threading.Thread(target=give_back, args=(numbers[part::4],)) for part in range(4)]
        # The holder of the leases sends large bodies of private memory meanwhile: no RELEASE may come in between.
        intos = [private(2 * MIB) for _ in range(6)]

        def receive_all() -> None:
            for number, into in enumerate(intos):
                both.a.receive([into], len(into), number=number, deadline=math.inf)

        receiving = both.pool.submit(receive_all)
        for thread in threads:
            thread.start()
        for number in range(6):
            both.b.send([memoryview(RANDOM)[number : 2 * MIB + number]], 2 * MIB, number=number, deadline=math.inf)
        for thread in threads:
            thread.join(30)
        receiving.result(30)
        assert [bytes(into) for into in intos] == [RANDOM[n : 2 * MIB + n] for n in range(6)]
        while both.a._lent:
            both.hear_at_a()
        assert [done.count for done in counts.values()] == [1] * 40
        views.clear()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_leases_end_with_the_connection(how: str) -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        order: list[str] = []
        view = lease(both, memory.view, lambda: order.append("alive" if not both.b_control.peer_gone() else "gone"))
        getattr(both.a, how)()
        both.a.abort()
        both.a.close()
        assert order == ["gone"]  # its holder could tell before the memory may change
        assert view == RANDOM[:MIB]  # and reads on without harm
        both.b.release(1)  # nothing to say any more
        both.b.close()
        assert mapped() == 2
        view.release()
        assert mapped() == 1
        assert both.a.lend([memory.view], MIB, number=2, done=lambda: None) is None


def test_what_cannot_be_lent_is_sent() -> None:
    with ends() as both, slab(MIB) as memory:
        assert both.a.lend([memory.view], MIB, number=1, done=lambda: None) is None
        both.a.register(memory.view, memory.fd)
        never = Done()
        for views in ([], [memory.view[:0]], [private(5000)], [memory.view[:5000], memory.view[6000:20_000]]):
            assert both.a.lend(views, sum(map(len, views)), number=1, done=never) is None
        neighbours = [memory.view[:5000], memory.view[5000:20_000]]
        assert both.a.lend(neighbours, 20_000, number=1, done=never) is not None
        assert both.a.lend(neighbours, 20_000, number=1, done=Done()) is None  # the number is taken
        assert never.count == 0


def test_a_lease_has_an_end() -> None:
    with ends(stall_s=0.2) as both, slab(MIB) as memory:
        assert both.a.patience() == math.inf
        both.a.register(memory.view, memory.fd)
        done = Done()
        before = time.monotonic()
        lease(both, memory.view, done)
        assert before + 0.2 <= both.a.patience() <= time.monotonic() + 0.2
        with pytest.raises(ConnectionLost, match="nothing heard"):  # here: while it waits for a body
            both.a.receive([private(10)], 10, number=2, deadline=math.inf)
        assert done.count == 1
        assert both.b_control.peer_gone()


# --- the peer lies ---------------------------------------------------------------------------------------------------


LIES: dict[str, bytes] = {
    "nothing": b"",
    "no letter of ours": b"X" + bytes(20),
    "half a place": pack_places([Place(0, 0, 100_000)])[:-1],
    "no place at all": b"B",
    "an unknown slab": pack_places([Place(1, 0, 100_000)]),
    "behind the end": pack_places([Place(0, MIB - 99_999, 100_000)]),
    "beyond 2^64": pack_places([Place(0, (1 << 64) - 1, 100_000)]),
    "wholly outside": pack_places([Place(0, 1 << 40, 100_000)]),
    "an empty place": pack_places([Place(0, 0, 100_000), Place(0, 0, 0)]),
    "too little": pack_places([Place(0, 0, 99_999)]),
    "too much": pack_places([Place(0, 0, 100_001)]),
    "a sum beyond 2^64": pack_places([Place(INLINE, 0, (1 << 64) - 1), Place(0, 0, 100_001)]),
    "an offset of bytes that are sent": pack_places([Place(INLINE, 1, 100_000)]),
    "no slab": b"A",
    "half a slab": b"A" + bytes(7),
    "too many slabs at a time": pack_slabs([4096] * 65),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_places(lie: str) -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        both.move([memory.view[:50_000]], [private(50_000)])  # slab 0 is known now
        both.grant(LIES[lie], number=2)
        into = private(100_000, 0xA5)
        with pytest.raises(ProtocolError):
            both.receive([into], number=2, deadline=time.monotonic() + 30)
        assert into == b"\xa5" * 100_000
        assert both.a_control.peer_gone()


def test_lies_about_leases() -> None:
    for place in (
        b"",
        *LIES.values(),
        pack_places([Place(INLINE, 0, 100_000)]),
        pack_places([Place(0, 0, 50_000)] * 2),
    ):
        with ends() as both, slab(MIB) as memory:
            both.a.register(memory.view, memory.fd)
            both.move([memory.view[:50_000]], [private(50_000)])
            with pytest.raises(ProtocolError):
                both.b.take(place, 100_000, number=2, deadline=math.inf)
            assert both.a_control.peer_gone()


def test_too_many_slabs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shm_places, "MAX_SLABS", 3)
    with ends() as both, slab(4096) as memory:
        assert memory.fd is not None
        for count in (2, 2):
            both.grant(pack_slabs([4096] * count))
            both.a_control.send_fds([memory.fd] * count, deadline=math.inf)
        with pytest.raises(ProtocolError, match="2 slabs"):
            both.receive([private(10)])


def sealed(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def huge() -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(fd, 2 * MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED | 0x10)
    return fd


FALSE: dict[str, Callable[[], int]] = {
    "a device": lambda: os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC),
    "a file": lambda: os.open(__file__, os.O_RDONLY | os.O_CLOEXEC),
    "a file that could shrink": lambda: sealed(2 * MIB, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE),
    "one that could grow": lambda: sealed(2 * MIB, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
    "one that we could write to": lambda: sealed(2 * MIB, FIXED),
    "one of another size": lambda: sealed(2 * MIB - 1, FIXED | fcntl.F_SEAL_WRITE),
    "an empty one": lambda: sealed(0, FIXED | fcntl.F_SEAL_WRITE),
    "huge pages that may not be there": huge,
}


@pytest.mark.parametrize("what", FALSE)
@pytest.mark.parametrize("first", [0, 1])
def test_memory_that_could_hurt_us_is_refused(what: str, first: int) -> None:
    try:
        fd = FALSE[what]()
    except OSError as error:  # no such pages in this kernel
        pytest.skip(str(error))
    with ends() as both, slab(2 * MIB) as good:
        assert good.fd is not None
        both.grant(pack_slabs([2 * MIB] * 2))
        both.a_control.send_fds([fd, good.fd][:: 1 if first else -1], deadline=math.inf)
        with pytest.raises(ProtocolError, match="the peer passed"):
            both.receive([private(10)])
        os.close(fd)
        assert both.a_control.peer_gone()


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_descriptors_than_announced(count: int) -> None:
    with ends() as both, slab(4096) as memory:
        assert memory.fd is not None
        both.grant(pack_slabs([4096] * 2))
        both.a_control.send_fds([memory.fd] * count, deadline=math.inf)
        with pytest.raises(ProtocolError):
            both.receive([private(10)])


@pytest.mark.parametrize("kind", [Kind.RELEASE, Kind.GRANT, Kind.REQUEST])
def test_frames_out_of_turn(kind: Kind) -> None:
    with ends() as both, slab(MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view], number=3)
        both.b_control.send_frame(Header(kind, number=4), b"", deadline=math.inf)
        with pytest.raises(ProtocolError, match="out of turn"):
            sending.result(30)
        assert both.b_control.peer_gone()


# --- time, and ends --------------------------------------------------------------------------------------------------


def test_nobody_releases() -> None:
    for limits, deadline, error in (({}, 0.1, DeadlinePassed), ({"stall_s": 0.1}, math.inf, ConnectionLost)):
        with ends(**limits) as both, slab(MIB) as memory:
            both.a.register(memory.view, memory.fd)
            begin = time.monotonic()
            with pytest.raises(error):
                both.a.send([memory.view], MIB, number=1, deadline=begin + deadline)
            assert time.monotonic() - begin >= 0.1
            assert both.b_control.peer_gone()  # before `send` came back


def test_nobody_says_where() -> None:
    for limits, deadline, error in (({}, 0.1, DeadlinePassed), ({"stall_s": 0.1}, math.inf, ConnectionLost)):
        with ends(**limits) as both, pytest.raises(error):
            both.receive([private(10)], deadline=time.monotonic() + deadline)


class Gate:
    """Holds up the copy of the first piece of a body, in the receiver, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = Attachment.read_into

        def read_into(attachment: Any, views: Any, offset: int) -> None:
            original(attachment, views, offset)
            self.reached.set()
            assert self.go.wait(30)

        monkeypatch.setattr(Attachment, "read_into", read_into)
        monkeypatch.setattr(shm, "_COPY_BYTES", MIB)


def test_bytes_that_changed_under_the_copy_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB, RANDOM[: 4 * MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view], deadline=time.monotonic() + 2.0)
        into = private(4 * MIB)
        receiving = both.pool.submit(lambda: both.receive([into], number=1))
        assert gate.reached.wait(30)
        with pytest.raises(DeadlinePassed):
            sending.result(30)
        memory.view[:] = bytes(4 * MIB)  # its owner may
        gate.go.set()
        with pytest.raises(ConnectionLost):
            receiving.result(30)
        assert into == RANDOM[:MIB] + bytes(3 * MIB)  # torn indeed


def test_nothing_is_written_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB, RANDOM[: 4 * MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        into = private(4 * MIB)
        receiving = both.pool.submit(lambda: both.receive([into]))
        assert gate.reached.wait(30)
        aborting = threading.Thread(target=both.b.abort)
        aborting.start()
        aborting.join(0.05)
        assert aborting.is_alive()  # it waits for the piece that is under way
        gate.go.set()
        aborting.join(30)
        into[:] = b"\xa5" * len(into)
        for future in (sending, receiving):
            with pytest.raises((TransportClosed, ConnectionLost)):
                future.result(30)
        assert into == b"\xa5" * len(into)


def test_the_deadline_holds_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        deadline = time.monotonic() + 1.0
        receiving = both.pool.submit(lambda: both.receive([private(4 * MIB)], deadline=deadline))
        assert gate.reached.wait(30)
        with pytest.raises(TimeoutError):
            receiving.result(max(0.0, deadline - time.monotonic()) + 0.01)
        gate.go.set()
        with pytest.raises(DeadlinePassed):
            receiving.result(30)
        with pytest.raises(ConnectionLost):
            sending.result(30)


def test_the_other_side_closes() -> None:
    with ends() as both, slab(MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        both.b.abort()
        with pytest.raises(ConnectionLost):
            sending.result(30)
    with ends() as both:
        both.a.abort()
        with pytest.raises(ConnectionLost):
            both.receive([private(10)])
        with pytest.raises(TransportClosed):
            both.receive([private(10)])


# --- who, and where --------------------------------------------------------------------------------------------------


def test_facts_and_agreement() -> None:
    way = SharedWay()
    mine = way.facts(server=True)
    assert way.agree(mine, way.facts(server=False)) == ""
    others: list[dict[str, object]] = [{}, {"host": "another"}, {"host": 5}, {"host": ["x"]}]
    for theirs in others:
        assert way.agree(mine, theirs) == "not on the same host"


def test_only_over_a_unix_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        control = Control(accepted, "x")
        with pytest.raises(TransportUnavailable, match="path of a Unix socket"):
            SharedWay().open(control, server=True, mine={}, theirs={}, limits=Limits(), deadline=math.inf)
        control.close()
        client.close()


def test_a_forked_child_leaves_the_connection_alone() -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        done = Done()
        view = lease(both, memory.view, done)
        with shm._ATTACHMENTS._lock, both.b._state, both.a._state, both.a._order:  # as if other threads held them
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    both.b.release(1)
                    for bodies in (both.a, both.b):
                        bodies.abort()
                        bodies.close()
                        try:
                            bodies.receive([private(10)], 10, number=1, deadline=math.inf)
                        except TransportClosed:
                            code = 0
                finally:
                    os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert done.count == 0
        assert not both.b_control.peer_gone()
        into = private(MIB)
        both.move([memory.view], [into], number=2)
        assert into == view
        view.release()
