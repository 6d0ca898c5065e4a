"""What is received together with a frame's header: the same bytes arrive, however the stream is cut; and the few other
short cuts of the hot path, next to the plain way of doing the same."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64

from kvstore_transport._sockets import advance, fill
from kvstore_transport.control import Control
from kvstore_transport.errors import ConnectionLost, ProtocolError
from kvstore_transport.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    check_meta,
    pack_header,
    unpack_header,
)
from kvstore_transport.process import in_main_thread, process_id
from kvstore_transport.seam import Limits
from kvstore_transport.tls import TlsControl
from tests.transport_support import pattern, soon, tls_contexts

LIMITS = Limits(max_meta=1 << 20)
AHEAD = 1024


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    return one, two


@contextmanager
def raw_and_control(way: str) -> Iterator[tuple[Callable[[bytes], None], Control]]:
    """(sends bytes, receives them)."""
    left, right = socket.socketpair() if way == "unix" else tcp_pair()
    with ThreadPoolExecutor(1) as pool:
        if way == "tls":
            server, client = tls_contexts()
            shaking = pool.submit(lambda: server.wrap_socket(right, server_side=True))
            left = client.wrap_socket(left, server_hostname="127.0.0.1")
            control: Control = TlsControl(shaking.result(30), "left")
        else:
            control = Control(right, "left")
        try:
            yield left.sendall, control
        finally:
            control.close()
            left.close()


def frame(number: int, meta: bytes, body_nbytes: int) -> bytes:
    return pack_header(Header(Kind.REQUEST, 1, 0, number, 0, body_nbytes), meta) + meta


_LENGTHS = st.one_of(st.integers(0, 200), st.integers(AHEAD - HEADER_BYTES - 4, AHEAD + 4), st.integers(0, 5000))


@given(
    frames=st.lists(st.tuples(_LENGTHS, _LENGTHS, st.sampled_from(["receive", "scatter", "skip"])), max_size=6),
    cuts=st.lists(st.integers(1, 3000), max_size=8),
    way=st.sampled_from(["tcp", "unix", "tls"]),
    other_thread=st.booleans(),
)
@settings(max_examples=60)
def test_the_same_bytes_arrive_however_the_stream_is_cut(
    frames: list[tuple[int, int, str]], cuts: list[int], way: str, other_thread: bool
) -> None:
    """Frames that come in one piece, or cut anywhere: over TCP and TLS, where more than the header is taken at a time,
    as over a Unix socket, where it is not."""
    metas = [pattern(meta, n) for n, (meta, _, _) in enumerate(frames)]
    bodies = [pattern(body, n + 100) for n, (_, body, _) in enumerate(frames)]
    stream = b"".join(frame(n, metas[n], len(bodies[n])) + bodies[n] for n in range(len(frames)))
    got: list[tuple[int, bytes, bytes | None]] = []

    def receive(control: Control) -> None:
        for _, _, how in frames:
            header, meta = control.receive_frame(limits=LIMITS, deadline=soon())
            nbytes = header.body_nbytes
            into = bytearray(nbytes)
            view = memoryview(into)
            if how == "skip":
                control.skip(nbytes, deadline=soon())
            elif how == "receive":
                control.receive_into([view], deadline=soon())
            else:
                third = nbytes // 3
                control.receive_into([view[:third], view[third:third], view[third:]], deadline=soon())
            got.append((header.number, meta, None if how == "skip" else bytes(into)))
        assert not control.ahead

    with raw_and_control(way) as (send, control), ThreadPoolExecutor(1) as pool:

        def send_all() -> None:
            at = 0
            for cut in cuts:
                if stream[at : at + cut]:
                    send(stream[at : at + cut])
                at += cut
            if stream[at:]:
                send(stream[at:])

        if other_thread:
            receiving = pool.submit(receive, control)
            send_all()
            receiving.result(60)
        else:
            sending = pool.submit(send_all)
            receive(control)
            sending.result(60)
    expected = [
        (n, metas[n], None if how == "skip" else bodies[n]) for n, (_, _, how) in enumerate(frames)
    ]  # fmt: skip
    assert got == expected


@pytest.mark.parametrize("way", ["tcp", "unix", "tls"])
@pytest.mark.parametrize("meta_nbytes", [0, 1, 24, 64, 1000, 5000])
@pytest.mark.parametrize("body_nbytes", [(64 << 10) + AHEAD, 200_001])
def test_a_large_body_whose_beginning_came_along_arrives(way: str, meta_nbytes: int, body_nbytes: int) -> None:
    meta, body = pattern(meta_nbytes, 1), pattern(body_nbytes, 2)
    into = bytearray(body_nbytes + 2)
    with raw_and_control(way) as (send, control), ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, frame(1, meta, body_nbytes) + body)
        assert control.receive_frame(limits=LIMITS, deadline=soon())[1] == meta
        control.receive_into([memoryview(into)[1:-1]], deadline=soon())
        sending.result(60)
    assert into == b"\0" + body + b"\0"


def test_a_frame_that_came_along_is_told_of() -> None:
    """The descriptor is not ready any more then: who polls it must ask (`_ucx_drive`)."""
    with raw_and_control("tcp") as (send, control):
        seen = [control.ahead]
        send(frame(1, b"a", 0) + frame(2, b"b", 0) + frame(3, b"c", 0)[:20])
        for last in (False, False, True):
            if last:
                send(frame(3, b"c", 0)[20:])
            seen.append(control.receive_frame(limits=LIMITS, deadline=soon())[1] != b"" and control.ahead)
        assert seen == [False, True, True, False]


@pytest.mark.parametrize("cut", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_stream_that_ends_within_a_frame_is_lost(cut: int) -> None:
    """Also if what there is came along with the frame before."""
    left, right = tcp_pair()
    control = Control(right, "left")
    try:
        left.sendall(frame(1, b"whole", 0) + frame(2, b"cut off", 0)[:cut])
        left.close()
        assert control.receive_frame(limits=LIMITS, deadline=soon())[1] == b"whole"
        with pytest.raises(ConnectionLost):
            control.receive_frame(limits=LIMITS, deadline=soon())
    finally:
        control.close()


def test_damage_in_what_came_along_is_noticed() -> None:
    with raw_and_control("tcp") as (send, control):
        bad = bytearray(frame(2, b"meta", 0))
        bad[-1] ^= 1
        send(frame(1, b"", 0) + bad)
        control.receive_frame(limits=LIMITS, deadline=soon())
        with pytest.raises(ProtocolError, match="checksum"):
            control.receive_frame(limits=LIMITS, deadline=soon())
        assert not control.usable


def test_nothing_is_taken_ahead_of_descriptors() -> None:
    """They go with certain bytes: who takes the bytes by another call loses the descriptors."""
    left, right = socket.socketpair()
    sender, receiver = Control(left, "right"), Control(right, "left")
    reading, writing = os.pipe()
    try:
        sender.send_frame(Header(Kind.GRANT, number=7), b"one comes", deadline=soon())
        sender.send_fds([writing], deadline=soon())
        assert receiver.receive_frame(limits=LIMITS, deadline=soon())[1] == b"one comes"
        (fd,) = receiver.receive_fds(1, deadline=soon())
        os.write(fd, b"!")
        os.close(fd)
        assert os.read(reading, 2) == b"!"
    finally:
        for each in (sender, receiver):
            each.close()
        os.close(reading)
        os.close(writing)


@given(st.binary(max_size=9000))
def test_the_sum_of_joined_parts_is_that_of_one_after_the_other(meta: bytes) -> None:
    head = pack_header(Header(Kind.REPLY, 3, 0, 9, 0, 5), meta)
    state = xxh3_64(head[:40])
    state.update(meta)
    header, digest = unpack_header(head, max_meta=9000, max_body=5)
    assert digest == state.intdigest()
    assert header.meta_nbytes == len(meta)
    check_meta(head, meta, digest)


@given(st.integers(0, 9000), st.integers(0, 9000))
@settings(max_examples=30)
def test_small_frames_are_sent_as_the_same_bytes(meta_nbytes: int, body_nbytes: int) -> None:
    """Joined into one piece, or gathered."""
    meta, body = pattern(meta_nbytes, 1), pattern(body_nbytes, 2)
    views = [memoryview(body)[: body_nbytes // 2], memoryview(b""), memoryview(body)[body_nbytes // 2 :]]
    left, right = tcp_pair()
    control = Control(left, "right")
    try:
        control.send_frame(Header(Kind.REPLY, 1, 0, 2, 0, body_nbytes), meta, views, deadline=soon())
        expected = pack_header(Header(Kind.REPLY, 1, 0, 2, 0, body_nbytes), meta) + meta + body
        found = b""
        while len(found) < len(expected):
            found += right.recv(len(expected) - len(found))
        assert found == expected
    finally:
        control.close()
        right.close()


@given(st.lists(st.integers(1, 40), max_size=6), st.binary(max_size=150))
def test_views_are_filled_as_far_as_the_data_goes(lengths: list[int], data: bytes) -> None:
    memory = bytearray(sum(lengths))
    views: list[memoryview] = []
    at = 0
    for length in lengths:
        views.append(memoryview(memory)[at : at + length])
        at += length
    left, done = fill(views, memoryview(data))
    assert done == min(len(data), len(memory))
    assert memory[:done] == data[:done]
    for view in left:
        view[:] = b"\xff" * len(view)
    assert memory == data[:done] + b"\xff" * (len(memory) - done)
    parts: list[bytes | memoryview] = [*views]
    rest = parts[advance(parts, 0, done) :]
    assert [len(part) for part in rest] == [len(view) for view in left]


def test_the_process_and_its_main_thread_are_known_in_a_child_too() -> None:
    def facts() -> Sequence[Any]:
        return [
            process_id() == os.getpid(),
            in_main_thread() == (threading.current_thread() is threading.main_thread()),
        ]

    with ThreadPoolExecutor(1) as pool:
        assert [*facts(), *pool.submit(facts).result()] == [True] * 4
        assert in_main_thread()
        assert not pool.submit(in_main_thread).result()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, bytes([*facts(), in_main_thread()]))
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 9) == b"\x01\x01\x01"
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
