"""`Server`: strangers, liars, floods, shortages; and what it counts."""

from __future__ import annotations

import logging
import os
import random
import resource
import socket
import ssl
import struct
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore_transport import (
    Answer,
    Channel,
    ConnectionLost,
    Incoming,
    Limits,
    PeerBusy,
    Server,
    TransportError,
    TransportUnavailable,
    accepting,
    connect,
)
from kvstore_transport.channel import checksum
from kvstore_transport.frames import Flags, Header, Kind, pack_header
from tests.transport_support import ECHO, MAKE, MIB, SINK, Toy, plan_into, soon, tls_contexts, wait_until
from tests.unit.server_support import LIMITS, ended, greeted, is_well, plug, serving

# Strangers.


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(1000),
        b"KVT1" + bytes(44),
        pack_header(Header(Kind.REQUEST, 1), b"x") + b"x",
        pack_header(Header(Kind.WELCOME), b"x") + b"x",
        pack_header(Header(Kind.HELLO), b"x") + b"y",
        b"\x16\x03\x01" + b"\xff" * 500,
        random.Random(7).randbytes(5000),
    ],
)
def test_strangers_are_shown_the_door(said: bytes, tls: bool) -> None:
    with serving(tls=tls_contexts()[0] if tls else None, path="") as server:
        for _ in range(3):
            with plug(server) as sock:
                sock.sendall(said)
                assert ended(sock)
        wait_until(lambda: server.stats().connections == 0)
        assert server.stats().accepted == 0
        with connect(
            server.address, transport="tcp", tls=tls_contexts()[1] if tls else None, deadline=soon()
        ) as channel:
            assert channel.call(SINK, b"", deadline=soon()).status == SINK


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("said", [b"", b"K", b"KVT1\x01", b"\x16\x03"])
def test_who_says_nothing_or_little_is_cut_off(said: bytes, tls: bool) -> None:
    """Slow handshakes cost a thread for `handshake_s`, and no more."""
    limits = Limits(handshake_s=0.3)
    with serving(limits=limits, tls=tls_contexts()[0] if tls else None) as server, ThreadPoolExecutor(10) as pool:
        socks = [plug(server) for _ in range(10)]
        for sock in socks:
            sock.sendall(said)
        if not tls:
            is_well(server)
        assert all(pool.map(ended, socks))
        for sock in socks:
            sock.close()
        wait_until(lambda: server.stats().connections == 0)


def test_a_handshake_byte_by_byte_ends_in_time() -> None:
    frame = pack_header(Header(Kind.HELLO), bytes(60_000))
    with serving(limits=Limits(handshake_s=0.3)) as server, plug(server) as sock:
        began = time.monotonic()
        pause = threading.Event()
        with pytest.raises(ConnectionError):
            _drip(sock, frame + bytes(60_000), pause)
        assert time.monotonic() - began < 20
        is_well(server)


def _drip(sock: socket.socket, data: bytes, pause: threading.Event) -> None:
    for at in range(len(data)):
        sock.sendall(data[at : at + 1])
        pause.wait(0.01)


def test_a_peer_that_hangs_up_at_once() -> None:
    with serving() as server:
        for n in range(30):
            sock = plug(server)
            if n % 2:  # a reset
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        is_well(server)
        wait_until(lambda: server.stats().connections == 0)


class LateContext(ssl.SSLContext):
    """Begins with TLS when its client is gone."""

    gone: threading.Event

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        assert self.gone.wait(30)
        return super().wrap_socket(*args, **options)


@pytest.mark.parametrize("said", [b"\x16", b"\x16\x03\x01" + bytes(100)])
def test_a_peer_that_hangs_up_before_tls_begins(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """As port scanners do: no fault of the handler, so nothing in the log."""
    context = LateContext(ssl.PROTOCOL_TLS_SERVER)
    context.gone = threading.Event()
    with serving(tls=context) as server:
        sock = plug(server)
        sock.sendall(said)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: server.stats().connections == 1)
        sock.close()
        context.gone.set()
        wait_until(lambda: server.stats().failed == 1)
        wait_until(lambda: server.stats().connections == 0)
    assert not caplog.records


