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
    64   8   raw bytes of all layers together
    72   4   length of the meta block, in bytes
    76   2   KV-head groups per layer (1; reserved for records shared across tensor-parallel sizes)
    78   10  reserved (0)
    88   8   XXH3-64 of bytes 0..87, the table and the meta block
    96   40n table: per segment offset u64, length u64, raw length u64, XXH3-64 of the stored bytes u64,
             layer u32, head group u16 (0), codec u8 (0 = raw), level u8
    …        meta block (msgpack map)
    …        zeros up to the first segment, then the segments in the order of the table

The table is level-major: level 0 of layers 0, 1, 2, …, of all of them; then level 1 of those layers that have one, in
their order; then level 2, and so on. A level refines the one below it: a layer that has level n has all before it, of
the same codec and the same raw length (that of the layer); together they are at most twice as long as that. Raw
segments have no further levels. So every level is one run of bytes, and so are some layers of it.

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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgpack
from xxhash import xxh3_64_intdigest

from .errors import ConfigError, CorruptRecord
from .keys import KEY_BYTES, Key
from .layout import KVLayout, canonical_dtype

__all__ = [
    "HEADER_BYTES",
    "KIND_KV",
    "KIND_OPAQUE",
    "Header",
    "NeedMore",
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
MAX_LEVELS_SHARE = 2  # all levels of a layer are at most so many times its raw bytes

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
_RESERVED = (1, bytes(10))

checksum = xxh3_64_intdigest
"""The checksum of all parts: XXH3-64, seed 0 (23 GB/s per core here; releases the GIL)."""


def _align(value: int, alignment: int) -> int:
    return (value + alignment - 1) & -alignment


class Segment(NamedTuple):
    """One entry of the table: where a segment lies in the record, and what it holds: one level of one layer."""

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
        layout, dtype, tokens: what the record is of, if it was made by `kv_spec`; lossy codecs need to know. They take
            no part in comparisons: the bytes a reader gets depend on the sizes alone.
    """

    kind: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    data_offset: int
    raw_bytes: int
    nbytes: int
    layout: KVLayout | None = field(default=None, compare=False)
    dtype: str | None = field(default=None, compare=False)
    tokens: int = field(default=0, compare=False)

    @classmethod
    def of(cls, kind: int, sizes: Sequence[int]) -> RecordSpec:
        """The spec of a record with these raw segment sizes. Raises `ConfigError` if the format cannot hold it."""
        if kind not in (KIND_KV, KIND_OPAQUE):
            raise ConfigError(f"record kind {kind!r} is not known; use KIND_KV or KIND_OPAQUE")
        if not 0 < len(sizes) <= MAX_SEGMENTS:
            raise ConfigError(f"a record has 1 to {MAX_SEGMENTS} segments, not {len(sizes)}")
        raw_bytes = sum(sizes)
        if min(sizes) < 0 or raw_bytes > MAX_RECORD_BYTES:
            raise ConfigError(f"a record holds at most 2^40 bytes in segments of at least 0, not {raw_bytes}")
        if kind == KIND_OPAQUE and max(sizes) > OPAQUE_SEGMENT_BYTES:
            raise ConfigError(f"a segment of an opaque record holds at most 1 MiB, not {max(sizes)} bytes")
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
            ConfigError: there are no such segments, or `flat` is not exactly as long as they are together.
        """
        if not 0 <= first <= len(self.sizes) or not 0 <= (count or 0) <= len(self.sizes) - first:
            raise ConfigError(f"the record has {len(self.sizes)} segments; {count} from {first} are not among them")
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
    spec = RecordSpec.of(KIND_KV, (layout.segment_bytes(tokens, dtype),) * layout.num_layers)
    return replace(spec, layout=layout, dtype=canonical_dtype(dtype), tokens=tokens)


@functools.lru_cache(maxsize=1024)
def opaque_spec(nbytes: int) -> RecordSpec:
    """The spec of an opaque record of `nbytes` bytes: segments of 1 MiB, the last one shorter."""
    if not 0 <= nbytes <= MAX_SEGMENTS * OPAQUE_SEGMENT_BYTES:  # before anything of that size is made
        raise ConfigError(f"an opaque record holds 0 to 64 GiB, not {nbytes} bytes")
    whole, rest = divmod(nbytes, OPAQUE_SEGMENT_BYTES)
    sizes = (OPAQUE_SEGMENT_BYTES,) * whole + ((rest,) if rest or not whole else ())
    return RecordSpec.of(KIND_OPAQUE, sizes)


class Header(NamedTuple):
    """A parsed and verified header with its table.

    Attributes:
        nbytes: length of the whole record.
        raw_bytes: of all layers; each counts once, however many levels it has.
        head_bytes: length of header, table and meta block; the data begins at `data_offset` or later.
        segments: the table, level-major.
        meta_block: the msgpack bytes; `meta()` decodes them.
        layers: how many layers there are; `segments[:layers]` are level 0 of each.
    """

    key: Key
    kind: int
    nbytes: int
    data_offset: int
    raw_bytes: int
    head_bytes: int
    segments: list[Segment]
    meta_block: bytes
    layers: int

    @property
    def levels(self) -> int:
        """How many levels the layer with the most of them has."""
        return self.segments[-1].level + 1

    def parts(self, first: int, count: int, level: int | None = None) -> list[list[Segment]]:
        """The segments of `count` layers from `first` on, per layer its levels 0 to `level` (None: all there are)."""
        found = [[segment] for segment in self.segments[first : first + count]]
        if level != 0:
            for segment in self.segments[self.layers :]:
                if level is not None and segment.level > level:
                    break
                if first <= segment.layer < first + count:
                    found[segment.layer - first].append(segment)
        return found

    def meta(self) -> dict[str, Any]:
        """The meta block, decoded with bounds. Raises `CorruptRecord` if it is not a msgpack map."""
        try:
            return _unpack_meta(self.meta_block)
        except (ValueError, msgpack.UnpackException) as error:
            raise CorruptRecord(f"the meta block is not a msgpack map: {error}", key=self.key, cause=error) from error

    def matches(self, spec: RecordSpec) -> bool:
        """True if the raw sizes and the kind are those of `spec`."""
        return (
            self.kind == spec.kind
            and self.layers == len(spec.sizes)
            and all(segment[2] == size for segment, size in zip(self.segments, spec.sizes, strict=False))
        )


def _unpack_meta(block: bytes) -> dict[str, Any]:
    """Raises ValueError or msgpack.UnpackException; allocates in proportion to `block` whatever it claims."""
    _check_claims(block)
    n = len(block)
    value = msgpack.unpackb(block, max_str_len=n, max_bin_len=n, max_array_len=n, max_map_len=n, max_ext_len=0)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("not a map with names")
    return value


_CONTAINER_WIDTHS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # array 16, array 32, map 16, map 32
_BODY_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str 8, 16, 32
_SCALAR_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}

