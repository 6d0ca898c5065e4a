"""Bodies over UCX, both sides in this process, over a pair of sockets. What takes processes of their own (SIGKILL,
SIGSTOP, a missing library) is in test_transport_ucx_processes.py."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_transport import _ucx_engine
from kvstore_transport._ucx_engine import SlotPool, UcxEngine
from kvstore_transport._ucx_library import Pending
from kvstore_transport._ucx_pieces import pack_offer, pack_table, runs_of
from kvstore_transport.control import Control, EarlyReply
from kvstore_transport.errors import (
    ConnectionLost,
    DeadlinePassed,
    ProtocolError,
    TransportClosed,
    TransportError,
)
from kvstore_transport.frames import Header, Kind
from kvstore_transport.seam import Limits
from kvstore_transport.ucx import UcxBodies, UcxWay
from tests.unit.ucx_support import (
    MIB,
    RANDOM,
    WAYS,
    Ends,
    contexts,
    ends,
    no_lane_left_behind,
    room,
    slices,
    soon,
)

__all__ = ["contexts", "ends", "no_lane_left_behind"]  # fixtures


# What arrives.


@pytest.mark.parametrize(
    ("nbytes", "sent_in", "received_in"),
    [
        (1, 1, 1),
        (256 << 10, 256 << 10, 256 << 10),
        (300_000, 300_000, 7),  # scattered into many small places
        (MIB, 1000, MIB),  # gathered
        (20 * MIB, 20 * MIB, 16 << 10),  # more than the slots hold at a time
        (20 * MIB, 16 << 10, 20 * MIB),
        (20 * MIB, 10_000, 17_000),
        (20 * MIB, 300_000, 310_000),  # in place, cut at both sides' boundaries
        (40 * MIB, 40 * MIB, 40 * MIB),  # longer than a message may be
    ],
)
def test_bodies_arrive_however_they_lie(ends: Ends, nbytes: int, sent_in: int, received_in: int) -> None:
    memory, into = room(nbytes, received_in)
    ends.move(slices(nbytes, sent_in), into)
    assert memory == RANDOM[:nbytes]


def test_many_bodies_one_after_another_in_both_directions(ends: Ends) -> None:
    for number in range(1, 6):
        nbytes = number * 400_000
        memory, into = room(nbytes, nbytes)
        ends.move(slices(nbytes, 100_000), into, number=number)
        assert memory == RANDOM[:nbytes]
        back, into = room(nbytes, nbytes)
        views = slices(nbytes, nbytes, at=5)
        sending = ends.pool.submit(ends.b.send, views, nbytes, number=number, deadline=math.inf)
        ends.a.receive(into, nbytes, number=number, deadline=math.inf)
        sending.result(30)
        assert back == RANDOM[5 : 5 + nbytes]


@pytest.mark.parametrize("nbytes", [100, 3 * MIB])
def test_a_body_that_is_not_wanted_is_not_waited_for(ends: Ends, nbytes: int) -> None:
    sending = ends.send(slices(nbytes, nbytes))
    ends.b.skip(nbytes, number=1, deadline=soon())
    sending.result(30)
    memory, into = room(MIB, MIB)
    ends.move(slices(MIB, MIB), into, number=2)
    assert memory == RANDOM[:MIB]


def test_an_early_reply_passes_and_nothing_was_sent(ends: Ends) -> None:
    sending = ends.send(slices(MIB, MIB))
    ends.b_control.receive_frame(limits=Limits(), deadline=soon())
    ends.answer(b"no", kind=Kind.REPLY)
    with pytest.raises(EarlyReply) as caught:
        sending.result(30)
    assert caught.value.meta == b"no"
    assert ends.a_control.usable


def test_empty_bodies_cost_nothing(ends: Ends) -> None:
    ends.a.send([], 0, number=1, deadline=soon())
    ends.b.receive([], 0, number=1, deadline=soon())
    ends.b.skip(0, number=1, deadline=soon())


# Peers that lie. The receiver's memory is never presented as a body, and everything is cut.


def refused(ends: Ends, into: list[memoryview], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        ends.receive(into, deadline=soon())
    assert not ends.b_control.usable
    assert ends.b._messages._lane is None


@pytest.mark.parametrize("short_by", [8, 1000, MIB // 2, MIB - 1])
def test_a_short_message_is_found_out(ends: Ends, short_by: int) -> None:
    _, into = room(MIB, MIB)
    ends.say(b"O" + pack_offer(runs_of(slices(MIB, MIB))))
    ended = threading.Event()

    def lie() -> None:
        assert ends.hear()[:1] == b"P"
        pending = ends.post(memoryview(RANDOM)[: MIB - short_by], 0)
        drive(ends.a, pending, ended)
        ends.say(b"C")

    lying = ends.pool.submit(lie)
    refused(ends, into, "shorter")
    ended.set()
    lying.exception(30)


def test_a_long_message_is_refused_and_nothing_behind_its_place_is_touched(ends: Ends) -> None:
    memory = bytearray(b"\xa5" * (2 * MIB))
    ends.say(b"O" + pack_offer(runs_of(slices(MIB, MIB))))
    ended = threading.Event()

    def lie() -> None:
        ends.hear()
        drive(ends.a, ends.post(memoryview(RANDOM)[: MIB + 5], 0), ended)

    lying = ends.pool.submit(lie)
    refused(ends, [memoryview(memory)[:MIB]], "longer or shorter")
    ended.set()
    lying.exception(30)
    assert memory[MIB:] == b"\xa5" * MIB


def drive(bodies: UcxBodies, pending: Pending, ended: threading.Event) -> None:
    """Move a message until it is done, or the test is over."""
    lane = bodies._messages._lane
    assert lane is not None
    while not pending.done() and not ended.wait(0.001):
        lane.progress()


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        (b"", "without an offer"),
        (b"X", "without an offer"),
        (b"O", "does not make up"),
        (b"O" + pack_offer(runs_of(slices(MIB + 1, MIB + 1))), "does not make up"),
        (b"O" + b"\xff" * 8, "does not make up"),
        (b"O123", "no whole numbers"),
    ],
)
def test_a_false_offer_is_refused(ends: Ends, meta: bytes, match: str) -> None:
    ends.say(meta)
    refused(ends, room(MIB, MIB)[1], match)


def test_a_reply_instead_of_an_offer_is_refused(ends: Ends) -> None:
    ends.say(b"", kind=Kind.REPLY)
    refused(ends, room(MIB, MIB)[1], "reply")


def test_a_body_that_was_not_confirmed_is_not_believed(ends: Ends) -> None:
    """The sender gave up, and its memory may have changed under the receiver's reading."""
    ends.say(b"O" + pack_offer(runs_of(slices(MIB, MIB))))
    ended = threading.Event()

    def lie() -> None:
        ends.hear()
        drive(ends.a, ends.post(memoryview(RANDOM)[:MIB], 0), ended)
        ends.a.abort()

    lying = ends.pool.submit(lie)
    with pytest.raises(ConnectionLost):
        ends.receive(room(MIB, MIB)[1], deadline=soon())
    ended.set()
    lying.result(30)


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        (b"", "neither places"),
        (b"P", "does not make up"),
        (b"P\1\0\0\0" + pack_table([MIB - 1]), "does not make up"),
        (b"P\1\0\0\0" + pack_table([MIB // 2] * 2 + [1]), "does not make up"),
        (b"P\2\0\0\0" + pack_table([MIB]), "leave to send 2 pieces of 1"),
        (b"P\0\0\0\0" + pack_table([MIB]), "leave to send 0 pieces of 1"),
    ],
)
def test_a_false_table_is_refused(ends: Ends, meta: bytes, match: str) -> None:
    sending = ends.send(slices(MIB, MIB))
    ends.b_control.receive_frame(limits=Limits(), deadline=soon())
    ends.answer(meta)
    with pytest.raises(ProtocolError, match=match):
        sending.result(30)
    assert not ends.a_control.usable


def test_pieces_across_views_are_refused(ends: Ends) -> None:
    sending = ends.send(slices(2 * MIB, MIB))
    ends.b_control.receive_frame(limits=Limits(), deadline=soon())
    ends.answer(b"P\1\0\0\0" + pack_table([2 * MIB]))
    with pytest.raises(ProtocolError, match="a piece of"):
        sending.result(30)


@pytest.mark.parametrize(("meta", "match"), [(b"Q", "worker address"), (b"A12", "worker address")])
def test_a_false_greeting_is_refused(meta: bytes, match: str) -> None:
    left, right = socket.socketpair()
    control, other = Control(left, "a"), Control(right, "b")
    facts = UcxWay().facts(server=True)
    other.send_frame(Header(Kind.GRANT), meta, deadline=soon())
    with pytest.raises(ProtocolError, match=match):
        UcxWay().open(control, server=True, mine=facts, theirs=facts, limits=Limits(), deadline=soon())
    control.close()
    other.close()


# Giving up.


@pytest.mark.parametrize("nbytes", [MIB, 20 * MIB])
def test_a_receive_ends_by_its_deadline_and_its_memory_is_left_alone(ends: Ends, nbytes: int) -> None:
    """The sender offers, and sends when the receiver has given up."""
    memory, into = room(nbytes, nbytes)
    ends.say(b"O" + pack_offer(runs_of(slices(nbytes, nbytes))))
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        ends.receive(into, deadline=began + 0.2)
    assert time.monotonic() < began + 10
    memory[:] = b"\xc5" * nbytes
    lane = ends.a._messages._lane
    assert lane is not None
    try:
        pending = ends.post(memoryview(RANDOM)[: min(nbytes, 16 * MIB)], 0)
        for _ in range(50):
            lane.progress()
            if pending.done():
                break
            threading.Event().wait(0.002)
    except UcxEngine.get().library.errors:
        pass
    assert memory == b"\xc5" * nbytes


def test_a_send_ends_by_its_deadline(ends: Ends) -> None:
    with pytest.raises(DeadlinePassed):
        ends.send(slices(MIB, MIB), deadline=time.monotonic() + 0.2).result(30)
    assert not ends.a_control.usable


def test_a_silent_peer_is_lost_after_the_longest_stall(ends: Ends) -> None:
    ends.close()
    short = Ends(UcxWay(), Limits(stall_s=0.2))
    try:
        with pytest.raises(ConnectionLost, match="nothing heard"):
            short.receive(room(MIB, MIB)[1])
        with pytest.raises(TransportError):
            short.send(slices(MIB, MIB)).result(30)
    finally:
        short.close()


@pytest.mark.parametrize("granted", [False, True])
def test_abort_from_another_thread_ends_a_receive(ends: Ends, granted: bool) -> None:
    memory, into = room(MIB, MIB)
    if granted:
        ends.say(b"O" + pack_offer(runs_of(slices(MIB, MIB))))
    receiving = ends.pool.submit(lambda: ends.receive(into))
    if granted:
        assert ends.hear()[:1] == b"P"
    ends.b.abort()
    assert ends.b._messages._lane is None, "nothing is written any more when abort has returned"
    with pytest.raises(TransportClosed):
        receiving.result(30)
    ends.b.abort()
    memory[:] = b"\xc5" * MIB


def test_the_peers_end_is_seen_within_a_body(ends: Ends) -> None:
    ends.say(b"O" + pack_offer(runs_of(slices(MIB, MIB))))
    receiving = ends.pool.submit(lambda: ends.receive(room(MIB, MIB)[1]))
    assert ends.hear()[:1] == b"P"
    ends.a.abort()
    with pytest.raises(ConnectionLost):
        receiving.result(30)


def test_nothing_goes_after_close(ends: Ends) -> None:
    ends.a.close()
    ends.a.close()
    sending = ends.send(slices(MIB, MIB))
    ends.b_control.receive_frame(limits=Limits(), deadline=soon())
    ends.answer(b"P\1\0\0\0" + pack_table([MIB]))
    with pytest.raises(TransportClosed):
        sending.result(30)


def test_sends_that_were_cut_leave_nothing_behind() -> None:
    """ucxx keeps the worker of a cancelled send for ever: 9 descriptors each."""
    for way in WAYS.values():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            ends = Ends(way(), Limits())
            sending = ends.send(slices(20 * MIB, 20 * MIB), deadline=time.monotonic() + 0.1)
            ends.b_control.receive_frame(limits=Limits(), deadline=soon())
            ends.answer(b"P\2\0\0\0" + pack_table([16 * MIB, 4 * MIB]))
            with pytest.raises(TransportError):
                sending.result(30)
            ends.close()
        assert len(os.listdir("/proc/self/fd")) == before


# Staging memory.


def test_slots_are_taken_at_once_or_not_at_all() -> None:
    pool = SlotPool(3)
    first = pool.acquire(2, wait=0)
    assert len(first) == 2
    assert pool.acquire(2, wait=0.01) == []
    rest = pool.acquire(1, wait=0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.acquire, 2, wait=30)
        pool.release(first)
        assert {id(slot) for slot in waiting.result(30)} == {id(slot) for slot in first}
    pool.release([*rest, *first])


def test_slots_that_may_still_be_written_to_are_replaced() -> None:
    pool = SlotPool(1)
    lost = pool.acquire(1, wait=0)
    pool.forget(lost)
    (fresh,) = pool.acquire(1, wait=0)
    assert fresh is not lost[0]


def test_bodies_wait_for_slots_and_give_up_by_their_deadline(ends: Ends) -> None:
    pool = UcxEngine.get().sending
    taken = pool.acquire(_ucx_engine._SLOTS, wait=5)
    assert taken
    try:
        sending = ends.send(slices(MIB, 1000), deadline=time.monotonic() + 0.3)
        ends.b_control.receive_frame(limits=Limits(), deadline=soon())
        ends.answer(b"P\1\0\0\0" + pack_table([MIB]))
        with pytest.raises(DeadlinePassed, match="staging memory"):
            sending.result(30)
    finally:
        pool.release(taken)


def test_slots_come_back_after_trouble(ends: Ends) -> None:
    pool = UcxEngine.get().receiving
    ends.say(b"O" + pack_offer(runs_of(slices(MIB, 1000))))
    with pytest.raises(DeadlinePassed):
        ends.receive(room(MIB, 1000)[1], deadline=time.monotonic() + 0.1)
    slots = pool.acquire(_ucx_engine._SLOTS, wait=0)
    assert len(slots) == _ucx_engine._SLOTS
    pool.release(slots)
