"""Damaged records: cut, flipped, swapped, lying (faults 17, 26 and 27), made from good ones.

Written against the format's description alone (kvstore/record.py, top), not against the parser's helpers. Tests of the
parser, of backends and of the store use it: `from tests.faults.corpus import corrupt_variants`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator

import xxhash

HEADER = struct.Struct("<8sHBBI32sQQQIH10sQ")
ENTRY = struct.Struct("<QQQQIHBB")
HEADER_FIELDS = {
    "magic": 0, "version": 8, "kind": 10, "flags": 11, "count": 12, "key": 16, "length": 48, "data_offset": 56,
    "raw_bytes": 64, "meta_bytes": 72, "groups": 76, "reserved": 78, "checksum": 88,
}  # fmt: skip
ENTRY_FIELDS = {
    "offset": 0, "length": 8, "raw_length": 16, "checksum": 24, "layer": 32, "head_group": 36, "codec": 38, "level": 39,
}  # fmt: skip
assert HEADER.size == 96
assert ENTRY.size == 40

Entry = tuple[int, int, int, int, int, int, int, int]


def layout_of(record: bytes) -> tuple[int, int, int, list[Entry]]:
    """(end of the table, end of the meta block, first data byte, table entries) of a good record."""
    fields = HEADER.unpack_from(record)
    table_end = HEADER.size + ENTRY.size * fields[4]
    entries: list[Entry] = list(ENTRY.iter_unpack(record[HEADER.size : table_end]))
    return table_end, table_end + fields[9], fields[7], entries


def reseal(record: bytes) -> bytes:
    """The record with the header checksum that fits its (altered) header, so that only its lies are left to find.

    If the altered counts point behind the record, what is there of the header is sealed.
    """
    head_bytes = HEADER.size + ENTRY.size * struct.unpack_from("<I", record, 12)[0]
    head_bytes += struct.unpack_from("<I", record, 72)[0]
    digest = xxhash.xxh3_64_intdigest(record[:88] + record[HEADER.size : head_bytes])
    return record[:88] + digest.to_bytes(8, "little") + record[HEADER.size :]


def patched(record: bytes, at: int, content: bytes) -> bytes:
    """The record with `content` written at `at`."""
    return record[:at] + content + record[at + len(content) :]


def flipped(record: bytes, at: int, bit: int = 0) -> bytes:
    """The record with one bit of byte `at` flipped."""
    return patched(record, at, bytes([record[at] ^ 1 << bit]))


def corrupt_variants(record: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of damaged forms of `record`; `other` is a good record of another key.

    Whoever reads one of them, knows the key, the length at rest and the segment sizes, and looks at header, meta and
    all segments, must answer with a miss. Names begin with "cut", "append", "flip", "swap", "lie" or "fill". A reader
    that is not told the length at rest may serve the right bytes from what begins with "append", and one that does
    not look at the meta block from what begins with "lie: meta_bytes"; nobody may serve wrong ones from anything.
    """
    made = {record}
    lies = ((f"lie: {name}", reseal(lie)) for name, lie in _lies(record))
    for name, data in itertools.chain(_cut_and_filled(record), _flipped(record), _swapped(record, other), lies):
        if data not in made:
            made.add(data)
            yield name, data