_REFUSED = frozenset({0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})  # "never used", and extension types


def _check_claims(block: bytes) -> None:
    """Refuse containers that claim more values than bytes are left.

    msgpack makes room for a claimed array before it reads it, so nested claims, each in bounds, would multiply.
    """
    at, open_values = 0, 1
    while open_values:
        if open_values > len(block) - at:
            raise ValueError("it claims more than it holds")
        head = block[at]
        at += 1
        open_values -= 1
        if 0x80 <= head < 0xA0:
            open_values += (head & 15) * (1 if head & 16 else 2)
        elif 0xA0 <= head < 0xC0:
            at += head & 31
        elif width := _CONTAINER_WIDTHS.get(head):
            claimed = int.from_bytes(block[at : at + width], "big")
            open_values += claimed * (1 if head < 0xDE else 2)
            at += width
        elif width := _BODY_WIDTHS.get(head):
            at += width + int.from_bytes(block[at : at + width], "big")
        elif head in _REFUSED:
            raise ValueError("it holds an extension type")
        else:
            at += _SCALAR_BYTES.get(head, 0)


_PLAIN = frozenset({str, int, float, bool, bytes})


def _pack_meta(meta: Mapping[str, Any]) -> bytes:
    """Raises ConfigError for what `Header.meta` could not read back."""
    kept = {name: value for name, value in meta.items() if value is not None}
    try:
        block: bytes = msgpack.packb(kept)
        if len(block) > MAX_META_BYTES:
            raise ValueError(f"it has {len(block)} bytes, at most {MAX_META_BYTES} fit")
        if not all(type(name) is str and type(value) in _PLAIN for name, value in kept.items()):
            _unpack_meta(block)
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise ConfigError(f"the meta block cannot be stored: {error}", cause=error) from error
    return block


