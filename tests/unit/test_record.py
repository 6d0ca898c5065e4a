"""Records: every dtype byte for byte, offsets known before the header is read, and one range per layer."""

from __future__ import annotations

import array
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.keys import Key, opaque_key
from kvstore.layout import DTYPES, KVLayout
from kvstore.record import (
    HEADER_BYTES,
    KIND_KV,
    KIND_OPAQUE,
    MAX_SEGMENTS,
    NeedMore,
    RecordSpec,
    build_record,
    checksum,
    kv_spec,
    opaque_spec,
    parse_header,
)

KEY = opaque_key("record")


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def filled(spec: RecordSpec) -> list[memoryview]:
    return [memoryview(bytes([index % 251 + 1]) * size) for index, size in enumerate(spec.sizes)]


def record_of(spec: RecordSpec, segments: Sequence[memoryview] | None = None, **more: Any) -> bytes:
    return b"".join(
        build_record(KEY, spec, filled(spec) if segments is None else segments, **{"meta": {"n": 1}, **more})
    )


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("form", ["contiguous", "strided", "read-only", "storage offset", "requires grad"])
def test_every_dtype_round_trips_byte_for_byte(dtype: str, form: str) -> None:
    torch = pytest.importorskip("torch")
    layout, tokens = KVLayout(num_layers=3, num_kv_heads=2, head_dim=6), 5
    spec = kv_spec(layout, dtype, tokens)
    shape = (3, 2, tokens, 2, 6)  # layer, K and V, token, head, width
    patterns = torch.arange(3 * 2 * tokens * 2 * 6 * DTYPES[dtype], dtype=torch.int64) * 89 % 256  # NaNs, −0, all
    bits = patterns.to(torch.uint8).view(getattr(torch, dtype))
    if form == "strided":  # [token, layer, …] in memory: the caller makes a segment contiguous while it copies
        whole = bits.view(shape).permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4)
        assert not whole.is_contiguous()
    elif form == "storage offset":
        whole = torch.cat([bits[:7], bits])[7:].view(shape)
        assert whole.storage_offset() == 7
    else:
        whole = bits.clone().view(shape)
    if form == "requires grad" and whole.is_floating_point():
        whole = whole.clone().requires_grad_()
    before = whole.detach().clone().contiguous().view(torch.uint8)
    raw = [layer.detach().contiguous().view(torch.uint8).numpy().reshape(-1).data for layer in whole]
    if form == "read-only":
        raw = [view.toreadonly() for view in raw]
    record = record_of(spec, raw)
    header = parse_header(record, key=KEY, nbytes=len(record))
    assert header.raw_bytes == whole.numel() * DTYPES[dtype]
    back = b"".join(record[s.offset : s.offset + s.length] for s in header.segments)
    assert back == before.numpy().tobytes()
    result = torch.frombuffer(bytearray(back), dtype=getattr(torch, dtype)).view(shape)
    assert torch.equal(result.view(torch.uint8), before.view(result.view(torch.uint8).shape))
    assert torch.equal(whole.detach().contiguous().view(torch.uint8), before)  # the source is as it was


def test_the_format_is_pinned() -> None:
    """Old records must stay readable: the very bytes of one small record."""
    record = record_of(RecordSpec.of(KIND_KV, (3, 5)), views(b"abc", b"12345"), meta={"model": "m", "rope": None})
    assert len(record) == 4096 + 4096 + 5
    head = record[: HEADER_BYTES + 80 + 9]
    assert head[:16] == b"\x89KVREC\r\n" + struct.pack("<HBBI", 1, 1, 0, 2)
    assert head[16:48] == KEY
    assert struct.unpack_from("<QQQIH", head, 48) == (8197, 4096, 8, 9, 1)
    assert head[78:88] == bytes(10)
    assert head[88:96] == xxhash.xxh3_64_digest(head[:88] + head[96:])[::-1]
    assert struct.unpack_from("<QQQQIHBB", head, 96) == (4096, 3, 3, xxhash.xxh3_64_intdigest(b"abc"), 0, 0, 0, 0)
    assert head[176:] == b"\x81\xa5model\xa1m"
    assert not any(record[185:4096])
    assert record[4096:4099] == b"abc"
    assert record[8192:] == b"12345"
    assert f"{zlib.crc32(record):08x}" == "3a28cdef"


