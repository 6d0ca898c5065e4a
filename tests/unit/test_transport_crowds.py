"""`Server`: what many connections take together, and how slowly one may move: the lobby, memory for metas, the pace."""

from __future__ import annotations

import contextlib
import math
import threading
import time

import pytest

from kvstore_transport import Answer, ConnectionLost, Incoming, Limits, _metas, connect
from kvstore_transport import control as control_module
from kvstore_transport import serving as serving_module
from kvstore_transport._lobby import Lobby, origin
from kvstore_transport.frames import Header, Kind, pack_header
from tests.transport_support import MAKE, MIB, SINK, Toy, soon, wait_until

from .server_support import LIMITS, ended, greeted, plug, serving


def test_silent_strangers_take_no_place_from_clients() -> None:
    """However many there are, and however long they may stay: who proves who he is comes in, and stays in."""
    with serving(limits=Limits(connections=5, handshake_s=60.0)) as server:
        socks = [plug(server) for _ in range(100)]
        channels = [connect(server.address, transport="tcp", deadline=soon()) for _ in range(5)]
        socks += [plug(server) for _ in range(100)]
        wait_until(lambda: server.stats().pushed_out >= 100)
        for channel in channels:
            assert channel.call(SINK, b"", deadline=soon()).status == SINK
            channel.close()
        assert ended(socks[0])  # the oldest went first
        assert server.stats().failed == 0
        for sock in socks:
            sock.close()


def test_the_lobby_is_shared_out_among_addresses() -> None:
    lobby: Lobby[int] = Lobby(400)
    assert (lobby.most, lobby.most_of_one) == (100, 88)
    assert [lobby.enter(n, "noisy") for n in range(88)] == [None] * 88
    assert [lobby.enter(n, "noisy") for n in range(88, 90)] == [0, 1]
    assert [lobby.enter(n, "quiet") for n in range(90, 102)] == [None] * 12
    assert [lobby.enter(n, "quiet") for n in range(102, 104)] == [2, 3]  # of who has the most
    assert len(lobby) == 100
    assert lobby.leave(50)
    assert not lobby.leave(50)
    assert lobby.enter(104, "third") is None
    for n in range(200):
        lobby.leave(n)
    assert len(lobby) == 0
    assert (Lobby(1).most, Lobby(4096).most) == (64, 1024)


class _From:
    def __init__(self, *name: object) -> None:
        self.name = name

    def getpeername(self) -> object:
        return self.name


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_where_connections_come_from(one: str, other: str, same: bool) -> None:
    assert (origin(_From(one, 1)) == origin(_From(other, 2))) is same  # type: ignore[arg-type]
    assert origin(_From()) == ""  # type: ignore[arg-type]


# Memory for metas.


def test_the_metas_of_all_connections_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones wait for room, of their client and in all, and are cut off if there is none; short ones pass."""
    monkeypatch.setattr(_metas, "_TOTAL", 0)
    entered, go = threading.Semaphore(0), threading.Event()

    def handler(incoming: Incoming) -> Answer:
        if len(incoming.meta) > 1000:
            entered.release()
            assert go.wait(60)
        return Answer(7)

    with serving(handler, limits=Limits(max_meta=MIB, stall_s=1.0)) as server, contextlib.ExitStack() as stack:
        greetings = [stack.enter_context(greeted(server, client=bytes([n]) * 16)) for n in (1, 1, 2, 3, 4, 5)]
        for control in (greetings[0], *greetings[2:5]):
            control.send_frame(Header(Kind.REQUEST, 1), bytes(MIB), deadline=soon())
            assert entered.acquire(timeout=60)
        assert server.stats().meta_bytes == 4 * MIB
        for control in (greetings[1], greetings[5]):  # the client has its part; there is no more
            control.send([pack_header(Header(Kind.REQUEST, 1), bytes(MIB))], deadline=soon())
            with pytest.raises(ConnectionLost):
                control.receive_frame(limits=LIMITS, deadline=soon())
        with greeted(server, client=bytes([5]) * 16) as control:
            control.send_frame(Header(Kind.REQUEST, 1), bytes(1000), deadline=soon())
            assert control.receive_frame(limits=LIMITS, deadline=soon())[0].code == 7
        go.set()
        for control in (greetings[0], *greetings[2:5]):
            assert control.receive_frame(limits=LIMITS, deadline=soon())[0].code == 7
        wait_until(lambda: server.stats().meta_bytes == 0)
        with greeted(server, client=bytes([5]) * 16) as control:
            control.send([pack_header(Header(Kind.REQUEST, 1), bytes(MIB)), bytes(100)], deadline=soon())
            wait_until(lambda: server.stats().meta_bytes == MIB)
        wait_until(lambda: server.stats().meta_bytes == 0)  # it was cut off in the middle


# How slowly a body may move.


@pytest.mark.parametrize("direction", ["get", "put", "meta"])
def test_a_peer_that_is_never_quite_still_loses_its_connection_all_the_same(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """It moves a little all the time, and so never stalls."""
    toy = Toy()
    for module in (serving_module, control_module):
        monkeypatch.setattr(module, "LEAST_RATE", 1 << 40)
    nbytes = 64 * MIB
    with serving(toy, limits=Limits(stall_s=1.0, max_meta=nbytes)) as server, greeted(server, max_meta=nbytes) as peer:
        if direction == "get":
            peer.send_frame(Header(Kind.REQUEST, MAKE), nbytes.to_bytes(8, "little"), deadline=math.inf)
        elif direction == "put":
            peer.send([pack_header(Header(Kind.REQUEST, SINK, body_nbytes=nbytes), b"")], deadline=math.inf)
        else:
            peer.send([pack_header(Header(Kind.REQUEST, SINK), bytes(nbytes))], deadline=math.inf)
        scratch = memoryview(bytearray(4096))
        end = soon()
        while server.stats().failed == 0:
            assert time.monotonic() < end
            with contextlib.suppress(OSError):  # it was cut off just now
                if direction == "get":
                    peer._sock.recv_into(scratch)
                else:
                    peer._sock.sendall(scratch)
            time.sleep(0.02)
        wait_until(lambda: toy.back == toy.given)
