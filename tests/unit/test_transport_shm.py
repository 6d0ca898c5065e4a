"""Bodies and leases in shared memory, both sides in this process, over a pair of Unix-domain sockets."""

from __future__ import annotations

import math
import os
import random
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffers import BufferPool, Slab
from kvstore_transport import _shm_places, shm
from kvstore_transport.control import Control, EarlyReply
from kvstore_transport.errors import (
    ConnectionLost,
)
from kvstore_transport.frames import Header, Kind
from tests.unit.shm_support import MIB, RANDOM, Done, ends, lease, mapped, no_memory_left_behind, private, slab

__all__ = ["no_memory_left_behind"]  # fixtures


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