def test_no_segment_is_copied() -> None:
    spec = kv_spec(KVLayout(3, 1, 64), "bf16", 64)
    segments = filled(spec)
    parts = build_record(KEY, spec, segments, meta={})
    assert [part for part in parts if part.obj in [s.obj for s in segments]] == segments
    assert all(any(part is segment for part in parts) for segment in segments)
    assert all(part.readonly for part in parts)  # and nobody can write into the shared zeros


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 4096, 65_535, 65_536, 65_537, (1 << 20) - 1, 1 << 20,
                                    (1 << 20) + 1, 5 << 20, (7 << 20) + 123])  # fmt: skip
def test_opaque_records_of_any_size(nbytes: int) -> None:
    spec = opaque_spec(nbytes)
    data = np.random.default_rng(nbytes).bytes(nbytes)
    record = record_of(spec, spec.split(memoryview(data)))
    header = parse_header(record, key=KEY, nbytes=len(record))
    assert header.kind == KIND_OPAQUE
    assert header.matches(spec)
    assert header.raw_bytes == spec.raw_bytes == nbytes
    assert max(s.length for s in header.segments) <= 1 << 20
    assert len(header.segments) == max(1, -(-nbytes // (1 << 20)))
    assert b"".join(record[s.offset : s.offset + s.length] for s in header.segments) == data
    assert all(checksum(record[s.offset : s.offset + s.length]) == s.checksum for s in header.segments)
    assert len(record) == spec.nbytes
    assert len(record) - nbytes <= (704 if nbytes < 65_536 else 8192)  # a small record stays small


# --- geometry --------------------------------------------------------------------------------------------------------

shapes = st.lists(st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, 4097, 9000, 70_000]), min_size=1, max_size=40)


@settings(max_examples=150)
@given(sizes=shapes, kind=st.sampled_from([KIND_KV, KIND_OPAQUE]), meta_bytes=st.integers(0, 512))
def test_offsets_are_known_before_the_record_is_read(sizes: list[int], kind: int, meta_bytes: int) -> None:
    spec = RecordSpec.of(kind, sizes)
    meta = {} if meta_bytes < 7 else {"m": b"x" * (meta_bytes - (5 if meta_bytes < 260 else 6))}
    record = record_of(spec, meta=meta)
    header = parse_header(record, key=KEY, nbytes=spec.nbytes)
    assert len(header.meta_block) <= 512
    assert tuple(s.offset for s in header.segments) == spec.offsets
    assert tuple(s.raw_length for s in header.segments) == spec.sizes
    assert (header.data_offset, header.raw_bytes, header.nbytes) == (spec.data_offset, spec.raw_bytes, len(record))
    assert header.head_bytes <= spec.data_offset <= min(spec.offsets)
    alignment = 4096 if kind == KIND_KV or spec.raw_bytes >= 65_536 else 64
    assert not any(offset % alignment for offset in spec.offsets)
    # The first `data_offset` bytes are enough to parse the head.
    assert parse_header(record[: spec.data_offset], key=KEY) == header


@pytest.mark.parametrize("extra", [1, 4000, 60_000])
def test_more_meta_moves_the_segments_and_the_table_says_where(extra: int) -> None:
    spec = RecordSpec.of(KIND_KV, (1000,) * 85)  # 512 bytes of room, up to the page exactly
    assert spec.data_offset - HEADER_BYTES - 85 * 40 - 512 < 128
    record = record_of(spec, meta={"m": b"x" * (700 + extra)})
    header = parse_header(record, key=KEY, nbytes=len(record))
    assert header.matches(spec)
    assert header.data_offset > spec.data_offset
    assert not header.segments[0].offset % 4096
    assert header.segments[0].offset - spec.offsets[0] == header.segments[-1].offset - spec.offsets[-1] > 0
    for segment, data in zip(header.segments, filled(spec), strict=True):
        assert record[segment.offset : segment.offset + segment.length] == data
    with pytest.raises(NeedMore) as more:  # a reader that took the spec's room for granted is told how much it needs
        parse_header(record[: spec.data_offset], key=KEY)
    assert parse_header(record[: more.value.need], key=KEY) == header


def test_meta_of_exactly_the_limit() -> None:
    spec = opaque_spec(3)
    block = {"m": b"x" * ((1 << 16) - 6)}
    assert parse_header(record_of(spec, views(b"abc"), meta=block)).meta() == block
    with pytest.raises(ConfigError, match="65537"):
        record_of(spec, views(b"abc"), meta={"m": b"x" * ((1 << 16) - 5)})


