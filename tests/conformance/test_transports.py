"""The rules of `kvstore_transport.seam`, one suite for all transports, both sides in this process.

What takes a process of its own (SIGKILL, SIGSTOP, fork) is in test_transports_processes.py.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore_transport import (
    Answer,
    Channel,
    ConnectionLost,
    Credentials,
    DeadlinePassed,
    Handler,
    Incoming,
    Limits,
    PeerBusy,
    PeerRefused,
    ProtocolError,
    TransportClosed,
    TransportError,
)
from tests.transport_support import (
    ECHO,
    KINDS,
    MAKE,
    MIB,
    POISON,
    SINK,
    Kind,
    Memory,
    Service,
    Toy,
    digest,
    params,
    pattern,
    plan_into,
    soon,
    wait_until,
)


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


# What arrives.


@pytest.mark.parametrize("nbytes", [0, 1, 47, 4095, 65537, MIB, 16 * MIB + 1, 64 * MIB])
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
    small, usual = Limits(max_meta=1000, max_body=5000), Limits()
    service = serve(Toy(), limits=small if side == "server" else usual)
    with service.connect(limits=small if side == "client" else usual) as channel:
        assert (channel.peer.max_meta, channel.peer.max_body) == (1000, 5000)
        with pytest.raises(ValueError, match="1001"):
            channel.call(ECHO, bytes(1001), deadline=soon())
        with pytest.raises(ValueError, match="5001"):
            channel.call(ECHO, b"", [memoryview(bytes(5001))], deadline=soon())
        assert channel.usable
        assert echo(channel, pattern(5000, 5), meta=bytes(1000)) == pattern(5000, 5)


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
        assert channel.call(ECHO, b"leave", [memoryview(bytes(20 * MIB))], deadline=soon()).status == 9
        assert echo(channel, b"next") == b"next"


@pytest.mark.parametrize("mib", [2, 64])
def test_a_large_body_that_the_handler_leaves_costs_the_connection_after_the_reply(
    serve: Any, kind: Kind, mib: int
) -> None:
    with serve(lambda incoming: Answer(9, b"no")).connect() as channel:
        try:
            reply = channel.call(ECHO, b"", [memoryview(bytes(mib * MIB))], deadline=soon())
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


# Deadlines, aborts, closes.


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("nbytes", [0, 100, 64 * MIB])
def test_a_call_returns_by_its_deadline_when_the_peer_stalls(serve: Any, where: str, nbytes: int) -> None:
    held = Held(where)
    data, into = bytearray(pattern(nbytes, 6)), bytearray([POISON]) * nbytes
    expected = digest(bytes(data))
    channel = serve(held).connect()
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        channel.call(ECHO, b"", [memoryview(data)], plan=plan_into(memoryview(into)), deadline=time.monotonic() + 0.3)
    assert 0.3 <= time.monotonic() - began < 20
    assert not channel.usable
    data[:] = bytes([POISON]) * nbytes  # the caller's again
    held.go.set()
    assert held.ended.wait(30)
    toy = held.then
    assert isinstance(toy, Toy)
    assert all(what.startswith("failed") or what == f"received {expected.hex()}" for what in toy.heard), toy.heard
    wait_until(lambda: toy.back == toy.given)
    assert into == bytearray([POISON]) * nbytes


def test_a_deadline_that_passed_already_sends_nothing(serve: Any) -> None:
    toy = Toy()
    channel = serve(toy).connect()
    with pytest.raises(DeadlinePassed):
        channel.call(ECHO, b"", deadline=time.monotonic() - 1)
    assert not channel.usable
    assert toy.heard == []


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_call_under_way_ends_when_another_thread_ends_the_channel(serve: Any, how: str, where: str) -> None:
    held = Held(where)
    channel = serve(held).connect()
    body = memoryview(bytes(32 * MIB))
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(lambda: channel.call(SINK, b"", [body], deadline=soon()))
        assert held.entered.wait(30)
        getattr(channel, how)()
        with pytest.raises(TransportClosed):
            calling.result(30)
    assert not channel.usable
    held.go.set()
    assert held.ended.wait(30)


def test_abort_within_the_plan(serve: Any) -> None:
    toy = Toy()
    channel = serve(toy).connect()
    into = bytearray([POISON]) * (8 * MIB)

    def plan(status: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        channel.abort()
        return [memoryview(into)]

    with pytest.raises(TransportClosed):
        channel.call(MAKE, len(into).to_bytes(8, "little"), plan=plan, deadline=soon())
    assert into == bytearray([POISON]) * len(into)
    wait_until(lambda: toy.back == toy.given == 1)


def test_closed_is_closed(serve: Any) -> None:
    channel = serve(Toy()).connect()
    assert channel.usable
    assert channel.alive()
    channel.close()
    channel.close()
    channel.abort()
    assert not channel.usable
    assert not channel.alive()
    with pytest.raises(TransportClosed):
        channel.call(ECHO, b"", deadline=soon())


def test_one_call_at_a_time(serve: Any) -> None:
    held = Held("before")
    channel = serve(held).connect()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: channel.call(ECHO, b"1", deadline=soon()))
        assert held.entered.wait(30)
        with pytest.raises(RuntimeError, match="one call"):
            channel.call(ECHO, b"2", deadline=soon())
        held.go.set()
        assert first.result(30).meta == b"1"
    assert channel.usable


def test_the_channel_tells_when_the_server_is_gone(serve: Any) -> None:
    service = serve(Toy())
    channel = service.connect()
    echo(channel, b"x")
    assert channel.alive()
    service.close()
    wait_until(lambda: not channel.alive())
    with pytest.raises(ConnectionLost):
        channel.call(ECHO, b"", deadline=soon())


# The server's side.


def test_a_handler_that_fails_costs_its_connection_only_and_is_logged_once(serve: Any, caplog: Any) -> None:
    toy = Toy()

    def handler(incoming: Incoming) -> Answer:
        if incoming.meta == b"fail":
            raise ZeroDivisionError("in the handler")
        return toy(incoming)

    service = serve(handler)
    one, two = service.connect(), service.connect()
    with caplog.at_level(logging.ERROR):
        with pytest.raises(ConnectionLost):
            one.call(ECHO, b"fail", deadline=soon())
        assert echo(two, b"still here") == b"still here"
        service.close()
    assert len(caplog.records) == 1
    assert "in the handler" in caplog.text


def test_the_session_is_the_connections_own_and_on_close_is_called_once(serve: Any) -> None:
    ended: list[int] = []

    def handler(incoming: Incoming) -> Answer:
        count = incoming.session["n"] = int(str(incoming.session.get("n", 0))) + 1
        incoming.session["on_close"] = lambda: ended.append(count)
        return Answer(count)

    service = serve(handler)
    one, two = service.connect(), service.connect()
    assert [channel.call(0, b"", deadline=soon()).status for channel in (one, one, two, one)] == [1, 2, 1, 3]
    one.close()
    wait_until(lambda: ended == [3])
    two.abort()
    wait_until(lambda: ended == [3, 1])
    service.close()
    assert ended == [3, 1]


def test_closing_lets_a_request_under_way_end(serve: Any) -> None:
    held = Held("after")
    service = serve(held)
    busy, idle = service.connect(), service.connect()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(lambda: echo(busy, b"under way"))
        assert held.entered.wait(30)
        closing = pool.submit(lambda: service.close(30.0))
        wait_until(lambda: not idle.alive())
        assert not closing.done()
        held.go.set()
        assert call.result(30) == b"under way"
        closing.result(30)
    with pytest.raises(TransportError):
        busy.call(ECHO, b"", deadline=soon())
    with pytest.raises(ConnectionLost):
        service.connect(deadline=soon(5))


def test_closing_aborts_what_takes_too_long(serve: Any) -> None:
    held = Held("before")
    service = serve(held)
    channel = service.connect()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(lambda: channel.call(ECHO, b"", [memoryview(bytes(64 * MIB))], deadline=soon()))
        assert held.entered.wait(30)
        closing = pool.submit(service.close)
        with pytest.raises(ConnectionLost):
            call.result(30)
        held.go.set()
        closing.result(30)
    assert held.raised


# Who may come in.


def identify(namespace: str) -> bytes | None:
    return {"": b"", "team": b"secret"}.get(namespace)


def test_namespaces_and_tokens(serve: Any) -> None:
    seen: list[str] = []

    def handler(incoming: Incoming) -> Answer:
        seen.append(incoming.peer.namespace)
        return Answer(0)

    service = serve(handler, identify=identify)
    for credentials in (Credentials(), Credentials("team", b"secret")):
        with service.connect(credentials=credentials) as channel:
            assert channel.peer.namespace == credentials.namespace
            channel.call(0, b"", deadline=soon())
    assert seen == ["", "team"]
    for wrong in (
        Credentials("team", b"guess"),
        Credentials("team"),
        Credentials("nobody", b"secret"),
        Credentials("", b"secret"),
    ):
        with pytest.raises(PeerRefused) as refused:
            service.connect(credentials=wrong)
        assert "secret" not in str(refused.value)


def test_both_sides_know_each_other(serve: Any, kind: Kind) -> None:
    peers: list[Any] = []

    def handler(incoming: Incoming) -> Answer:
        peers.append(incoming.peer)
        return Answer(0)

    service = serve(handler, facts={"disk": True, "weights": [1, 2]})
    for client in (b"c" * 16, b"c" * 16, b"d" * 16):
        with service.connect(client_id=client, facts={"lanes": 4}) as channel:
            assert channel.peer.transport == kind.transport
            assert channel.peer.facts["weights"] == [1, 2]
            assert channel.peer.note == ""
            channel.call(0, b"", deadline=soon())
    assert [peer.client for peer in peers] == [b"c" * 16, b"c" * 16, b"d" * 16]
    assert {peer.transport for peer in peers} == {kind.transport}
    assert peers[0].facts["lanes"] == 4


def test_one_connection_too_many_is_told_to_come_again(serve: Any) -> None:
    service = serve(Toy(), limits=Limits(connections=2))
    one, two = service.connect(), service.connect()
    for _ in range(3):
        with pytest.raises(PeerBusy):
            service.connect()
    assert echo(one, b"1") + echo(two, b"2") == b"12"
    one.close()

    def room() -> bool:
        try:
            service.connect().close()
        except PeerBusy:
            return False
        return True

    wait_until(room)


def test_many_connections_at_once(serve: Any, kind: Kind) -> None:
    count = 200 if kind.transport == "tcp" and not kind.tls else 20
    service = serve(Toy())
    channels = [service.connect() for _ in range(count)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            data = [pattern(1000 + n, n) for n in range(count)]
            assert list(pool.map(echo, channels, data)) == data
    for channel in channels:
        channel.close()


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
