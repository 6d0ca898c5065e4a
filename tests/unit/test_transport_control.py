"""`Control`: how the control connection sends, receives, waits, ends; and addresses."""

from __future__ import annotations

import math
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_transport import addresses
from kvstore_transport.addresses import Address, connect_control, parse_address
from kvstore_transport.control import Control, EarlyReply
from kvstore_transport.errors import ConnectionLost, DeadlinePassed, ProtocolError, TransportClosed, TransportError
from kvstore_transport.frames import Header, Kind, pack_header
from kvstore_transport.seam import Limits
from kvstore_transport.tls import TlsControl
from tests.transport_support import MIB, pattern, soon, tls_contexts

LIMITS = Limits(max_meta=64 * MIB)
WAYS = ["tcp", "unix", "tls"]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return one, two


class Ends:
    """Two controls that are connected, and threads to use them in."""

    def __init__(self, way: str, stall_s: float) -> None:
        left, right = socket.socketpair() if way == "unix" else tcp_pair()
        self.pool = ThreadPoolExecutor(2)
        if way == "tls":
            server, client = tls_contexts()
            shaking = self.pool.submit(lambda: server.wrap_socket(left, server_side=True))
            secured = client.wrap_socket(right, server_hostname="127.0.0.1")
            self.a: Control = TlsControl(shaking.result(30), "b", stall_s=stall_s)
            self.b: Control = TlsControl(secured, "a", stall_s=stall_s)
        else:
            self.a, self.b = Control(left, "b", stall_s=stall_s), Control(right, "a", stall_s=stall_s)

    def go(self, call: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        return self.pool.submit(call, *args, **more)

    def close(self) -> None:
        self.a.abort()
        self.b.abort()
        self.pool.shutdown()
        self.a.close()
        self.b.close()


@contextmanager
def ends(way: str, stall_s: float = 30.0) -> Iterator[Ends]:
    both = Ends(way, stall_s)
    try:
        yield both
    finally:
        both.close()


def in_main_thread(call: Callable[[], Any]) -> Any:
    return call()


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


THREADS = [in_main_thread, in_another_thread]


_CALLS: dict[str, Callable[[Control, float], Any]] = {
    "send": lambda control, deadline: control.send([bytes(64 * MIB)], deadline=deadline),
    "receive": lambda control, deadline: control.receive_frame(limits=LIMITS, deadline=deadline),
}


# What arrives.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", THREADS)
def test_frames_and_bodies_of_any_cut_arrive(way: str, run: Callable[[Callable[[], Any]], Any]) -> None:
    rng = random.Random(5)
    with ends(way) as both:
        for total in (0, 1, 100, 70_000, 3 * MIB, 20 * MIB):
            data = pattern(total, total)
            cuts = sorted(rng.randrange(total + 1) for _ in range(2500))
            views = [memoryview(data)[a:b] for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
            into = bytearray(total)
            cuts = sorted(rng.randrange(total + 1) for _ in range(1500))
            places = [memoryview(into)[a:b] for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
            meta = pattern(rng.choice([0, 5, 1 << 20]), 1)
            header = Header(Kind.REQUEST, 3, 0, 4, 0, total)

            def send(header: Header = header, meta: bytes = meta, views: Sequence[memoryview] = views) -> None:
                both.a.send_frame(header, meta, views, deadline=soon())

            def receive(places: Sequence[memoryview] = places) -> tuple[Header, bytes]:
                found = both.b.receive_frame(limits=LIMITS, deadline=soon())
                both.b.receive_into(places, deadline=soon())
                return found

            receiving = both.go(receive)
            run(send)
            assert receiving.result(60) == (header._replace(meta_nbytes=len(meta)), meta)
            assert into == data
            sending = both.go(send)
            assert run(receive) == (header._replace(meta_nbytes=len(meta)), meta)
            sending.result(60)


@pytest.mark.parametrize("way", WAYS)
def test_skipped_bytes_are_gone(way: str) -> None:
    with ends(way) as both:
        sending = both.go(both.a.send, [bytes(MIB), b"next"], deadline=soon())
        both.b.skip(0, deadline=soon())
        both.b.skip(MIB, deadline=soon())
        into = bytearray(4)
        both.b.receive_into([memoryview(into)], deadline=soon())
        assert into == b"next"
        sending.result(30)


def test_frames_of_several_threads_do_not_mix() -> None:
    with ends("tcp") as both, ThreadPoolExecutor(4) as pool:
        body = [memoryview(bytes([n]) * 300_000) for n in range(4)]

        def send(n: int) -> None:
            for _ in range(20):
                both.a.send_frame(Header(Kind.REQUEST, n, body_nbytes=300_000), b"m", [body[n]], deadline=soon())

        sending = [pool.submit(send, n) for n in range(4)]
        into = memoryview(bytearray(300_000))
        for _ in range(80):
            header, _ = both.b.receive_frame(limits=LIMITS, deadline=soon())
            both.b.receive_into([into], deadline=soon())
            assert into == body[header.code]
        for each in sending:
            each.result(30)


def test_the_frame_that_is_awaited() -> None:
    with ends("unix") as both:
        both.a.send_frame(Header(Kind.GRANT, number=5), b"go", deadline=soon())
        assert both.b.await_frame(Kind.GRANT, 5, limits=LIMITS, deadline=soon())[1] == b"go"
        both.a.send_frame(Header(Kind.REPLY, 9, number=6), b"no", deadline=soon())
        with pytest.raises(EarlyReply) as early:
            both.b.await_frame(Kind.GRANT, 6, limits=LIMITS, deadline=soon())
        assert (early.value.header.code, early.value.meta) == (9, b"no")
        assert both.b.usable
        both.a.send_frame(Header(Kind.GRANT, number=8), b"", deadline=soon())
        with pytest.raises(ProtocolError, match="GRANT 8 instead of GRANT 7"):
            both.b.await_frame(Kind.GRANT, 7, limits=LIMITS, deadline=soon())
        assert not both.b.usable


# Waiting.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", THREADS)
@pytest.mark.parametrize("phase", ["header", "rest of the header", "meta", "body", "pieces", "send"])
def test_deadlines_hold_in_every_phase(way: str, run: Callable[[Callable[[], Any]], Any], phase: str) -> None:
    with ends(way) as both:
        frame = pack_header(Header(Kind.REQUEST), b"meta")
        into = memoryview(bytearray(100))

        def call() -> None:
            deadline = time.monotonic() + 0.2
            if phase == "send":
                both.b.send([bytes(64 * MIB)], deadline=deadline)
            elif phase == "body":
                both.b.receive_into([into], deadline=deadline)
            elif phase == "pieces":
                both.b.receive_into([into[at : at + 1] for at in range(100)], deadline=deadline)
            else:
                both.b.receive_frame(limits=LIMITS, deadline=deadline)

        sent = {"rest of the header": frame[:20], "meta": frame + b"me", "body": bytes(99), "pieces": bytes(50)}
        if phase in sent:
            both.a.send([sent[phase]], deadline=soon())
        began = time.monotonic()
        with pytest.raises(DeadlinePassed, match="a: the deadline passed"):
            run(call)
        assert 0.2 <= time.monotonic() - began < 20
        assert not both.b.usable
        with pytest.raises(TransportClosed):
            both.b.send([b"x"], deadline=soon())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", THREADS)
@pytest.mark.parametrize("what", ["receive", "send"])
def test_a_stall_is_noticed_without_a_deadline(way: str, run: Callable[[Callable[[], Any]], Any], what: str) -> None:
    with ends(way, stall_s=0.2) as both:
        both.a.send([bytes(50)], deadline=soon())

        def call() -> None:
            if what == "send":
                both.b.send([bytes(64 * MIB)], deadline=math.inf)
            else:
                both.b.receive_into([memoryview(bytearray(100))], deadline=math.inf)

        with pytest.raises(ConnectionLost, match=r"no progress for 0\.2 s"):
            run(call)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_slow_is_no_stall(way: str) -> None:
    """A byte now and then, for longer than the longest time without any."""
    with ends(way, stall_s=3.0) as both:
        step = threading.Event()

        def trickle() -> None:
            for n in range(40):
                both.a.send([bytes([n])], deadline=soon())
                step.wait(0.1)

        sending = both.go(trickle)
        into = bytearray(40)
        began = time.monotonic()
        in_another_thread(lambda: both.b.receive_into([memoryview(into)], deadline=math.inf))
        assert time.monotonic() - began > 3.0
        assert into == bytes(range(40))
        sending.result(30)


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_takes_little_at_a_time_does_not_stretch_a_deadline(way: str) -> None:
    """On a Unix socket, SO_SNDTIMEO would begin anew with every buffer that the reader frees."""
    with ends(way) as both:
        stop = threading.Event()

        def sip() -> None:
            into = memoryview(bytearray(300_000))
            while not stop.wait(0.05):
                both.b.receive_into([into], deadline=soon())

        sipping = both.go(sip)
        began = time.monotonic()
        with pytest.raises(DeadlinePassed):
            in_another_thread(lambda: both.a.send([bytes(256 * MIB)], deadline=began + 0.5))
        assert time.monotonic() - began < 10
        stop.set()
        both.b.abort()
        assert isinstance(sipping.exception(30), TransportError | None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["receive", "send"])
def test_signals_do_not_stretch_a_deadline(way: str, what: str) -> None:
    """A timer's signals, in the main thread, come faster than a receive times out."""
    count = 0

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    with ends(way) as both:
        before = signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        began = time.monotonic()
        try:
            call = _CALLS[what]
            with pytest.raises(DeadlinePassed):
                call(both.a, began + 0.4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < 20
        assert count > 2


@given(st.lists(st.one_of(st.just(math.inf), st.floats(1e-7, 1e9), st.floats(0.001, 30.0)), min_size=1, max_size=30))
def test_the_sockets_timeout_is_never_longer_than_it_may_be(waits: list[float]) -> None:
    left, right = socket.socketpair()
    control = Control(left, "x")
    try:
        for wait in waits:
            control._arm(socket.SO_RCVTIMEO, wait)
            armed = control._armed[socket.SO_RCVTIMEO]
            assert armed <= wait or wait > 1e6
            assert armed >= min(wait / 2, 5.0), "it would wake up for nothing all the time"
            raw = left.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            seconds = int.from_bytes(raw[:8], "little") + int.from_bytes(raw[8:], "little") / 1e6
            if armed == math.inf:
                assert seconds == 0
            else:
                assert seconds > 0, "0 would be for ever"
                assert seconds <= armed + 0.02  # in ticks of the kernel
    finally:
        control.close()
        right.close()


# Ends.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["receive", "send"])
@pytest.mark.parametrize("run", THREADS)
def test_abort_ends_a_blocked_call(way: str, what: str, run: Callable[[Callable[[], Any]], Any]) -> None:
    with ends(way) as both:
        threading.Timer(0.1, both.a.abort).start()
        began = time.monotonic()
        with pytest.raises(TransportClosed):
            run(
                lambda: (
                    both.a.send([bytes(64 * MIB)], deadline=soon())
                    if what == "send"
                    else both.a.receive_frame(limits=LIMITS, deadline=math.inf)
                )
            )
        assert time.monotonic() - began < 20
        assert both.a.fileno() >= 0
        both.a.close()
        assert both.a.fileno() == -1
        both.a.close()
        both.a.abort()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["receive", "send"])
def test_abort_is_felt_by_the_peer_at_once(way: str, what: str) -> None:
    """Even by one that waits for room in our receive buffer, though nobody closes the descriptor."""
    with ends(way) as both:
        blocked = both.go(
            lambda: (
                both.b.send([bytes(64 * MIB)], deadline=soon())
                if what == "send"
                else both.b.receive_frame(limits=LIMITS, deadline=soon())
            )
        )
        if what == "send":
            select.select([both.a.fileno()], [], [], 30)
        assert not both.b.peer_gone()
        both.a.abort()
        with pytest.raises(ConnectionLost):
            blocked.result(20)


@pytest.mark.parametrize("way", WAYS)
def test_the_peer_is_gone(way: str) -> None:
    with ends(way) as both:
        both.a.send([b"unread"], deadline=soon())
        assert not both.b.peer_gone()
        both.a.close()
        end = soon()
        while not both.b.peer_gone():
            assert time.monotonic() < end
        with pytest.raises(ConnectionLost):
            both.b.receive_into([memoryview(bytearray(100))], deadline=soon())
        assert both.b.peer_gone()


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_what_was_said_before_a_reset_can_be_read(way: str) -> None:
    with ends(way) as both:
        blocked = both.go(both.b.send, [bytes(64 * MIB)], deadline=soon())
        select.select([both.a.fileno()], [], [], 30)
        both.a.send_frame(Header(Kind.REPLY, 9, number=3), b"no, thank you", deadline=soon())
        both.a.close()  # with bytes unread: a reset
        with pytest.raises(ConnectionLost):
            blocked.result(30)
        words = both.b.last_words(limits=LIMITS)
        assert words is not None
        assert (words[0].code, words[1]) == (9, b"no, thank you")


def test_there_may_be_no_last_words() -> None:
    with ends("tcp") as both:
        blocked = both.go(both.b.send, [bytes(64 * MIB)], deadline=soon())
        select.select([both.a.fileno()], [], [], 30)
        both.a.send([b"KVT1 and no more"], deadline=soon())
        both.a.close()
        with pytest.raises(ConnectionLost):
            blocked.result(30)
        assert both.b.last_words(limits=LIMITS) is None


@pytest.mark.parametrize("way", WAYS)
def test_finish_lets_the_last_words_through(way: str) -> None:
    with ends(way) as both:
        both.b.send([bytes(100_000)], deadline=soon())
        both.a.send_frame(Header(Kind.REFUSE), b"no", deadline=soon())
        finishing = both.go(both.a.finish, deadline=soon())
        assert both.b.receive_frame(limits=LIMITS, deadline=soon())[1] == b"no"
        both.b.close()
        finishing.result(30)
        both.a.finish(deadline=soon())
        assert not both.a.usable


def test_out_of_descriptors_an_abort_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError("no descriptor is free")

    with ends("tcp") as both:
        monkeypatch.setattr(socket, "socketpair", none_left)
        receiving = both.go(both.b.receive_frame, limits=LIMITS, deadline=soon())
        both.a.abort()
        with pytest.raises(ConnectionLost):
            receiving.result(30)


# Descriptors.


def test_descriptors_are_passed() -> None:
    with ends("unix") as both:
        files = [os.memfd_create(f"kvstore-test-{n}") for n in range(3)]
        try:
            for n, fd in enumerate(files):
                os.write(fd, bytes([n]) * 10)
            both.a.send_frame(Header(Kind.GRANT), b"three", deadline=soon())
            both.a.send_fds(files, deadline=soon())
            both.a.send_frame(Header(Kind.GRANT), b"behind", deadline=soon())
            assert both.b.receive_frame(limits=LIMITS, deadline=soon())[1] == b"three"
            got = both.b.receive_fds(3, deadline=soon())
            assert both.b.receive_frame(limits=LIMITS, deadline=soon())[1] == b"behind"
            for n, fd in enumerate(got):
                assert os.pread(fd, 100, 0) == bytes([n]) * 10
                assert not os.get_inheritable(fd)
                os.close(fd)
        finally:
            for fd in files:
                os.close(fd)


@pytest.mark.parametrize("passed", [0, 1, 3, 5])
def test_another_number_of_descriptors_is_refused_and_none_is_kept(passed: int) -> None:
    with ends("unix") as both:
        before = len(os.listdir("/proc/self/fd"))
        if passed:
            both.a.send_fds([both.a.fileno()] * passed, deadline=soon())
        else:
            both.a.send([b"F"], deadline=soon())
        with pytest.raises(ProtocolError):
            both.b.receive_fds(2, deadline=soon())
        assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_descriptors_ends_by_its_deadline() -> None:
    with ends("unix") as both, pytest.raises(DeadlinePassed):
        both.b.receive_fds(1, deadline=time.monotonic() + 0.1)


# Addresses.


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:1", Address("host", 1)),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535)),
        ("[::1]:7", Address("::1", 7)),
        ("/run/kvstore.sock", Address("", 0, "/run/kvstore.sock")),
        ("./a:1", Address("", 0, "./a:1")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "::1:7", "host:65536", "host:-1", "host:x", "host:²"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_address(text)


def connect_to(address: Address, deadline: float) -> Control:
    return connect_control(address, tls=None, stall_s=1.0, deadline=deadline)


def test_nobody_listens(tmp_path: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (Address("127.0.0.1", port), Address("", 0, str(tmp_path / "nothing")), Address("", 0, "/" * 200)):
        with pytest.raises(ConnectionLost, match="not connected"):
            connect_to(address, soon())


def test_a_name_is_looked_up_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    asked: list[threading.Thread] = []

    def never(host: str, port: int, **options: Any) -> list[Any]:
        if options["flags"] == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not numeric")
        asked.append(threading.current_thread())
        answered.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    with pytest.raises(DeadlinePassed, match="not resolved"):
        connect_to(Address("slow.example", 1), time.monotonic() + 0.1)
    answered.set()
    asked[0].join(30)
    with pytest.raises(ConnectionLost, match="try again"):
        connect_to(Address("slow.example", 1), soon())
    asked[1].join(30)


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port, dead = listener.getsockname()[1], other.getsockname()[1]
        other.close()
        places = [(socket.AF_INET, ("127.0.0.1", dead)), (socket.AF_INET, ("127.0.0.1", port))]
        monkeypatch.setattr(addresses, "_resolve", lambda address, deadline: places)
        connect_to(Address("both.example", 1), soon()).close()
        monkeypatch.setattr(addresses, "_resolve", lambda address, deadline: [])
        with pytest.raises(ConnectionLost, match="no address"):
            connect_to(Address("none.example", 1), soon())


def test_a_full_backlog_is_waited_for_within_the_deadline(tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        first = connect_to(Address("", 0, path), soon())
        with pytest.raises(DeadlinePassed):
            connect_to(Address("", 0, path), time.monotonic() + 0.1)
        first.close()