def test_one_range_read_fetches_a_layer_or_a_run_of_layers() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    spec = kv_spec(layout, "bf16", 256)
    record = record_of(spec)
    assert spec.sizes == (layout.segment_bytes(256, "bf16"),) * 30
    for index, (offset, size) in enumerate(zip(spec.offsets, spec.sizes, strict=True)):
        assert record[offset : offset + size] == bytes([index + 1]) * size
    # Segments of a multiple of 4 KiB lie side by side: a run of layers is one read straight into the destination.
    assert all(b - a == spec.sizes[0] for a, b in pairwise(spec.offsets))
    odd = kv_spec(KVLayout(5, 1, 9), "int8", 9)
    assert all(size <= b - a < size + 4096 for (a, b), size in zip(pairwise(odd.offsets), odd.sizes, strict=False))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
    raw=st.lists(st.booleans(), min_size=20, max_size=20),
    kind=st.sampled_from([KIND_KV, KIND_OPAQUE]),
)
def test_encoded_segments_are_packed(sizes: list[int], raw: list[bool], kind: int) -> None:
    spec = RecordSpec.of(kind, [size if plain else size + 9000 for size, plain in zip(sizes, raw, strict=False)])
    segments = [memoryview(bytes([i + 1]) * size) for i, size in enumerate(sizes)]
    codecs = [0 if plain else 3 for plain, _ in zip(raw, sizes, strict=False)]
    record = record_of(spec, segments, codecs=codecs)
    header = parse_header(record, key=KEY, nbytes=len(record))
    assert header.matches(spec)
    end = header.head_bytes
    for layer, (segment, data, codec, size) in enumerate(
        zip(header.segments, segments, codecs, spec.sizes, strict=True)
    ):
        page = 4096 if codec == 0 and (kind == KIND_KV or spec.raw_bytes >= 65_536) else 64
        assert segment.offset % page == 0
        assert segment.offset >= end
        assert (segment.codec, segment.level) == (codec, 0)
        assert (segment.raw_length, segment.layer, segment.head_group) == (size, layer, 0)
        end = segment.offset + segment.length
        assert record[segment.offset : end] == data
    assert end == len(record)


def test_split() -> None:
    spec = RecordSpec.of(KIND_KV, (3, 0, 5, 7))
    flat = memoryview(bytearray(range(15)))
    assert [bytes(v) for v in spec.split(flat)] == [bytes(range(3)), b"", bytes(range(3, 8)), bytes(range(8, 15))]
    spec.split(flat)[3][0] = 99
    assert flat[8] == 99  # views, not copies
    assert list(map(len, spec.split(flat[:12], first=2))) == [5, 7]
    assert list(map(len, spec.split(flat[:5], first=1, count=2))) == [0, 5]
    assert spec.split(flat[:0], first=4) == spec.split(flat[:0], first=1, count=0) == []
    for count_bytes, first, count in ((14, 0, None), (16, 0, None), (12, 2, 3), (12, 2, 1), (0, 5, None), (7, -1, None),
                                      (0, 0, -1), (3, 0, 2**40)):  # fmt: skip
        with pytest.raises(ConfigError):
            spec.split(memoryview(bytearray(count_bytes)), first, count)


def test_matches_compares_kind_and_sizes() -> None:
    header = parse_header(record_of(RecordSpec.of(KIND_KV, (8, 8))))
    assert header.matches(RecordSpec.of(KIND_KV, (8, 8)))
    for other in (RecordSpec.of(KIND_OPAQUE, (8, 8)), RecordSpec.of(KIND_KV, (8,)), RecordSpec.of(KIND_KV, (16,)),
                  RecordSpec.of(KIND_KV, (7, 9)), RecordSpec.of(KIND_KV, (8, 8, 0))):  # fmt: skip
        assert not header.matches(other)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_bad_specs() -> None:
    for kind, sizes in ((KIND_KV, ()), (KIND_KV, (-1,)), (KIND_KV, (5, -1)), (KIND_KV, (1 << 40, 1)), (0, (1,)),
                        (3, (1,)), (KIND_OPAQUE, ((1 << 20) + 1,)), (KIND_KV, (0,) * (MAX_SEGMENTS + 1))):  # fmt: skip
        with pytest.raises(ConfigError):
            RecordSpec.of(kind, sizes)
    assert RecordSpec.of(KIND_KV, (1 << 40,)).nbytes == 4096 + (1 << 40)
    for nbytes in (-1, (64 << 30) + 1, 1 << 60, 1 << 100):  # at once: no list of 2^40 sizes is made
        with pytest.raises(ConfigError, match=str(nbytes)):
            opaque_spec(nbytes)
    assert opaque_spec(64 << 30).raw_bytes == 64 << 30
    with pytest.raises(ConfigError):
        kv_spec(KVLayout(2, 2, 8), "bf16", -1)
    with pytest.raises(ConfigError):
        kv_spec(KVLayout(2, 2, 8), "float64", 1)
    with pytest.raises(ConfigError):
        kv_spec(KVLayout(1 << 17, 2, 8), "bf16", 1)