# Liars, after the handshake.


@pytest.mark.parametrize(
    "frame",
    [
        pack_header(Header(Kind.REQUEST, 1, body_nbytes=1 << 40), b""),
        pack_header(Header(Kind.REQUEST, 1, body_nbytes=(256 << 20) + 1), b""),
        pack_header(Header(Kind.REPLY, 1), b""),
        pack_header(Header(Kind.HELLO, 1), b""),
        pack_header(Header(Kind.GRANT, number=1), b""),
        pack_header(Header(Kind.RELEASE, number=1), b""),
        pack_header(Header(Kind.REQUEST, 1), b"checked") + b"changed",
        pack_header(Header(Kind.REQUEST, 1), b"")[:-1] + b"!",
    ],
)
def test_liars_lose_their_connection_before_anything_is_allocated(frame: bytes) -> None:
    calls: list[int] = []

    def handler(incoming: Incoming) -> Answer:
        calls.append(incoming.body_nbytes)
        return Answer(0)

    with serving(handler) as server:
        with greeted(server) as control:
            control.send([frame], deadline=soon())
            with pytest.raises(ConnectionLost):
                control.receive_frame(limits=LIMITS, deadline=soon())
        assert calls == []
        wait_until(lambda: server.stats().failed == 1)


def test_a_body_that_never_comes_is_a_stall_and_its_memory_is_free_again() -> None:
    freed = threading.Event()

    def handler(incoming: Incoming) -> Answer:
        view = memoryview(bytearray(incoming.body_nbytes))
        try:
            incoming.receive([view])
        except TransportError:
            freed.set()
            raise
        return Answer(0)

    with serving(handler, limits=Limits(stall_s=0.2)) as server, greeted(server) as control:
        frame = pack_header(Header(Kind.REQUEST, 1, body_nbytes=MIB), b"")
        control.send([frame, bytes(MIB - 1)], deadline=soon())
        assert freed.wait(30)
        with pytest.raises(ConnectionLost):
            control.receive_frame(limits=LIMITS, deadline=soon())


def test_a_reader_that_stops_reading_loses_its_connection_and_the_body_comes_back() -> None:
    toy = Toy()
    with serving(toy, limits=Limits(stall_s=0.2)) as server, greeted(server) as control:
        meta = (64 * MIB).to_bytes(8, "little")
        control.send_frame(Header(Kind.REQUEST, MAKE), meta, deadline=soon())
        wait_until(lambda: toy.back == toy.given == 1)


def test_a_request_is_not_served_beyond_its_deadline() -> None:
    toy = Toy()
    with serving(toy) as server, greeted(server) as control:
        meta = (64 * MIB).to_bytes(8, "little")
        control.send_frame(Header(Kind.REQUEST, MAKE, budget_us=100_000), meta, deadline=soon())
        wait_until(lambda: toy.back == toy.given == 1)


@pytest.mark.parametrize("agreed", [False, True])
def test_a_body_whose_checksum_is_wrong_is_never_presented(agreed: bool) -> None:
    toy = Toy()
    body = b"body" * 1000
    good = checksum([memoryview(body)])
    with serving(toy) as server:
        with greeted(server, sums=agreed) as control:
            header = Header(Kind.REQUEST, ECHO, Flags.BODY_SUM, 1, 0, len(body), 0, good)
            control.send_frame(header, b"", [memoryview(body)], deadline=soon())
            reply, _ = control.receive_frame(limits=LIMITS, deadline=soon())
            assert bool(reply.flags & Flags.BODY_SUM) == agreed
            assert reply.body_sum == (good if agreed else 0)
            control.skip(len(body), deadline=soon())
            header = header._replace(number=2, body_sum=good ^ 1)
            control.send_frame(header, b"", [memoryview(body)], deadline=soon())
            with pytest.raises(ConnectionLost):
                control.receive_frame(limits=LIMITS, deadline=soon())
        wait_until(lambda: toy.heard[1:] == ["failed ProtocolError"])
        with greeted(server, sums=True) as control:
            control.send_frame(Header(Kind.REQUEST, ECHO, 0, 1, 0, len(body)), b"", [memoryview(body)], deadline=soon())
            with pytest.raises(ConnectionLost):
                control.receive_frame(limits=LIMITS, deadline=soon())
        wait_until(lambda: toy.heard[2:] == ["failed ProtocolError"])


