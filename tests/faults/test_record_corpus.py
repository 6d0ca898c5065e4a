"""Faults 17, 26, 27: damaged and lying records are misses; never a crash, wrong bytes or a large allocation."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptRecord
from kvstore.keys import Key, opaque_key
from kvstore.layout import KVLayout
from kvstore.record import (
    HEADER_BYTES,
    KIND_KV,
    MAX_HEAD_BYTES,
    Header,
    NeedMore,
    RecordSpec,
    build_record,
    checksum,
    kv_spec,
    opaque_spec,
    parse_header,
)
from tests.faults.corpus import ENTRY, ENTRY_FIELDS, HEADER_FIELDS, corrupt_variants, flipped, patched, reseal

META = {"model": "org/model", "tokens": [0, 8], "rope": {"theta": 10000.0}}


def make(key: Key, spec: RecordSpec, seed: int, stored: int | None = None) -> bytes:
    """A record of random bytes; with `stored`, each segment claims to be encoded (codec 7) into so many bytes."""
    rng = random.Random(seed)
    sizes = spec.sizes if stored is None else (stored,) * len(spec.sizes)
    segments = [memoryview(rng.randbytes(size)) for size in sizes]
    codecs = None if stored is None else [7] * len(sizes)
    return b"".join(build_record(key, spec, segments, meta=META, codecs=codecs))


KEY, OTHER = opaque_key("this"), opaque_key("other")
SPECS = {
    "kv": (kv_spec(KVLayout(3, 1, 16), "bf16", 8), None),
    "kv with odd sizes": (RecordSpec.of(KIND_KV, (1, 4096, 4097)), None),
    "kv encoded": (kv_spec(KVLayout(3, 1, 64), "bf16", 8), 333),
    "kv with empty segments": (RecordSpec.of(KIND_KV, (0, 100, 0)), None),
    "opaque": (opaque_spec(100), None),
    "opaque on pages": (opaque_spec(70_000), None),
    "opaque of several segments": (opaque_spec((2 << 20) + 5), None),
    "opaque, empty": (opaque_spec(0), None),
}


@cache
def pair(name: str) -> tuple[bytes, bytes]:
    spec, stored = SPECS[name]
    return make(KEY, spec, 1, stored), make(OTHER, spec, 2, stored)


def read_all(
    data: bytes, *, spec: RecordSpec, codec: int, key: Key | None = KEY, nbytes: int | None = None
) -> list[bytes]:
    """What a careful reader does. Raises CorruptRecord."""
    header = parse_header(data, key=key, nbytes=len(data) if nbytes is None else nbytes)
    if not header.matches(spec):
        raise CorruptRecord("another shape")
    header.meta()
    segments = []
    for segment in header.segments:
        stored = data[segment.offset : segment.offset + segment.length]
        if len(stored) != segment.length or checksum(stored) != segment.checksum or segment.codec != codec:
            raise CorruptRecord("segment")
        segments.append(stored)
    return segments


def outcome(data: bytes, name: str) -> list[bytes] | None:
    spec, stored = SPECS[name]
    try:
        return read_all(data, spec=spec, codec=0 if stored is None else 7)
    except CorruptRecord:
        return None


@pytest.mark.parametrize("name", SPECS)
def test_no_damaged_record_is_taken_for_the_good_one(name: str) -> None:
    record, other = pair(name)
    assert outcome(record, name) is not None
    seen: set[str] = set()
    for variant, data in corrupt_variants(record, other):
        assert data != record, variant
        assert outcome(data, name) is None, variant
        assert variant not in seen
        seen.add(variant)
    kinds = {variant.split(":")[0].split()[0] for variant in seen}
    assert kinds == {"cut", "append", "flip", "swap", "lie", "fill"}
    assert len(seen) > 80


@pytest.mark.parametrize("name", SPECS)
def test_a_reader_that_knows_no_length_gets_the_right_bytes_or_none(name: str) -> None:
    """As a store does that reads ranges: it has a prefix of the record, and what the backend gives for a range."""
    record, other = pair(name)
    good = outcome(record, name)
    spec, stored = SPECS[name]
    for variant, data in corrupt_variants(record, other):
        try:
            header = parse_header(data[: spec.data_offset], key=KEY)
            if not header.matches(spec):
                raise CorruptRecord("another shape")
            got = [data[s.offset : s.offset + s.length] for s in header.segments]
            if any(checksum(g) != s.checksum or len(g) != s.length for g, s in zip(got, header.segments, strict=True)):
                raise CorruptRecord("segment")
            if any(s.codec != (0 if stored is None else 7) for s in header.segments):
                raise CorruptRecord("codec")
        except CorruptRecord:
            continue
        assert got == good, variant
        assert not variant.startswith(("flip", "swap", "fill")), variant


def test_every_single_bit_of_the_head_counts() -> None:
    record, _ = pair("kv")
    spec = SPECS["kv"][0]
    head = parse_header(record).head_bytes
    for at in range(head):
        for bit in range(8):
            with pytest.raises(CorruptRecord):
                parse_header(flipped(record, at, bit)[: spec.data_offset], key=KEY, nbytes=len(record))


@pytest.mark.parametrize("name", ["kv", "kv encoded", "opaque", "opaque of several segments"])
def test_damage_costs_no_memory(name: str) -> None:
    record, other = pair(name)
    variants = [(v, d[: SPECS[name][0].data_offset + 100]) for v, d in corrupt_variants(record, other)]
    for variant, data in variants:
        assert peak(lambda data=data: attempt(data)) <= 32 * 1024 + 12 * len(data), variant  # type: ignore[misc]


def attempt(data: bytes) -> object:
    try:
        return parse_header(data)
    except CorruptRecord as error:
        return str(error)


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_largest_table_costs_in_proportion() -> None:
    spec = RecordSpec.of(KIND_KV, (0,) * (1 << 16))
    record = b"".join(build_record(KEY, spec, [memoryview(b"")] * (1 << 16), meta={}))
    assert len(parse_header(record, key=KEY, nbytes=len(record)).segments) == 1 << 16
    assert peak(lambda: attempt(record)) <= 12 * len(record)
    with pytest.raises(NeedMore) as more:
        parse_header(record[:4096])
    assert more.value.need <= MAX_HEAD_BYTES < 3 << 20


# --- fuzz ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.binary(max_size=300), magic=st.booleans(), nbytes=st.none() | st.integers(0, 2**64))
def test_arbitrary_bytes(data: bytes, magic: bool, nbytes: int | None) -> None:
    if magic:
        data = pair("kv")[0][:10] + data
    with pytest.raises(CorruptRecord) as caught:
        parse_header(data, nbytes=nbytes)
    if isinstance(caught.value, NeedMore):
        assert len(data) < caught.value.need <= MAX_HEAD_BYTES
        assert nbytes is None or caught.value.need <= nbytes


@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(SPECS)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.none() | st.floats(0, 1),
    tail=st.binary(max_size=8),
    head_only=st.booleans(),
    sealed=st.booleans(),
)
def test_mutated_records_give_the_right_bytes_or_none(
    name: str, changes: list[tuple[float, bytes]], cut: float | None, tail: bytes, head_only: bool, sealed: bool
) -> None:
    record, _ = pair(name)
    data = record
    span = parse_header(record).head_bytes if head_only else len(record)
    for where, content in changes:
        data = patched(data, int(where * span), content)[: len(record)]
    if cut is not None:
        data = data[: int(cut * len(data))]
    data += tail
    if sealed and len(data) >= HEADER_BYTES:
        data = reseal(data)
    assert outcome(data, name) in (None, outcome(record, name))


edges = st.sampled_from([0, 1, 2, 95, 96, 4095, 4096, 8191, 8192, 1 << 16, 1 << 20, 1 << 40, 1 << 41, 1 << 63])
numbers = edges.flatmap(lambda n: st.integers(max(0, n - 2), n + 2)) | st.integers(0, 2**64 - 1)


@settings(max_examples=400)
@given(data=st.data())
def test_lies_with_a_fitting_checksum_are_found_by_the_bounds(data: st.DataObject) -> None:
    """Whatever it claims, an accepted header describes segments that lie inside, in order, and add up."""
    record, _ = pair("kv")
    lie = record
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(["kind", "count", "length", "data_offset", "raw_bytes", "meta_bytes"]))
            width = {"kind": 1, "count": 4, "meta_bytes": 4}.get(name, 8)
            at = HEADER_FIELDS[name]
        else:
            name = data.draw(st.sampled_from(["offset", "length", "raw_length", "layer", "head_group", "codec"]))
            width = {"layer": 4, "head_group": 2, "codec": 1}.get(name, 8)
            at = HEADER_BYTES + ENTRY.size * data.draw(st.integers(0, 2)) + ENTRY_FIELDS[name]
        lie = patched(lie, at, (data.draw(numbers) % (1 << 8 * width)).to_bytes(width, "little"))
    lie = reseal(lie)
    try:
        header = parse_header(lie, key=KEY, nbytes=len(lie))
    except CorruptRecord:
        return
    check_header(header, lie)


def check_header(header: Header, data: bytes) -> None:
    end = header.data_offset
    assert header.head_bytes <= end
    assert header.nbytes == len(data)
    for segment in header.segments:
        assert end <= segment.offset < end + 4096
        end = segment.offset + segment.length
        assert segment.codec or segment.length == segment.raw_length
        assert segment.head_group == 0
    assert end == header.nbytes
    assert sum(segment.raw_length for segment in header.segments if not segment.level) == header.raw_bytes


def test_a_sparse_record_cannot_make_a_range_read_span_more_than_it_delivers() -> None:
    """Two segments 2^40 bytes apart in a sparse file: consistent lengths, but a gap that a run of layers would read."""
    record, _ = pair("kv")
    header = parse_header(record)
    far = header.segments[1].offset + (1 << 39)
    entries = [list(segment) for segment in header.segments]
    entries[1][0] = far
    entries[2][0] = far + 4096
    length = entries[2][0] + entries[2][1]
    lie = patched(record, HEADER_BYTES, b"".join(ENTRY.pack(*entry) for entry in entries))
    lie = reseal(patched(lie, HEADER_FIELDS["length"], length.to_bytes(8, "little")))
    with pytest.raises(CorruptRecord, match="table"):
        parse_header(lie, key=KEY, nbytes=length)


# --- the meta block --------------------------------------------------------------------------------------------------


def with_meta(block: bytes) -> Header:
    good = parse_header(pair("kv")[0])
    return good._replace(meta_block=block)


@pytest.mark.parametrize(
    "block",
    [
        b"", b"\x80\x80", b"\xc1", b"\x90", b"\x01", b"\xc0", b"\xa3abc",  # nothing, two, invalid, and no map
        b"\x81\x01\x02", b"\x81\xa1a", b"\x82\xa1a\x01", b"\x81\xa1a\xa5x", b"\x81\xa1\xff\x01",  # key, cut, not UTF-8
        b"\x81\xc4\x01a\x01", b"\x81\x90\x01", b"\x81\x80\x01",  # names that are no text
        b"\x81\xa1a\xdf\xff\xff\xff\xff", b"\x81\xa1a\xdd\xff\xff\xff\xff", b"\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff", b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
        b"\x81\xa1a\xd6\xff\0\0\0\0", b"\x81\xa1a\xc7\x00\x05", b"\x81\xa1a\xd4\x01\x00",  # extension types
        b"\x81\xa1a" + b"\x91" * 60_000 + b"\x01",
        b"\x81\xa1a" + b"\x81\xa1b" * 20_000 + b"\x01",
    ],
)  # fmt: skip
def test_bad_meta_is_corruption(block: bytes) -> None:
    with pytest.raises(CorruptRecord, match="meta") as caught:
        with_meta(block).meta()
    assert caught.value.key == KEY


@pytest.mark.parametrize(
    "head", [b"\xdc\xff\xff", b"\xdc\xc0\x00", b"\xdd\x00\x00\xc0\x00", b"\x9f", b"\xde\x60\x00", b"\x8f"]
)
def test_nested_claims_do_not_multiply(head: bytes) -> None:
    """Each array claims 49,152 values, within the bound; msgpack makes room for each before it finds them missing."""
    name = b"\xa1b" if head[0] in (0xDE, 0x8F) else b""
    for filler in (b"", b"\x00" * 50_000):
        for start in (b"\x81\xa1a", b"\x82\xa1a\xc7\x00\x05\xa1b"):  # an extension must not hide the rest from the scan
            block = start + (head + name) * 500 + filler
            used = peak(lambda block=block: attempt_meta(block))  # type: ignore[misc]
            assert used <= 64 * 1024 + 24 * len(block)


def attempt_meta(block: bytes) -> object:
    try:
        return with_meta(block).meta()
    except CorruptRecord:
        return None


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60)
@given(meta=st.dictionaries(st.text(max_size=8), values, max_size=5))
def test_what_was_stored_as_meta_comes_back(meta: dict[str, Any]) -> None:
    spec = opaque_spec(0)
    record = b"".join(build_record(KEY, spec, [memoryview(b"")], meta=meta))
    assert parse_header(record, key=KEY).meta() == {name: v for name, v in meta.items() if v is not None}
    assert with_meta(msgpack.packb(meta)).meta() == meta


@settings(max_examples=300)
@given(block=st.binary(max_size=60))
def test_arbitrary_meta_never_crashes(block: bytes) -> None:
    for data in (block, b"\x81\xa1a" + block):
        meta = attempt_meta(data)  # lets only CorruptRecord pass
        assert meta is None or isinstance(meta, dict)