def build_record(
    key: Key,
    spec: RecordSpec,
    segments: Sequence[memoryview],
    *,
    meta: Mapping[str, Any],
    codecs: Sequence[int] | None = None,
    refinements: Sequence[tuple[int, int, memoryview]] = (),
) -> list[memoryview]:
    """The record as views to gather: header, segments and padding. No segment is copied.

    Args:
        spec: raw sizes of the layers' segments.
        segments: stored bytes of level 0 of each layer, flat byte views; raw ones are as long as the spec says.
        meta: small map of msgpack values; `None` values are left out. Beyond 512 bytes of it the segments move back,
            and a reader that began with the spec's offsets has to look into the table.
        codecs: codec number of each layer; None means that all are raw.
        refinements: (layer, level, stored bytes) of the further levels, in any order.

    Raises:
        ConfigError: sizes, counts, levels or meta do not fit the format.
    """
    count = len(spec.sizes)
    for given, what in ((segments, "segments"), (codecs, "codecs")):
        if given is not None and len(given) != count:
            raise ConfigError(f"the record has {count} segments, but {len(given)} {what} were given")
    if len(key) != KEY_BYTES:  # struct would fill it up with zeros
        raise ConfigError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    numbers = (RAW,) * count if codecs is None else codecs
    entries = [(layer, 0, segment) for layer, segment in enumerate(segments)]
    if refinements:
        entries += _in_order(refinements, numbers, segments, spec.sizes)
    meta_block = _pack_meta(meta)
    alignment = _alignment(spec.kind, spec.raw_bytes)
    head_bytes = HEADER_BYTES + _ENTRY.size * len(entries) + len(meta_block)
    reserved = max(head_bytes, HEADER_BYTES + _ENTRY.size * len(entries) + META_RESERVE)
    end = data_offset = _align(reserved, alignment if codecs is None else PACK)
    table = bytearray(_ENTRY.size * len(entries))
    body: list[memoryview] = []
    for index, (layer, level, segment) in enumerate(entries):
        codec, size = numbers[layer], spec.sizes[layer]
        length, flat = len(segment), memoryview(segment)
        if length != flat.nbytes or not flat.c_contiguous:
            raise ConfigError(f"segment {index} is not a flat view of bytes")
        if length > size or (codec == RAW and length != size):
            raise ConfigError(f"segment {index} has {length} bytes instead of {size}")
        begin = _align(end, alignment if codec == RAW else PACK)
        if begin > end:
            body.append(_ZEROS[: begin - end])
        body.append(segment)
        try:
            _ENTRY.pack_into(table, index * _ENTRY.size, begin, length, size, checksum(segment), layer, 0, codec, level)
        except struct.error as error:
            raise ConfigError(f"segment {index}: codec {codec} or level {level} is out of range") from error
        end = begin + length
    fixed = _FIXED.pack(
        MAGIC, VERSION, spec.kind, 0, len(entries), key, end, data_offset, spec.raw_bytes, len(meta_block), 1,
        bytes(10), 0,
    )[:-8]  # fmt: skip
    head = b"".join((fixed, checksum(b"".join((fixed, table, meta_block))).to_bytes(8, "little"), table, meta_block))
    return [memoryview(head), *_zeros(data_offset - head_bytes), *body]