# Floods and shortages.


def test_two_hundred_clients_at_once_and_one_too_many() -> None:
    with serving(limits=Limits(connections=200)) as server, ThreadPoolExecutor(50) as pool:

        def open_one(n: int) -> Channel:
            return connect(server.address, transport="tcp", deadline=soon(60))

        channels = list(pool.map(open_one, range(200)))
        assert server.stats().connections == 200
        with pytest.raises(PeerBusy, match="200"):
            open_one(0)
        into = [bytearray(10_000) for _ in channels]

        def call(n: int) -> bool:
            data = bytes([n]) * 10_000
            channels[n].call(ECHO, b"", [memoryview(data)], plan=plan_into(memoryview(into[n])), deadline=soon(60))
            return into[n] == data

        assert all(pool.map(call, range(200)))
        assert server.stats().requests == {"tcp": 200}
        for channel in channels:
            channel.close()
        wait_until(lambda: server.stats().connections == 0)


def test_clients_that_come_in_vain_do_not_take_threads_without_end() -> None:
    with serving(limits=Limits(connections=1, handshake_s=30.0)) as server:
        with connect(server.address, transport="tcp", deadline=soon()) as channel:
            socks = [plug(server) for _ in range(150)]  # they say nothing, so each takes its time
            wait_until(lambda: server.stats().pushed_out == 150 - 56)  # of 64, 8 are kept for other addresses
            wait_until(lambda: _threads("kvstore-serve") == 57)
            with pytest.raises(PeerBusy, match="1 connections"):
                connect(server.address, transport="tcp", deadline=soon())
            assert channel.call(SINK, b"", deadline=soon()).status == SINK
            for sock in socks:
                sock.close()
        wait_until(lambda: _has_room(server))


def _has_room(server: Server) -> bool:
    try:
        is_well(server)
    except PeerBusy:
        return False
    return True


def _threads(prefix: str) -> int:
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