SPEC = RecordSpec.of(KIND_KV, (8, 8))
GOOD = views(b"12345678", b"abcdefgh")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"segments": GOOD[:1]}, "2 segments"),
        ({"segments": [*GOOD, GOOD[0]]}, "2 segments"),
        ({"segments": views(b"1234567", b"abcdefgh")}, "segment 0"),
        ({"segments": views(b"12345678", b"abcdefghi")}, "segment 1"),
        ({"segments": [memoryview(array.array("I", range(8))), GOOD[1]]}, "segment 0"),  # 8 items, 32 bytes
        ({"segments": [memoryview(bytes(16))[::2], GOOD[1]]}, "segment 0"),
        ({"segments": [np.zeros((8, 2), np.uint8).data, GOOD[1]]}, "segment 0"),
        ({"codecs": [1]}, "codecs"),
        ({"codecs": [256, 0]}, "segment 0"),
        ({"codecs": [0, -1]}, "segment 1"),
        ({"codecs": [5, 5], "segments": views(b"12345678", b"abcdefghi")}, "segment 1"),  # longer than raw
        ({"meta": {"a": object()}}, "meta"),
        ({"meta": {"a": 1 << 64}}, "meta"),
        ({"meta": {"a": "\ud800"}}, "meta"),
        ({"meta": {1: "a"}}, "meta"),
        ({"meta": {b"a": "a"}}, "meta"),
        ({"meta": {"a": {1: 2}}}, "meta"),
        ({"meta": {"a": np.float32(1)}}, "meta"),
        ({"meta": {"a": b"x" * 65_536}}, "meta"),
        ({"key": b"short"}, "key"),
    ],
)
def test_what_does_not_fit_is_refused_at_build(change: dict[str, Any], named: str) -> None:
    given_ = {"key": KEY, "segments": GOOD, "meta": {"a": [1, {"b": "c"}]}, "codecs": None}
    build_record(spec=SPEC, **given_)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        build_record(spec=SPEC, **(given_ | change))


def test_none_in_meta_means_absent() -> None:
    assert parse_header(record_of(SPEC, meta={"a": None, "b": 0, "c": ""})).meta() == {"b": 0, "c": ""}


def test_parse_accepts_any_buffer_and_more_than_the_head() -> None:
    record = record_of(SPEC)
    want = parse_header(record)
    for form in (bytearray(record), memoryview(record), np.frombuffer(bytearray(record), "u1").data):
        assert parse_header(form, key=KEY, nbytes=len(record)) == want  # type: ignore[arg-type]
    assert parse_header(record[: want.head_bytes]) == want
    assert parse_header(record + b"more") == want
    assert type(want.key) is Key


def test_need_more_leads_to_the_header_in_two_steps() -> None:
    record = record_of(RecordSpec.of(KIND_KV, (16,) * 200))
    have = 0
    for need in (HEADER_BYTES, HEADER_BYTES + 200 * 40 + 4):
        with pytest.raises(NeedMore) as more:
            parse_header(record[:have], key=KEY, nbytes=len(record))
        have = more.value.need
        assert have == need
    assert parse_header(record[:have], key=KEY, nbytes=len(record)).head_bytes == have


def test_errors_name_what_is_wrong() -> None:
    record = record_of(SPEC)
    for data, key, nbytes, named in (
        (b"PK\3\4" + bytes(200), None, None, "magic"),
        (record[:8] + b"\2" + record[9:], None, None, "version 2"),
        (record, opaque_key("another"), None, "another key"),
        (record, KEY, len(record) + 1, "its header says"),
        (b"", KEY, 0, "0 bytes"),
    ):
        with pytest.raises(CorruptRecord, match=named) as caught:
            parse_header(data, key=key, nbytes=nbytes)
        assert caught.value.key == key
        assert not isinstance(caught.value, NeedMore)


def test_the_checksum_releases_the_gil() -> None:
    """With a switch interval that never ends, another thread runs during the call only if the call lets it."""
    block = memoryview(bytearray(64 << 20))
    interval = sys.getswitchinterval()
    seen = []
    for _ in range(20):
        go, ran = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda go=go, ran=ran: (go.wait(), ran.set()))
        thread.start()
        sys.setswitchinterval(1000)
        try:
            go.set()
            before = ran.is_set()
            checksum(block)
            seen.append(ran.is_set() and not before)
        finally:
            sys.setswitchinterval(interval)
        thread.join()
        if seen[-1]:
            break
    assert any(seen)