def _in_order(
    refinements: Sequence[tuple[int, int, memoryview]],
    codecs: Sequence[int],
    coarse: Sequence[memoryview],
    sizes: Sequence[int],
) -> list[tuple[int, int, memoryview]]:
    """The further levels in the order of the table. Raises `ConfigError` if they are not 1, 2, … of layers that may
    have some, or too long."""
    ordered = sorted(refinements, key=lambda each: (each[1], each[0]))
    reached = [0] * len(codecs)
    lengths = [len(segment) for segment in coarse]
    for layer, level, data in ordered:
        if not 0 <= layer < len(codecs) or codecs[layer] == RAW or level != reached[layer] + 1:
            raise ConfigError(f"level {level} of layer {layer} refines nothing that this record holds")
        reached[layer] = level
        lengths[layer] += len(data)
        if lengths[layer] > MAX_LEVELS_SHARE * sizes[layer]:
            raise ConfigError(
                f"with level {level} of layer {layer} its levels have {lengths[layer]} bytes, more than"
                f" {MAX_LEVELS_SHARE} times its {sizes[layer]} raw bytes"
            )
    if len(codecs) + len(ordered) > MAX_SEGMENTS:
        raise ConfigError(f"a record has at most {MAX_SEGMENTS} segments, not {len(codecs) + len(ordered)}")
    return ordered


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
        CorruptRecord: anything is not as it must be. `NeedMore` if only more bytes are needed; its `need` says how
            many (at most 2.6 MiB, and at most `nbytes`; a claim beyond that is corruption, not a wish).
    """
    if nbytes is not None and nbytes < HEADER_BYTES:
        raise CorruptRecord(f"a record of {nbytes} bytes has no room for its header", key=key)
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
    if (
        not head_bytes <= data_offset <= length <= MAX_RECORD_BYTES * 2
        or data_offset >= head_bytes + META_RESERVE + PAGE
    ):
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
    end, total, layers = data_offset, 0, 0
    most = OPAQUE_SEGMENT_BYTES if kind == KIND_OPAQUE else MAX_RECORD_BYTES
    for offset, stored, raw, _, layer, group, codec, level in segments:
        # Segments follow each other with less than a page of padding: no range read spans more than it delivers.
        # What encoding did not make smaller is stored raw, so an encoded segment is never longer than its raw bytes.
        following = offset + stored
        if not end <= offset < end + PAGE or following > length or stored > raw or raw > most or group:
            raise CorruptRecord("the table's offsets or lengths contradict each other", key=key)
        if stored < raw and codec == RAW:
            raise CorruptRecord("the table's offsets or lengths contradict each other", key=key)
        end = following
        if layer == layers and not level:
            layers += 1
            total += raw
    if layers < count:
        _check_levels(segments, layers, key)
    if end != length or total != raw_bytes or total > MAX_RECORD_BYTES:
        raise CorruptRecord("the table does not add up to the record", key=key)
    meta_block = bytes(view[table_end:head_bytes])
    return Header(Key(name), kind, length, data_offset, raw_bytes, head_bytes, segments, meta_block, layers)


def _check_levels(segments: Sequence[Segment], layers: int, key: Key | None) -> None:
    """What follows the first `layers` entries, which hold level 0 of layers 0, 1, …, must be further levels of them,
    in order. Raises `CorruptRecord`."""
    reached = [0] * layers
    lengths = [segment.length for segment in segments[:layers]]
    before = (1, -1)
    for segment in segments[layers:]:
        layer, level = segment.layer, segment.level
        if (level, layer) <= before or layer >= layers or level != reached[layer] + 1:
            raise CorruptRecord("the table's layers or levels are not in order, or not complete", key=key)
        base = segments[layer]
        if segment.codec != base.codec or segment.codec == RAW or segment.raw_length != base.raw_length:
            raise CorruptRecord("the levels of a layer contradict each other", key=key)
        lengths[layer] += segment.length
        if lengths[layer] > MAX_LEVELS_SHARE * base.raw_length:  # else readers would make room for what is not there
            raise CorruptRecord("the levels of a layer are too long together", key=key)
        reached[layer], before = level, (level, layer)


def raw_checksums(head: memoryview, key: Key, spec: RecordSpec) -> list[int] | None:
    """The checksums of all segments if `head` begins a record of `key`, stored raw, in just the shape of `spec`.

    The fast path of reading: it accepts only what `parse_header` accepts, and builds nothing. None means only that
    it is something else, or damaged: `parse_header` tells what.
    """
    table_end = HEADER_BYTES + _ENTRY.size * len(spec.sizes)
    if len(head) < table_end:
        return None
    fixed = _FIXED.unpack_from(head)
    if fixed[:7] != (MAGIC, VERSION, spec.kind, 0, len(spec.sizes), key, spec.nbytes) or fixed[7] != spec.data_offset:
        return None
    head_bytes = table_end + fixed[9]
    if not head_bytes <= len(head) or head_bytes > fixed[7] or fixed[8] != spec.raw_bytes:
        return None
    if checksum(b"".join((head[:88], head[HEADER_BYTES:head_bytes]))) != fixed[12] or fixed[10:12] != _RESERVED:
        return None
    # Five words per entry; the last holds layer, head group, codec and level: of a raw segment just the layer.
    table = _words(len(spec.sizes)).unpack_from(head, HEADER_BYTES)
    if table[::5] != spec.offsets or table[1::5] != spec.sizes or table[2::5] != spec.sizes:
        return None
    if table[4::5] != _layers(len(spec.sizes)):
        return None
    return list(table[3::5])


@functools.lru_cache(maxsize=16)
def _words(entries: int) -> struct.Struct:
    return struct.Struct(f"<{5 * entries}Q")


@functools.lru_cache(maxsize=16)
def _layers(count: int) -> tuple[int, ...]:
    return tuple(range(count))


class NeedMore(CorruptRecord):
    """The bytes end before the header does. `need`: how many bytes of the record would be enough."""

    def __init__(self, need: int, key: Key | None = None) -> None:
        super().__init__(f"the record ends inside its header ({need} bytes needed)", key=key)
        self.args = (need, key)  # what copying and sending to another process call it with
        self.need = need