def test_out_of_descriptors_clients_are_cut_off_and_later_served_again(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        is_well(server)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        blocked: list[int] = []
        stranger = socket.socket()
        waiting = socket.socket()
        waiting.settimeout(30)
        host, _, port = server.address.rpartition(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
        try:
            while True:
                try:
                    blocked.append(os.dup(0))
                except OSError:
                    break
            with caplog.at_level(logging.ERROR):
                for sock in (stranger, waiting):
                    sock.connect((host, int(port)))
                assert ended(waiting), "it is told, not left waiting"
        finally:
            for fd in blocked:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            stranger.close()
            waiting.close()
        assert len([record for record in caplog.records if "cannot accept" in record.message]) == 1
        is_well(server)


def test_out_of_threads_a_client_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr("kvstore_transport.server.start_with_small_stack", none_left)
            with plug(server) as sock:
                assert ended(sock)
        assert server.stats().connections == 0
        is_well(server)


def test_accept_fails_in_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the network that accept(2) reports, and a lasting shortage that no spare descriptor cures."""
    errors = [ConnectionAbortedError(103, "aborted"), *[OSError(12, "no memory")] * 2]

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if errors:
                raise errors.pop(0)
            return super().accept()

    plain = accepting.listen_tcp("127.0.0.1", 0)
    scripted = Listener(plain.family, plain.type, fileno=plain.detach())
    monkeypatch.setattr("kvstore_transport.server.listen_tcp", lambda host, port: scripted)
    with serving() as server:
        is_well(server)
    assert errors == []


# Places.


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    with serving(path=str(tmp_path / "s")) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(TransportUnavailable, match="cannot listen"):
            Server(Toy(), listen=("127.0.0.1", port))
        with pytest.raises(TransportUnavailable, match="another process listens"):
            Server(Toy(), listen=("127.0.0.1", 0), path=str(tmp_path / "s"))
        is_well(server)
    with pytest.raises(ValueError, match="listen or path"):
        Server(Toy())
    with pytest.raises(TransportUnavailable, match="cannot listen"):
        Server(Toy(), listen=("203.0.113.1", 0))


def test_all_addresses_and_the_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(listen=("", 0), path=str(path)) as server:
        port = server.address.rpartition(":")[2]
        assert server.address in (f"127.0.0.1:{port}", f"[::1]:{port}")
        assert path.stat().st_mode & 0o777 == 0o600
        for address in (f"127.0.0.1:{port}", f"localhost:{port}", server.address, server.path):
            with connect(address, transport="tcp", deadline=soon()) as channel:
                channel.call(SINK, b"", deadline=soon())
    assert not path.exists()
    server.close()


def test_a_socket_file_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with serving(listen=None, path=path) as server:
        assert server.address == ""
        is_well(server)


def test_a_forked_child_keeps_neither_port_nor_connections() -> None:
    """It may live longer than the server: an engine's worker, for instance."""
    read, write = os.pipe()
    with serving() as server, connect(server.address, transport="tcp", deadline=soon()) as channel:
        channel.call(SINK, b"", deadline=soon())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
            child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            is_well(server)
            channel.call(SINK, b"", deadline=soon())
            server.close()
            with pytest.raises(ConnectionLost):
                channel.call(SINK, b"", deadline=soon())
            with pytest.raises(ConnectionLost):
                connect(server.address, transport="tcp", deadline=soon())
            host, _, port = server.address.rpartition(":")
            with serving(listen=(host, int(port))) as again:
                is_well(again)
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)


def test_it_counts() -> None:
    with serving() as server:
        for _ in range(2):
            with connect(server.address, transport="tcp", deadline=soon()) as channel:
                channel.call(SINK, b"", [memoryview(bytes(1000))], deadline=soon())
                into = memoryview(bytearray(500))
                channel.call(MAKE, (500).to_bytes(8, "little"), plan=plan_into(into), deadline=soon())
                assert server.stats().connections == 1
            wait_until(lambda: server.stats().connections == 0)
        stats = server.stats()
    assert (stats.accepted, stats.refused, stats.failed) == (2, 0, 0)
    assert (stats.requests, stats.received_bytes, stats.sent_bytes) == ({"tcp": 4}, {"tcp": 2000}, {"tcp": 1000})


def test_a_handler_that_hangs_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore_transport.server._ABORT_S", 0.2)
    go, entered = threading.Event(), threading.Event()

    def handler(incoming: Incoming) -> Answer:
        entered.set()
        go.wait(60)
        return Answer(0)

    with serving(handler) as server, ThreadPoolExecutor(1) as pool:
        with connect(server.address, transport="tcp", deadline=soon()) as channel:
            call = pool.submit(lambda: channel.call(SINK, b"", deadline=soon()))
            assert entered.wait(30)
            with caplog.at_level(logging.ERROR):
                server.close()
            assert "1 connections are stuck" in caplog.text
            assert isinstance(call.exception(30), ConnectionLost)
        go.set()
        wait_until(lambda: _threads("kvstore-serve") == 0)


def test_done_that_fails_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def done() -> None:
        calls.append(1)
        raise ZeroDivisionError("in done")

    with serving(lambda incoming: Answer(0, b"", (), done)) as server:
        with connect(server.address, transport="tcp", deadline=soon()) as channel:
            channel.call(0, b"", deadline=soon())
            with caplog.at_level(logging.ERROR), pytest.raises(ConnectionLost):
                channel.call(0, b"", deadline=soon())
        is_well_again = server.stats
        wait_until(lambda: is_well_again().connections == 0)
    assert calls == [1]
    assert "in done" in caplog.text
