"""The frame format: what is packed is unpacked, and any bytes are a right frame or a `ProtocolError`."""

from __future__ import annotations

import socket
import struct
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_transport.control import Control
from kvstore_transport.errors import ConnectionLost, ProtocolError
from kvstore_transport.frames import HEADER_BYTES, Flags, Header, Kind, check_meta, pack_header, unpack_header
from kvstore_transport.seam import Limits

LIMITS = Limits(max_meta=1000, max_body=1 << 40)
U32, U64 = (1 << 32) - 1, (1 << 64) - 1

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    code=st.integers(0, 255),
    flags=st.sampled_from([Flags.NONE, Flags.BODY_SUM, Flags.LEASE, Flags.BODY_SUM | Flags.LEASE]).map(int),
    number=st.integers(0, U32),
    body_nbytes=st.integers(0, 1 << 40),
    budget_us=st.integers(0, U64),
    body_sum=st.integers(0, U64),
)


def unpack(data: bytes) -> tuple[Header, bytes]:
    """Header and meta of a whole frame."""
    header, digest = unpack_header(data[:HEADER_BYTES], max_meta=LIMITS.max_meta, max_body=LIMITS.max_body)
    meta = data[HEADER_BYTES : HEADER_BYTES + header.meta_nbytes]
    check_meta(data[:HEADER_BYTES], meta, digest)
    return header, meta


@given(headers, st.binary(max_size=1000))
def test_what_is_packed_is_unpacked(header: Header, meta: bytes) -> None:
    frame = pack_header(header, meta) + meta
    assert len(frame) == HEADER_BYTES + len(meta)
    assert unpack(frame) == (header._replace(meta_nbytes=len(meta)), meta)


@given(headers, st.binary(max_size=200), st.data())
def test_one_changed_bit_is_found(header: Header, meta: bytes, data: st.DataObject) -> None:
    frame = bytearray(pack_header(header, meta) + meta)
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        unpack(bytes(frame))


@given(st.binary(max_size=120))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


@given(headers, st.sampled_from(["meta", "body"]), st.integers(1, 1 << 20))
def test_lengths_beyond_the_limit_are_refused_though_all_sums_are_right(header: Header, what: str, by: int) -> None:
    limits = replace(LIMITS, max_meta=0) if what == "meta" else replace(LIMITS, max_body=header.body_nbytes)
    header = header._replace(body_nbytes=header.body_nbytes + (by if what == "body" else 0))
    frame = pack_header(header, bytes(by % 100 + 1) if what == "meta" else b"")
    with pytest.raises(ProtocolError, match="at most"):
        unpack_header(frame, max_meta=limits.max_meta, max_body=limits.max_body)


@pytest.mark.parametrize(("at", "value"), [(4, 0), (4, 8), (4, 255), (6, 4), (7, 1)])
def test_unknown_kinds_and_flags_are_refused(at: int, value: int) -> None:
    frame = bytearray(pack_header(Header(Kind.REQUEST), b""))
    frame[at] = value
    with pytest.raises(ProtocolError, match="unknown"):
        unpack_header(bytes(frame), max_meta=0, max_body=0)


def test_the_layout_is_as_it_is_written_down() -> None:
    frame = pack_header(Header(Kind.REPLY, 7, Flags.BODY_SUM, 9, 0, 11, 13, 15), b"meta")
    assert struct.unpack("<4sBBHIIQQQ", frame[:40]) == (b"KVT1", 5, 7, 1, 9, 4, 11, 13, 15)


@given(st.lists(st.one_of(st.binary(max_size=300), headers.map(lambda header: pack_header(header, b""))), max_size=6))
def test_any_stream_of_bytes_ends_in_an_error_or_yields_frames(pieces: list[bytes]) -> None:
    """Over a real socket. What was accepted is exactly what was sent, frame by frame."""
    ours, theirs = socket.socketpair()
    stream = b"".join(pieces)
    control = Control(ours, "fuzz", stall_s=30.0)
    try:
        with theirs:
            theirs.sendall(stream)
        accepted = bytearray()
        with pytest.raises((ProtocolError, ConnectionLost)):
            _take_all(control, accepted)
        assert stream.startswith(accepted)
        assert not control.usable
    finally:
        control.close()


def _take_all(control: Control, accepted: bytearray) -> None:
    while True:
        header, meta = control.receive_frame(limits=LIMITS, deadline=time.monotonic() + 30)
        accepted += pack_header(header, meta) + meta


def test_a_claimed_length_costs_no_memory() -> None:
    limits = Limits(max_meta=64 << 20)
    ours, theirs = socket.socketpair()
    control = Control(ours, "liar", stall_s=30.0)
    head = bytearray(pack_header(Header(Kind.REQUEST), bytes(64 << 20)))

    def say() -> None:
        theirs.sendall(bytes(head) + b"12345")
        theirs.close()

    sender = threading.Thread(target=say)
    tracemalloc.start()
    try:
        sender.start()
        with pytest.raises(ConnectionLost):
            control.receive_frame(limits=limits, deadline=time.monotonic() + 30)
        sender.join()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        control.close()
        theirs.close()
    assert peak < 2 << 20, f"{peak} bytes for a frame that was never sent"
