"""The rules of `kvstore_transport.seam` about deadlines, ends, servers and who may come in, for all transports."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore_transport import (
    Answer,
    ConnectionLost,
    Credentials,
    DeadlinePassed,
    Incoming,
    Limits,
    PeerBusy,
    PeerRefused,
    TransportClosed,
    TransportError,
)
from tests.conformance.transports_support import LARGE, Held, echo, kind, memory, serve
from tests.transport_support import (
    ECHO,
    MAKE,
    MIB,
    POISON,
    SINK,
    Kind,
    Toy,
    digest,
    pattern,
    plan_into,
    soon,
    wait_until,
)

__all__ = ["kind", "memory", "serve"]  # fixtures


# Deadlines, aborts, closes.


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("nbytes", [0, 100, LARGE])
def test_a_call_returns_by_its_deadline_when_the_peer_stalls(serve: Any, where: str, nbytes: int) -> None:
    held = Held(where)
    data, into = bytearray(pattern(nbytes, 6)), bytearray([POISON]) * nbytes
    expected = digest(bytes(data))
    channel = serve(held).connect()
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        channel.call(ECHO, b"", [memoryview(data)], plan=plan_into(memoryview(into)), deadline=time.monotonic() + 0.2)
    assert 0.2 <= time.monotonic() - began < 20
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
    body = memoryview(bytes(LARGE))
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
        call = pool.submit(lambda: channel.call(ECHO, b"", [memoryview(bytes(LARGE))], deadline=soon()))
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
