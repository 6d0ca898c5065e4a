"""How a chunk is stored: one write-once record, layer-major, every part verified. Format version 1.

All integers little-endian.

    0    8   magic  89 4B 56 52 45 43 0D 0A  ("\\x89KVREC\\r\\n": text-mode damage shows)
    8    2   format version (1)
    10   1   kind: 1 = KV chunk, 2 = opaque
    11   1   flags (0)
    12   4   number of segments n
    16   32  key
    48   8   length of the whole record, in bytes
    56   8   offset of the first segment
    64   8   raw bytes of all segments together
    72   4   length of the meta block, in bytes
    76   2   KV-head groups per layer (1; reserved for records shared across tensor-parallel sizes)
    78   10  reserved (0)
    88   8   XXH3-64 of bytes 0..87, the table and the meta block
    96   40n table: per segment offset u64, length u64, raw length u64, XXH3-64 of the stored bytes u64,
             layer u32, head group u16 (0), codec u8 (0 = raw), level u8
    …        meta block (msgpack map)
    …        zeros up to the first segment, then the segments in layer order

Segments of a KV chunk stored raw begin at multiples of 4 KiB, encoded ones at multiples of 64 bytes; segments of an
opaque record hold at most 1 MiB each. Room for 512 bytes of meta is always kept, so the offsets of a raw record follow
from the sizes of its segments alone (`RecordSpec`): a reader fetches header and data in one go, without asking first.

The parser trusts no length: whatever the bytes claim, it reads inside them, allocates in proportion to them, and
answers `CorruptRecord`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
from xxhash import xxh3_64_intdigest

from .errors import ConfigError, CorruptRecord
from .keys import Key
from .layout import KVLayout

__all__ = [
    "HEADER_BYTES",
    "KIND_KV",
    "KIND_OPAQUE",
    "Header",
    "RecordSpec",
    "Segment",
    "build_record",
    "checksum",
    "kv_spec",
    "opaque_spec",
    "parse_header",
]

MAGIC = b"\x89KVREC\r\n"
VERSION = 1
KIND_KV = 1
KIND_OPAQUE = 2
HEADER_BYTES = 96
RAW = 0  # codec number of a segment stored as it is

MAX_SEGMENTS = 1 << 16
MAX_META_BYTES = 1 << 16
MAX_HEAD_BYTES = HEADER_BYTES + 40 * MAX_SEGMENTS + MAX_META_BYTES
MAX_RECORD_BYTES = 1 << 40
OPAQUE_SEGMENT_BYTES = 1 << 20
META_RESERVE = 512
PAGE = 4096
PACK = 64
_PAGED_OPAQUE_BYTES = 64 << 10  # from here an opaque record's segments lie on pages too

_FIXED = struct.Struct("<8sHBBI32sQQQIH10sQ")
_ENTRY = struct.Struct("<QQQQIHBB")
_ZEROS = memoryview(bytes(PAGE))

checksum = xxh3_64_intdigest
"""The checksum of all parts: XXH3-64, seed 0 (23 GB/s per core here; releases the GIL)."""


def _align(value: int, alignment: int) -> int:
    return (value + alignment - 1) & -alignment


class Segment(NamedTuple):
    """One entry of the table: where a segment lies in the record, and what it holds."""

    offset: int
    length: int
    raw_length: int
    checksum: int
    layer: int
    head_group: int
    codec: int
    level: int


@dataclass(frozen=True)
class RecordSpec:
    """The raw sizes of a record's segments, and what follows from them for a record stored raw.

    Attributes:
        kind: `KIND_KV` or `KIND_OPAQUE`.
        sizes: raw bytes of each segment, in order.
        offsets: where each segment begins if the record is stored raw.
        data_offset: where the first one begins: the header, table and meta block lie before it.
        raw_bytes: sum of `sizes`.
        nbytes: length of the record if stored raw.
    """

    kind: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    data_offset: int
    raw_bytes: int
    nbytes: int

    @classmethod
    def of(cls, kind: int, sizes: Sequence[int]) -> RecordSpec:
        """The spec of a record with these raw segment sizes. Raises `ConfigError` if the format cannot hold it."""
        if not 0 < len(sizes) <= MAX_SEGMENTS:
            raise ConfigError(f"a record has 1 to {MAX_SEGMENTS} segments, not {len(sizes)}")
        raw_bytes = sum(sizes)
        if min(sizes) < 0 or raw_bytes > MAX_RECORD_BYTES:
            raise ConfigError(f"a record holds at most 2^40 bytes in segments of at least 0, not {raw_bytes}")
        alignment = _alignment(kind, raw_bytes)
        end = data_offset = _align(HEADER_BYTES + _ENTRY.size * len(sizes) + META_RESERVE, alignment)
        offsets = []
        for size in sizes:
            begin = _align(end, alignment)
            offsets.append(begin)
            end = begin + size
        return cls(kind, tuple(sizes), tuple(offsets), data_offset, raw_bytes, end)

    def split(self, flat: memoryview, first: int = 0, count: int | None = None) -> list[memoryview]:
        """`flat` cut into the views of `count` segments beginning with segment `first`.

        Raises:
            ConfigError: `flat` is not exactly as long as these segments together.
        """
        sizes = self.sizes[first : None if count is None else first + count]
        if len(flat) != sum(sizes):
            raise ConfigError(f"the destination has {len(flat)} bytes, but segments {first}.. need {sum(sizes)}")
        views, at = [], 0
        for size in sizes:
            views.append(flat[at : at + size])
            at += size
        return views


def _alignment(kind: int, raw_bytes: int) -> int:
    return PAGE if kind == KIND_KV or raw_bytes >= _PAGED_OPAQUE_BYTES else PACK


@functools.lru_cache(maxsize=1024)
def kv_spec(layout: KVLayout, dtype: str, tokens: int) -> RecordSpec:
    """The spec of a KV chunk of `tokens` tokens."""
    return RecordSpec.of(KIND_KV, (layout.segment_bytes(tokens, dtype),) * layout.num_layers)


@functools.lru_cache(maxsize=1024)
def opaque_spec(nbytes: int) -> RecordSpec:
    """The spec of an opaque record of `nbytes` bytes: segments of 1 MiB, the last one shorter."""
    if nbytes < 0:
        raise ConfigError(f"an opaque record cannot have {nbytes} bytes")
    whole, rest = divmod(nbytes, OPAQUE_SEGMENT_BYTES)
    sizes = (OPAQUE_SEGMENT_BYTES,) * whole + ((rest,) if rest or not whole else ())
    return RecordSpec.of(KIND_OPAQUE, sizes)


class Header(NamedTuple):
    """A parsed and verified header with its table.

    Attributes:
        nbytes: length of the whole record.
        head_bytes: length of header, table and meta block; the data begins at `data_offset` or later.
        meta_block: the msgpack bytes; `meta()` decodes them.
    """

    key: Key
    kind: int
    nbytes: int
    data_offset: int
    raw_bytes: int
    head_bytes: int
    segments: list[Segment]
    meta_block: bytes

    def meta(self) -> dict[str, Any]:
        """The meta block, decoded with bounds. Raises `CorruptRecord` if it is not a msgpack map."""
        try:
            n = len(self.meta_block)
            bounds = {"max_str_len": n, "max_bin_len": n, "max_array_len": n, "max_map_len": n, "max_ext_len": 0}
            value = msgpack.unpackb(self.meta_block, **bounds)
        except (ValueError, msgpack.UnpackException) as error:
            raise CorruptRecord("the meta block is not msgpack", key=self.key, cause=error) from error
        if not isinstance(value, dict):
            raise CorruptRecord("the meta block is not a map", key=self.key)
        return value

    def matches(self, spec: RecordSpec) -> bool:
        """True if the raw sizes and the kind are those of `spec`."""
        return (
            self.kind == spec.kind
            and len(self.segments) == len(spec.sizes)
            and all(segment[2] == size for segment, size in zip(self.segments, spec.sizes, strict=True))
        )


def build_record(
    key: Key,
    spec: RecordSpec,
    segments: Sequence[memoryview],
    *,
    meta: Mapping[str, Any],
    codecs: Sequence[tuple[int, int]] | None = None,
    layers: Sequence[int] | None = None,
) -> list[memoryview]:
    """The record as views to gather: header, segments and padding. No segment is copied.

    Args:
        spec: raw sizes of the segments.
        segments: stored bytes of each segment, flat byte views; raw ones are as long as the spec says.
        meta: small map of msgpack values; `None` values are left out.
        codecs: (codec number, level) of each segment; None means that all are raw.
        layers: layer number of each segment; None means 0, 1, 2, …

    Raises:
        ConfigError: sizes, counts or meta do not fit the format.
    """
    count = len(spec.sizes)
    if len(segments) != count or (codecs is not None and len(codecs) != count):
        raise ConfigError(f"the record has {count} segments, but {len(segments)} were given")
    meta_block: bytes = msgpack.packb({name: value for name, value in meta.items() if value is not None})
    if len(meta_block) > MAX_META_BYTES:
        raise ConfigError(f"the meta block has {len(meta_block)} bytes; at most {MAX_META_BYTES} fit")
    alignment = _alignment(spec.kind, spec.raw_bytes)
    head_bytes = HEADER_BYTES + _ENTRY.size * count + len(meta_block)
    raw = codecs is None
    reserved = max(head_bytes, HEADER_BYTES + _ENTRY.size * count + META_RESERVE)
    end = data_offset = _align(reserved, alignment if raw else PACK)
    table = bytearray(_ENTRY.size * count)
    body: list[memoryview] = []
    for index, (segment, size) in enumerate(zip(segments, spec.sizes, strict=True)):
        codec, level = (RAW, 0) if codecs is None else codecs[index]
        length = len(segment)
        if codec == RAW and length != size:
            raise ConfigError(f"segment {index} has {length} bytes instead of {size}")
        begin = _align(end, alignment if codec == RAW else PACK)
        if begin > end:
            body.append(_ZEROS[: begin - end])
        body.append(segment)
        layer = index if layers is None else layers[index]
        _ENTRY.pack_into(table, index * _ENTRY.size, begin, length, size, checksum(segment), layer, 0, codec, level)
        end = begin + length
    fixed = _FIXED.pack(
        MAGIC, VERSION, spec.kind, 0, count, key, end, data_offset, spec.raw_bytes, len(meta_block), 1, bytes(10), 0
    )[:-8]
    head = b"".join((fixed, checksum(b"".join((fixed, table, meta_block))).to_bytes(8, "little"), table, meta_block))
    return [memoryview(head), *_zeros(data_offset - head_bytes), *body]


def _zeros(count: int) -> list[memoryview]:
    whole, rest = divmod(count, PAGE)
    return [_ZEROS] * whole + ([_ZEROS[:rest]] if rest else [])


def parse_header(data: memoryview | bytes, *, key: Key | None = None, nbytes: int | None = None) -> Header:
    """Parse and verify the beginning of a record.

    Args:
        data: the first bytes of the record; more than the header does no harm.
        key: the key it must name; None accepts any.
        nbytes: the length of the whole record if known; it must be what the header says.

    Raises:
        CorruptRecord: anything is not as it must be. If only more bytes are needed, its `need` says how many
            (at most 2.6 MiB; a claim beyond what the format allows is corruption, not a wish).
    """
    if len(data) < HEADER_BYTES:
        raise NeedMore(HEADER_BYTES, key)
    fixed = _FIXED.unpack_from(data)
    magic, version, kind, flags, count, name, length, data_offset, raw_bytes, meta_bytes, groups, zero, digest = fixed
    if magic != MAGIC:
        raise CorruptRecord("not a record: the magic bytes are missing", key=key)
    if version != VERSION:
        raise CorruptRecord(f"record format version {version} is not known; this release reads {VERSION}", key=key)
    if key is not None and name != key:
        raise CorruptRecord(f"the record names another key, {name[:6].hex()}…", key=key)
    if not 0 < count <= MAX_SEGMENTS or meta_bytes > MAX_META_BYTES or kind not in (KIND_KV, KIND_OPAQUE):
        raise CorruptRecord("the header's counts are out of range", key=key)
    head_bytes = HEADER_BYTES + _ENTRY.size * count + meta_bytes
    if not head_bytes <= data_offset <= length <= MAX_RECORD_BYTES * 2 or data_offset > MAX_HEAD_BYTES + PAGE:
        raise CorruptRecord("the header's lengths contradict each other", key=key)
    if nbytes is not None and nbytes != length:
        raise CorruptRecord(f"the record has {nbytes} bytes, but its header says {length}", key=key)
    if len(data) < head_bytes:
        raise NeedMore(head_bytes, key)
    view = memoryview(data)
    if checksum(b"".join((view[:88], view[HEADER_BYTES:head_bytes]))) != digest:
        raise CorruptRecord("the header's checksum is wrong", key=key)
    if flags or groups != 1 or zero != bytes(10):
        raise CorruptRecord("the header uses a reserved field", key=key)
    table_end = HEADER_BYTES + _ENTRY.size * count
    segments = list(map(Segment._make, _ENTRY.iter_unpack(view[HEADER_BYTES:table_end])))
    end, total = data_offset, 0
    for segment in segments:
        if segment[0] < end or segment[0] + segment[1] > length or (segment[6] == RAW and segment[1] != segment[2]):
            raise CorruptRecord("the table's offsets or lengths contradict each other", key=key)
        end = segment[0] + segment[1]
        total += segment[2]
    if end != length or total != raw_bytes or total > MAX_RECORD_BYTES:
        raise CorruptRecord("the table does not add up to the record", key=key)
    return Header(
        Key(name), kind, length, data_offset, raw_bytes, head_bytes, segments, bytes(view[table_end:head_bytes])
    )


class NeedMore(CorruptRecord):
    """The bytes end before the header does. `need`: how many bytes of the record would be enough."""

    def __init__(self, need: int, key: Key | None) -> None:
        super().__init__(f"the record ends inside its header ({need} bytes needed)", key=key)
        self.need = need
