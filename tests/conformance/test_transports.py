"""The rules of `kvstore_transport.seam`, one suite for all transports, both sides in this process.

Deadlines, ends and servers: test_transports_life.py. What takes a process of its own (SIGKILL, SIGSTOP, fork):
test_transports_processes.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore_transport import (
    Answer,
    ConnectionLost,
    Incoming,
    Limits,
    ProtocolError,
    TransportClosed,
    TransportError,
)
from tests.conformance.transports_support import LARGE, echo, kind, memory, serve
from tests.transport_support import (
    ECHO,
    MAKE,
    MIB,
    POISON,
    SINK,
    Kind,
    Memory,
    Toy,
    digest,
    pattern,
    plan_into,
    soon,
    wait_until,
)

__all__ = ["kind", "memory", "serve"]  # fixtures


# What arrives.


@pytest.mark.parametrize("nbytes", [0, 1, 47, 4095, 65537, MIB, LARGE + 1])
def test_bodies_of_any_size_arrive_whole_in_both_directions(serve: Any, memory: Memory, nbytes: int) -> None:
    data = pattern(nbytes, 1)
    source, into = memory.take(nbytes, data), memory.take(nbytes)
    toy = Toy(memory)
    toy.made(nbytes)
    service = serve(toy)
    with service.connect() as channel:
        memory.register(channel)
        if service.server:
            memory.register(service.server)
        reply = channel.call(SINK, b"", [source], deadline=soon())
        assert reply.meta == digest(data)
        reply = channel.call(MAKE, nbytes.to_bytes(8, "little"), plan=plan_into(into), deadline=soon())
        assert reply.body_nbytes == nbytes
        assert into == pattern(nbytes, nbytes)
        assert echo(channel, data) == data
        channel.call(SINK, b"", deadline=soon())
        assert toy.given == 4
        assert toy.back >= 3, "what an earlier call gave away came back before the next was answered"


@pytest.mark.parametrize("registered", [True, False])
def test_many_pieces_are_gathered_and_scattered(serve: Any, memory: Memory, registered: bool) -> None:
    lengths = [(7 * n) % 1000 for n in range(3000)]  # some of them empty, more than IOV_MAX
    data = pattern(sum(lengths), 2)
    take = memory.take if registered else lambda nbytes, fill=b"": memoryview(bytearray(fill or nbytes))
    source, into = take(len(data), data), take(len(data))
    at = 0
    pieces, places = [], []
    for length in lengths:
        pieces.append(source[at : at + length])
        at += length
    at = 0
    for length in reversed(lengths):
        places.append(into[at : at + length])
        at += length
    with serve(Toy()).connect() as channel:
        memory.register(channel)
        reply = channel.call(ECHO, b"", pieces, plan=plan_into(*places), deadline=soon())
        assert reply.body_nbytes == len(data)
    assert into == data


def test_views_of_other_shapes_are_bytes(serve: Any) -> None:
    data = pattern(4096, 3)
    into = bytearray(4096)
    with serve(Toy()).connect() as channel:
        channel.call(
            ECHO,
            b"",
            [memoryview(data).cast("I", [32, 32])],
            plan=plan_into(memoryview(into).cast("Q")),
            deadline=soon(),
        )
    assert into == data


def test_calls_are_answered_one_by_one_in_order(serve: Any) -> None:
    with serve(Toy()).connect() as channel:
        for n in range(100):
            data = pattern((n * 7919) % 100_000, n)
            assert echo(channel, data, meta=b"%d" % n) == data


def test_meta_may_be_as_long_as_agreed_upon(serve: Any) -> None:
    with serve(Toy()).connect() as channel:
        for nbytes in (1, 65_000, 200_000, MIB):
            meta = pattern(nbytes, 4)
            assert channel.call(ECHO, meta, deadline=soon()).meta == meta


def test_ops_and_status_are_bytes_of_the_callers(serve: Any) -> None:
    with serve(lambda incoming: Answer(255 - incoming.op)).connect() as channel:
        assert [channel.call(op, b"", deadline=soon()).status for op in (0, 7, 255)] == [255, 248, 0]
        for op in (-1, 256):
            with pytest.raises(ValueError, match="not a byte"):
                channel.call(op, b"", deadline=soon())
        assert channel.usable


def test_no_deadline_is_none_at_the_other_side_and_a_deadline_is_one(serve: Any) -> None:
    seen: list[float] = []

    def handler(incoming: Incoming) -> Answer:
        seen.append(incoming.deadline)
        return Answer(0)

    with serve(handler).connect() as channel:
        channel.call(0, b"", deadline=math.inf)
        deadline = time.monotonic() + 1000
        channel.call(0, b"", deadline=deadline)
    assert seen[0] == math.inf
    assert deadline - 1 <= seen[1] <= time.monotonic() + 1000


# What a side does not take.


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_smaller_limits_hold_and_too_much_is_refused_before_it_is_sent(serve: Any, side: str) -> None:
    small, usual = Limits(max_meta=64 << 10, max_body=5000), Limits()
    service = serve(Toy(), limits=small if side == "server" else usual)
    with service.connect(limits=small if side == "client" else usual) as channel:
        assert (channel.peer.max_meta, channel.peer.max_body) == (64 << 10, 5000)
        with pytest.raises(ValueError, match="65537"):
            channel.call(ECHO, bytes((64 << 10) + 1), deadline=soon())
        with pytest.raises(ValueError, match="5001"):
            channel.call(ECHO, b"", [memoryview(bytes(5001))], deadline=soon())
        assert channel.usable
        assert echo(channel, pattern(5000, 5), meta=bytes(64 << 10)) == pattern(5000, 5)


def test_a_reply_that_is_too_long_ends_the_connection_and_is_given_back(serve: Any, caplog: Any) -> None:
    toy = Toy()
    service = serve(toy, limits=Limits(max_body=5000))
    channel = service.connect()
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionLost):
        channel.call(MAKE, (5001).to_bytes(8, "little"), plan=plan_into(memoryview(bytearray(5001))), deadline=soon())
    assert not channel.usable
    wait_until(lambda: toy.back == toy.given == 1)
    service.close()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_a_body_that_nobody_expects_ends_the_channel(serve: Any) -> None:
    toy = Toy()
    channel = serve(toy).connect()
    with pytest.raises(ProtocolError):
        channel.call(MAKE, (5).to_bytes(8, "little"), deadline=soon())
    assert not channel.usable
    wait_until(lambda: toy.back == toy.given == 1)


@pytest.mark.parametrize("planned", [4, 6])
def test_a_plan_of_another_length_ends_the_channel(serve: Any, planned: int) -> None:
    into = bytearray([POISON]) * planned
    channel = serve(Toy()).connect()
    with pytest.raises(ProtocolError, match="planned"):
        channel.call(MAKE, (5).to_bytes(8, "little"), plan=plan_into(memoryview(into)), deadline=soon())
    assert not channel.usable
    assert into == bytearray([POISON]) * planned


def test_what_the_plan_raises_comes_out_and_ends_the_channel(serve: Any) -> None:
    def plan(status: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        assert (status, meta, nbytes) == (0, (5).to_bytes(8, "little"), 5)
        raise LookupError("no room")

    toy = Toy()
    channel = serve(toy).connect()
    with pytest.raises(LookupError, match="no room"):
        channel.call(MAKE, (5).to_bytes(8, "little"), plan=plan, deadline=soon())
    assert not channel.usable
    with pytest.raises(TransportClosed):
        channel.call(ECHO, b"", deadline=soon())
    wait_until(lambda: toy.back == toy.given == 1)


@pytest.mark.parametrize("nbytes", [1, 10_000, MIB])
def test_a_small_body_that_the_handler_leaves_is_thrown_away(serve: Any, nbytes: int) -> None:
    toy = Toy()

    def handler(incoming: Incoming) -> Answer:
        return Answer(9, b"no") if incoming.meta == b"leave" else toy(incoming)

    with serve(handler).connect() as channel:
        for _ in range(3):
            reply = channel.call(ECHO, b"leave", [memoryview(bytes(nbytes))], deadline=soon())
            assert (reply.status, reply.meta) == (9, b"no")
            assert echo(channel, b"next") == b"next"


def test_a_large_body_that_the_handler_discards_is_thrown_away(serve: Any) -> None:
    toy = Toy()

    def handler(incoming: Incoming) -> Answer:
        if incoming.meta == b"leave":
            incoming.discard()
            incoming.discard()
            return Answer(9)
        return toy(incoming)

    with serve(handler).connect() as channel:
        assert channel.call(ECHO, b"leave", [memoryview(bytes(LARGE))], deadline=soon()).status == 9
        assert echo(channel, b"next") == b"next"


@pytest.mark.parametrize("nbytes", [2 * MIB, LARGE])
def test_a_large_body_that_the_handler_leaves_costs_the_connection_after_the_reply(
    serve: Any, kind: Kind, nbytes: int
) -> None:
    with serve(lambda incoming: Answer(9, b"no")).connect() as channel:
        try:
            reply = channel.call(ECHO, b"", [memoryview(bytes(nbytes))], deadline=soon())
        except ConnectionLost:
            assert kind.tls, "over TLS, what was said before a reset cannot be read"
        else:
            assert (reply.status, reply.meta) == (9, b"no")
        with pytest.raises(TransportError):
            channel.call(ECHO, b"", deadline=soon())


def test_a_body_is_received_once_and_whole(serve: Any) -> None:
    raised: list[Exception] = []

    def handler(incoming: Incoming) -> Answer:
        with pytest.raises(ValueError, match="views of 3 bytes") as wrong:
            incoming.receive([memoryview(bytearray(3))])
        incoming.receive([memoryview(bytearray(5))])
        with pytest.raises(RuntimeError) as twice:
            incoming.receive([memoryview(bytearray(5))])
        raised.extend([wrong.value, twice.value])
        return Answer(0)

    with serve(handler).connect() as channel:
        assert channel.call(0, b"", [memoryview(b"12345")], deadline=soon()).status == 0
    assert len(raised) == 2


# Leases.


def test_a_lease_shows_the_peers_memory_or_is_not_offered(serve: Any, kind: Kind, memory: Memory) -> None:
    toy = Toy(memory)
    expected = bytes(toy.made(3 * MIB))
    service = serve(toy)
    if service.server:
        memory.register(service.server)
    channel = service.connect()
    leased = channel.call_leased(MAKE, (3 * MIB).to_bytes(8, "little"), deadline=soon())
    if kind.transport != "shm":
        assert leased is None
        assert toy.given == 0
        return
    assert leased is not None
    assert leased.body == expected
    assert leased.body.readonly
    assert leased.alive()
    assert echo(channel, b"meanwhile") == b"meanwhile"
    wait_until(lambda: toy.back == 1)  # the reply is here a moment before the server knows that it is gone
    leased.release()
    leased.release()
    wait_until(lambda: toy.back == 2)
    again = channel.call_leased(MAKE, (3 * MIB).to_bytes(8, "little"), deadline=soon())
    assert again is not None
    channel.close()
    wait_until(lambda: toy.back == 3)
    assert not again.alive()
    again.release()
    assert toy.back == toy.given == 3
    del leased, again


def test_a_lease_of_what_is_not_shared_is_a_private_copy(serve: Any, kind: Kind) -> None:
    if kind.transport != "shm":
        pytest.skip("no leases")
    toy = Toy()
    with serve(toy).connect() as channel:
        leased = channel.call_leased(MAKE, (100_000).to_bytes(8, "little"), deadline=soon())
        assert leased is not None
        assert leased.body == toy.made(100_000)
        wait_until(lambda: toy.back == 1)
        empty = channel.call_leased(ECHO, b"", deadline=soon())
        assert empty is not None
        assert len(empty.body) == 0
