"""Records whose layers have several levels: level-major, complete, in order; anything else is corrupt."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.keys import opaque_key
from kvstore.layout import KVLayout
from kvstore.record import (
    HEADER_BYTES,
    KIND_KV,
    NeedMore,
    RecordSpec,
    build_record,
    checksum,
    kv_spec,
    parse_header,
    raw_checksums,
)
from tests.faults.corpus import ENTRY, reseal

KEY = opaque_key("levels")


def level_record(levels: list[int], size: int = 100, *, seed: int = 0, codec: int = 5) -> tuple[bytes, RecordSpec]:
    """A record whose layer n has `levels[n]` levels; one with a single level is stored raw if it is layer 0."""
    spec = RecordSpec.of(KIND_KV, (size,) * len(levels))
    codecs = [0 if layer == 0 and count == 1 else codec for layer, count in enumerate(levels)]
    base = [bytes([layer]) * (size if codecs[layer] == 0 else 20 + layer) for layer in range(len(levels))]
    more = [
        (layer, level, memoryview(bytes([layer, level]) * (1 + (layer + seed) % 7)))
        for layer, count in enumerate(levels)
        for level in range(1, count)
    ]
    views = [memoryview(each) for each in base]
    return b"".join(build_record(KEY, spec, views, meta={}, codecs=codecs, refinements=more)), spec


def table(record: bytes) -> list[list[int]]:
    count = struct.unpack_from("<I", record, 12)[0]
    return [list(e) for e in ENTRY.iter_unpack(record[HEADER_BYTES : HEADER_BYTES + ENTRY.size * count])]


def with_table(record: bytes, entries: list[list[int]]) -> bytes:
    packed = b"".join(ENTRY.pack(*entry) for entry in entries)
    return reseal(record[:HEADER_BYTES] + packed + record[HEADER_BYTES + len(packed) :])


@settings(max_examples=60)
@given(levels=st.lists(st.integers(1, 5), min_size=1, max_size=9), seed=st.integers(0, 6))
def test_levels_lie_one_behind_the_other(levels: list[int], seed: int) -> None:
    record, spec = level_record(levels, seed=seed)
    header = parse_header(record, key=KEY, nbytes=len(record))
    assert header.matches(spec)
    assert (header.layers, header.levels) == (len(levels), max(levels))
    assert header.raw_bytes == spec.raw_bytes  # each layer once
    order = [(level, layer) for level in range(max(levels)) for layer, count in enumerate(levels) if count > level]
    assert [(s.level, s.layer) for s in header.segments] == order
    ends = [s.offset + s.length for s in header.segments]
    assert ends[-1] == len(record)
    assert all(0 <= s.offset - end < 64 or s.codec == 0 for s, end in zip(header.segments[1:], ends, strict=False))
    for s in header.segments:
        assert checksum(record[s.offset : s.offset + s.length]) == s.checksum
        assert s.raw_length == 100
    for first in range(len(levels)):
        for level in (None, 0, 1, 9):
            parts = header.parts(first, len(levels) - first, level)
            most = 99 if level is None else level + 1
            assert [[s.level for s in each] for each in parts] == [[*range(min(n, most))] for n in levels[first:]]
            assert {s.layer for s in parts[0]} == {first}


def test_the_bytes_of_levels_are_pinned() -> None:
    spec = RecordSpec.of(KIND_KV, (10, 10))
    more = [(1, 1, memoryview(b"BB")), (0, 1, memoryview(b"AA")), (1, 2, memoryview(b"CC"))]  # in any order
    record = b"".join(
        build_record(KEY, spec, [memoryview(b"aaa"), memoryview(b"bbb")], meta={}, codecs=[6, 6], refinements=more)
    )
    assert struct.unpack_from("<I", record, 12) == (5,)
    assert struct.unpack_from("<Q", record, 64) == (20,)
    start = struct.unpack_from("<Q", record, 56)[0]
    assert start == 832  # 96 + 5 * 40 + 512 bytes of room, in multiples of 64
    rows = [(e[0] - start, e[1], e[2], e[4], e[5], e[6], e[7]) for e in table(record)]
    assert rows == [(0, 3, 10, 0, 0, 6, 0), (64, 3, 10, 1, 0, 6, 0), (128, 2, 10, 0, 0, 6, 1), (192, 2, 10, 1, 0, 6, 1),
                    (256, 2, 10, 1, 0, 6, 2)]  # fmt: skip


OFFSET, LENGTH, RAW_LENGTH, SUM, LAYER, GROUP, CODEC, LEVEL = range(8)
TABLE_LIES: dict[str, Any] = {
    "a layer twice at level 0": lambda t: t[1].__setitem__(LAYER, 0),
    "a layer missing at level 0": lambda t: t[2].__setitem__(LAYER, 3),
    "layers exchanged at level 0": lambda t: (t[0].__setitem__(LAYER, 1), t[1].__setitem__(LAYER, 0)),
    "level 0 behind level 1": lambda t: t[-1].__setitem__(LEVEL, 0),
    "a level left out": lambda t: t[-1].__setitem__(LEVEL, 3),
    "a level twice": lambda t: t[-1].__setitem__(LEVEL, 1),
    "level 255 of nothing": lambda t: t[-1].__setitem__(LEVEL, 255),
    "layers of level 1 exchanged": lambda t: (t[3].__setitem__(LAYER, 1), t[4].__setitem__(LAYER, 0)),
    "a layer twice at level 1": lambda t: t[4].__setitem__(LAYER, 0),
    "a level of a layer that is not there": lambda t: t[-1].__setitem__(LAYER, 7),
    "a layer of 2^32 - 1": lambda t: t[-1].__setitem__(LAYER, 0xFFFFFFFF),
    "nothing at level 0": lambda t: [e.__setitem__(LEVEL, 1) for e in t[:3]],
    "another codec": lambda t: t[-1].__setitem__(CODEC, 6),
    "a raw refinement": lambda t: t[-1].__setitem__(CODEC, 0),
    "another raw length": lambda t: t[-1].__setitem__(RAW_LENGTH, 101),
    "a head group": lambda t: t[-1].__setitem__(GROUP, 1),
}


@pytest.mark.parametrize("lie", TABLE_LIES)
def test_a_table_that_is_not_complete_and_in_order_is_corrupt(lie: str) -> None:
    record, _ = level_record([3, 3, 2])
    parse_header(record, key=KEY)
    entries = table(record)
    TABLE_LIES[lie](entries)
    with pytest.raises(CorruptRecord, match=r"level|add up|layer|reserved|contradict"):
        parse_header(with_table(record, entries), key=KEY)


@settings(max_examples=300)
@given(data=st.data())
def test_any_accepted_table_is_complete_and_in_order(data: st.DataObject) -> None:
    record, _ = level_record([3, 2, 3])
    entries = table(record)
    for _ in range(data.draw(st.integers(1, 4))):
        entry = entries[data.draw(st.integers(0, len(entries) - 1))]
        entry[data.draw(st.sampled_from([LAYER, LEVEL]))] = data.draw(st.integers(0, 4))
    if data.draw(st.booleans()):
        entries[3:] = data.draw(st.permutations(entries[3:]))
    try:
        header = parse_header(with_table(record, entries), key=KEY)
    except CorruptRecord:
        return
    seen = [(s.level, s.layer) for s in header.segments]
    assert seen == sorted(set(seen))
    assert [s.layer for s in header.segments if s.level == 0] == [*range(header.layers)]
    for parts in header.parts(0, header.layers):
        assert [s.level for s in parts] == [*range(len(parts))]


def test_a_table_of_levels_may_be_longer_than_the_first_read() -> None:
    record, spec = level_record([5] * 40, size=1000)
    with pytest.raises(NeedMore) as more:
        parse_header(record[: spec.data_offset], key=KEY)
    assert parse_header(record[: more.value.need], key=KEY).levels == 5


@pytest.mark.parametrize(
    "refinements",
    [[(0, 2, b"x")], [(0, 1, b"x"), (0, 1, b"y")], [(2, 1, b"x")], [(-1, 1, b"x")], [(0, 0, b"x")], [(1, 1, b"x")],
     [(0, 1, b"x" * 11)]],
)  # fmt: skip
def test_levels_that_refine_nothing_are_refused(refinements: list[tuple[int, int, bytes]]) -> None:
    spec = RecordSpec.of(KIND_KV, (10, 10))
    more = [(layer, level, memoryview(data)) for layer, level, data in refinements]
    with pytest.raises(ConfigError):
        build_record(KEY, spec, [memoryview(b"a"), memoryview(bytes(10))], meta={}, codecs=[5, 0], refinements=more)


def test_the_fast_path_takes_no_record_with_levels_or_other_layers() -> None:
    spec = kv_spec(KVLayout(3, 1, 16), "bf16", 8)
    views = spec.split(memoryview(bytes(range(256)) * 6))
    record = b"".join(build_record(KEY, spec, views, meta={}))
    head = memoryview(record)[: spec.data_offset]
    assert raw_checksums(head, KEY, spec) == [s.checksum for s in parse_header(record).segments]
    for field, value in ((LAYER, 2), (LEVEL, 1), (GROUP, 1), (CODEC, 5), (OFFSET, 1), (RAW_LENGTH, 9)):
        entries = table(record)
        entries[1][field] = value
        assert raw_checksums(memoryview(with_table(record, entries)), KEY, spec) is None


def test_kv_specs_say_what_they_are_of() -> None:
    layout = KVLayout(3, 1, 16)
    spec = kv_spec(layout, "bf16", 8)
    assert (spec.layout, spec.dtype, spec.tokens) == (layout, "bfloat16", 8)
    assert spec == RecordSpec.of(KIND_KV, spec.sizes)  # readers compare sizes


def test_the_levels_of_a_layer_are_bounded_together() -> None:
    """Else a small file could claim 256 times the raw bytes, and a reader would make room for them."""
    spec = RecordSpec.of(KIND_KV, (100,))

    def built(count: int, length: int) -> bytes:
        more = [(0, level, memoryview(bytes(length))) for level in range(1, count)]
        return b"".join(build_record(KEY, spec, [memoryview(bytes(40))], meta={}, codecs=[5], refinements=more))

    parse_header(built(9, 20), key=KEY)  # 40 + 8 * 20 == 2 * 100
    with pytest.raises(ConfigError, match=r"level 8 of layer 0 .* 208 bytes"):
        built(9, 21)
    entries = table(built(9, 20))
    entries[-1][LENGTH] += 1
    longer = bytearray(with_table(built(9, 20), entries) + b"\0")
    struct.pack_into("<Q", longer, 48, len(longer))
    with pytest.raises(CorruptRecord, match="together"):
        parse_header(reseal(bytes(longer)), key=KEY)