def _cut_and_filled(record: bytes) -> Iterator[tuple[str, bytes]]:
    table_end, head_end, data, entries = layout_of(record)
    lasts = {offset + length - 1 for offset, length, *_ in entries if length}
    cuts = {0, 1, 8, HEADER.size - 1, HEADER.size, (HEADER.size + table_end) // 2, table_end, head_end - 1, head_end,
            data - 1, data, len(record) // 2, len(record) - 1, *lasts}  # fmt: skip
    for cut in sorted(cut for cut in cuts if 0 <= cut < len(record)):
        yield f"cut to {cut} of {len(record)} bytes", record[:cut]
        if any(record[cut:]):  # a crash after the size and before the data was on disk
            yield f"fill: zeros from byte {cut}", record[:cut] + bytes(len(record) - cut)
    yield "append a byte", record + b"\0"
    yield "append a page", record + bytes(4096)
    yield "append itself", record + record
    yield "fill: a byte before", b"\0" + record
    yield "fill: nothing but zeros", bytes(len(record))
    yield "fill: nothing but the pool's canary", b"\xa5" * len(record)
    yield "fill: nothing but ones", b"\xff" * len(record)
    yield "fill: text", (b"<html><body>503 Slow Down</body></html>\r\n" * (len(record) // 41 + 1))[: len(record)]
    yield "flip: line ends translated", record.replace(b"\r\n", b"\n")
    for index, (offset, length, *_) in enumerate(entries):
        for begin in sorted({offset, offset + length // 2}):
            count = min(4096, offset + length - begin)
            if count and any(record[begin : begin + count]):
                yield f"fill: a hole in segment {index} at {begin}", patched(record, begin, bytes(count))
            if count and record[begin : begin + count] != b"\xa5" * count:
                yield f"fill: canary in segment {index} at {begin}", patched(record, begin, b"\xa5" * count)


def _flipped(record: bytes) -> Iterator[tuple[str, bytes]]:
    table_end, head_end, _, entries = layout_of(record)
    for name, at in HEADER_FIELDS.items():
        for bit in (0, 7):
            yield f"flip: bit {bit} of header {name}", flipped(record, at, bit)
    for index in sorted({0, len(entries) // 2, len(entries) - 1}):
        for name, at in ENTRY_FIELDS.items():
            yield f"flip: {name} of entry {index}", flipped(record, HEADER.size + ENTRY.size * index + at, 3)
    if head_end > table_end:
        yield "flip: first byte of meta", flipped(record, table_end, 0)
        yield "flip: last byte of meta", flipped(record, head_end - 1, 5)
    for index, (offset, length, *_) in enumerate(entries):
        for at in sorted({0, length // 2, length - 1}) if length else ():
            yield f"flip: byte {at} of segment {index}", flipped(record, offset + at, at % 8)


def _swapped(record: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    _, _, data, entries = layout_of(record)
    _, _, other_data, _ = layout_of(other)
    yield "swap: another record", other
    yield "swap: this header, another body", record[:data] + other[other_data:]
    yield "swap: another header, this body", other[:other_data] + record[data:]
    yield "swap: another key, sealed", reseal(patched(record, HEADER_FIELDS["key"], other[16:48]))
    half = len(record) // 2
    yield "swap: half of each", record[:half] + other[half:]
    for index, (a, b) in enumerate(itertools.pairwise(entries)):
        first, second = record[a[0] : a[0] + a[1]], record[b[0] : b[0] + b[1]]
        if len(first) == len(second) and first != second:
            yield (
                f"swap: bodies of segments {index} and {index + 1}",
                patched(patched(record, a[0], second), b[0], first),
            )


def _lies(record: bytes) -> Iterator[tuple[str, bytes]]:
    table_end, head_end, data, entries = layout_of(record)
    count, size = len(entries), len(record)

    def header(name: str, form: str) -> Callable[[int], tuple[str, bytes]]:
        return lambda value: (f"{name} = {value}", patched(record, HEADER_FIELDS[name], struct.pack(form, value)))

    yield from map(header("version", "<H"), (0, 2, 0xFFFF))
    yield from map(header("kind", "<B"), (0, 3, 255, 3 - record[10]))
    yield from map(header("flags", "<B"), (1, 128))
    yield from map(header("count", "<I"), (0, count - 1, count + 1, 1 << 16, (1 << 16) + 1, 0xFFFFFFFF))
    yield from map(header("length", "<Q"), (0, data, size - 1, size + 1, 1 << 40, 1 << 41, 1 << 63, (1 << 64) - 1))
    yield from map(
        header("data_offset", "<Q"), (0, head_end - 1, data + 1, data + 4096, size, size + 1, 1 << 40, (1 << 64) - 1)
    )
    raw = struct.unpack_from("<Q", record, HEADER_FIELDS["raw_bytes"])[0]
    yield from map(header("raw_bytes", "<Q"), (raw + 1, 1 << 40, (1 << 64) - 1))
    meta = head_end - table_end
    yield from map(header("meta_bytes", "<I"), (max(0, meta - 1), meta + 1, 1 << 16, (1 << 16) + 1, size, 0xFFFFFFFF))
    yield from map(header("groups", "<H"), (0, 2, 0xFFFF))
    yield "reserved", patched(record, HEADER_FIELDS["reserved"] + 9, b"\1")
    yield "magic", patched(record, 0, b"\x89KVRES\r\n")

    for index in sorted({0, count - 1}):
        offset, length, raw_length, digest, layer, group, codec, level = entries[index]

        def entry(name: str, *values: int, index: int = index) -> tuple[str, bytes]:
            return f"{name} of entry {index}", patched(record, HEADER.size + 40 * index, ENTRY.pack(*values))

        rest = (digest, layer, group, codec, level)
        for value in (0, HEADER.size, offset - 1, offset + 1, offset + 4096, size, size + 1, 1 << 40, (1 << 64) - 1):
            yield entry(f"offset {value}", value, length, raw_length, *rest)
        for value in (length + 1, length + 4096, size, 1 << 40, (1 << 64) - 1, (1 << 64) - offset):
            yield entry(f"length {value}", offset, value, raw_length, *rest)
            yield entry(f"both lengths {value}", offset, value, value, *rest)
            yield entry(f"raw length {value}", offset, length, value, *rest)
        yield entry("checksum", offset, length, raw_length, digest ^ 1, layer, group, codec, level)
        yield entry("head group", offset, length, raw_length, digest, layer, 1, codec, level)
        yield entry("codec", offset, length, raw_length, digest, layer, group, 255, level)
        if length:
            yield entry("length 0", offset, 0, raw_length, *rest)
            yield entry("both lengths 0", offset, 0, 0, *rest)
    if count > 1:
        one, two = (ENTRY.pack(*entries[0]), ENTRY.pack(*entries[1]))
        yield "two entries exchanged", patched(record, HEADER.size, two + one)
        if entries[1][1]:
            yield "one segment named twice", patched(record, HEADER.size + 40, one)
