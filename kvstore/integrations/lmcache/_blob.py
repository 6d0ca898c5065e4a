"""An LMCache object, encoded by one of our codecs: one run of bytes that says its own length and proves itself whole.

All integers little-endian.

    0    8   magic  89 4B 56 53 45 52 0D 0A  ("\\x89KVSER\\r\\n")
    8    2   format version (1)
    10   2   reserved (0)
    12   4   number of parts n
    16   8   length of all of it, in bytes
    24   8   raw bytes of the object
    32   8   XXH3-64 of the shapes and dtypes of the object, as text
    40   8   XXH3-64 of the name under which the object is stored
    48   8   XXH3-64 of everything behind this header
    56   8   XXH3-64 of bytes 0..55
    64   16n table: per part its segment u32, codec u8 (0 = raw), level u8, reserved u16 (0), length u64
    …        the parts, in the order of the table: level 0, 1, … of segment 0, then those of segment 1, …

The segments of an object follow from its shapes. One of `[2, layers, tokens, width]` (K and V), `[layers, tokens,
width]` or `[1, layers, tokens, width]` (MLA: one latent vector per token) has a segment per layer for lossy codecs, K
and then V, as `kvstore.layout` has it; for exact ones K and V of a layer are two segments, so that nothing is copied.
What has another shape is cut into pieces of 1 MiB, which lossy codecs leave as they are.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.codec import codec_by_number
from kvstore.codec.base import RAW, Codec, SegmentInfo
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import DTYPES, KVLayout
from kvstore.record import checksum

__all__ = ["Blobs", "Group"]

MAGIC = b"\x89KVSER\r\n"
VERSION = 1
PIECE_BYTES = 1 << 20

_HEAD = struct.Struct("<8sHHIQQQQQQ")
_ENTRY = struct.Struct("<IBBHQ")


class Group(NamedTuple):
    """One tensor of an object.

    Attributes:
        shape: as LMCache has it.
        dtype: torch's name of it, such as "bfloat16".
        itemsize: bytes per element.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return math.prod(self.shape) * self.itemsize


class _Segment(NamedTuple):
    """What is encoded by itself: one run of the object's bytes, or two that are joined."""

    runs: tuple[tuple[int, int], ...]  # (offset, length)
    about: SegmentInfo

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.runs)


class _Scratch(threading.local):
    """Memory that a thread uses again."""

    def __init__(self) -> None:
        self.room = bytearray()


class Blobs:
    """Encodes objects, and decodes what it, or another one of the same codec, encoded. May be used by several threads.

    Args:
        codec: encodes; what another lossy codec encoded is not decoded.
        head_size: elements per head of K and V. Codecs with a profile know it from there.
    """

    def __init__(self, codec: Codec, head_size: int | None = None) -> None:
        self.codec = codec
        self.head_size = head_size
        self._scratch = _Scratch()

    def bound(self, groups: Sequence[Group]) -> int:
        """The most bytes that an object of these groups may take encoded."""
        segments = self._segments(groups)
        parts = len(segments) * self.codec.levels
        return _HEAD.size + _ENTRY.size * parts + sum(group.nbytes for group in groups)

    def encode(self, src: memoryview, groups: Sequence[Group], name: str, dst: memoryview) -> int:
        """Encode the bytes of an object; returns how many were written to `dst`.

        Args:
            src: all bytes of the object, its groups one behind the other.
            name: what it is stored under; who decodes must give the same.
            dst: writable, at least `bound` bytes.

        Raises:
            ConfigError: the object is not of the kind that the codec's profile is for, or its width is no multiple of
                `head_size`; `src` is not as long as its groups say; `dst` is too short.
        """
        raw_bytes = sum(group.nbytes for group in groups)
        if len(src) != raw_bytes:
            raise ConfigError(f"an object of {raw_bytes} bytes by its shapes holds {len(src)}")
        segments = self._segments(groups)
        most = self.bound(groups)
        if len(dst) < most:
            raise ConfigError(f"an object may take {most} bytes encoded, and there is room for {len(dst)}")
        at = begin = _HEAD.size + _ENTRY.size * self.codec.levels * len(segments)
        entries: list[bytes] = []
        for number, segment in enumerate(segments):
            raw = self._joined(src, segment)
            parts = self.codec.encode(raw, segment.about)
            if len(parts) > self.codec.levels or sum(len(part.data) for part in parts) > len(raw):
                parts = ()  # it does not pay with all its levels
            for part in parts:
                dst[at : at + len(part.data)] = part.data
                entries.append(_ENTRY.pack(number, part.codec, part.level, 0, len(part.data)))
                at += len(part.data)
            if not parts:
                dst[at : at + len(raw)] = raw
                entries.append(_ENTRY.pack(number, RAW, 0, 0, len(raw)))
                at += len(raw)
        table = b"".join(entries)
        end = _HEAD.size + len(table)
        dst[_HEAD.size : end] = table
        if end != begin:  # fewer levels than there might have been: the parts move up
            dst[end : end + at - begin] = dst[begin:at]
        length = end + at - begin
        head = _HEAD.pack(
            MAGIC, VERSION, 0, len(entries), length, raw_bytes, _shapes_digest(groups), checksum(name.encode()),
            checksum(dst[_HEAD.size : length]), 0,
        )[: _HEAD.size - 8]  # fmt: skip
        dst[: _HEAD.size] = head + struct.pack("<Q", checksum(head))
        return length

    def decode(self, src: memoryview, groups: Sequence[Group], name: str, dst: memoryview) -> None:
        """Decode an object into `dst`, filling it exactly.

        Args:
            src: what was encoded, and maybe more behind it.

        Raises:
            CorruptRecord: it is not what was encoded of an object of this name and these groups, by this codec.
            UnknownProfile: it names a profile that is not loaded here.
        """
        count, length = _parse_head(src, groups, name)
        raw_bytes = sum(group.nbytes for group in groups)
        if len(dst) != raw_bytes:
            raise ConfigError(f"an object of {raw_bytes} bytes by its shapes holds {len(dst)}")
        segments = self._segments(groups)
        parts: list[list[tuple[int, memoryview]]] = [[] for _ in segments]
        at = _HEAD.size + _ENTRY.size * count
        for number, codec, level, _, size in _ENTRY.iter_unpack(src[_HEAD.size : at]):
            if number >= len(segments) or level != len(parts[number]) or size > length - at:
                raise CorruptRecord("the table of parts makes no sense")
            parts[number].append((codec, src[at : at + size]))
            at += size
        if at != length:
            raise CorruptRecord(f"its parts end at {at}, not at {length}")
        for segment, some in zip(segments, parts, strict=True):
            self._decode_segment(segment, some, dst)

    def _decode_segment(self, segment: _Segment, parts: Sequence[tuple[int, memoryview]], dst: memoryview) -> None:
        numbers = {number for number, _ in parts}
        if len(numbers) != 1:
            raise CorruptRecord("a segment without parts, or of several codecs")
        (number,) = numbers
        codec = codec_by_number(number)
        if not codec.lossless and number != self.codec.number:
            raise CorruptRecord(f"it was encoded by codec {codec.name!r}, and this is one of {self.codec.name!r}")
        joined = len(segment.runs) == 1
        (begin, size), *_ = segment.runs
        into = dst[begin : begin + size] if joined else self._room(segment.nbytes)
        codec.decode_into([data for _, data in parts], into)
        if not joined:
            at = 0
            for begin, size in segment.runs:
                dst[begin : begin + size] = into[at : at + size]
                at += size

    def _joined(self, src: memoryview, segment: _Segment) -> memoryview:
        (begin, size), *_ = segment.runs
        if len(segment.runs) == 1:
            return src[begin : begin + size]
        room, at = self._room(segment.nbytes), 0
        for begin, size in segment.runs:
            room[at : at + size] = src[begin : begin + size]
            at += size
        return room

    def _room(self, nbytes: int) -> memoryview:
        """Memory of this thread's, until it asks again."""
        if len(self._scratch.room) < nbytes:
            self._scratch.room = bytearray(nbytes)
        return memoryview(self._scratch.room)[:nbytes]

    def _segments(self, groups: Sequence[Group]) -> Sequence[_Segment]:
        segments: list[_Segment] = []
        base = 0
        for group in groups:
            segments += self._segments_of(group, base)
            base += group.nbytes
        if not segments:
            raise ConfigError(f"an object of shapes {[group.shape for group in groups]} holds nothing")
        return segments

    def _segments_of(self, group: Group, base: int) -> Sequence[_Segment]:
        shape = group.shape
        if len(shape) == 3:
            shape = (1, *shape)
        known = group.dtype in DTYPES and len(shape) == 4 and shape[0] in (1, 2) and all(shape)
        if not known:
            return [
                _Segment(((base + at, min(PIECE_BYTES, group.nbytes - at)),), SegmentInfo(itemsize=group.itemsize))
                for at in range(0, group.nbytes, PIECE_BYTES)
            ]
        sides, layers, tokens, width = shape
        size = tokens * width * group.itemsize
        if self.codec.lossless:
            about = SegmentInfo(itemsize=group.itemsize)
            return [_Segment(((base + at * size, size),), about) for at in range(sides * layers)]
        layout = self._layout(sides, layers, width)
        return [
            _Segment(
                tuple((base + (side * layers + layer) * size, size) for side in range(sides)),
                SegmentInfo(group.itemsize, layer, layout, group.dtype, tokens, rope="applied"),
            )
            for layer in range(layers)
        ]

    def _layout(self, sides: int, layers: int, width: int) -> KVLayout:
        if sides == 1:
            return KVLayout(layers, 1, width, kind="mla")
        profile = self.codec.profile
        head_size = self.head_size if profile is None else profile.layout.head_dim
        if head_size is None:
            raise ConfigError(
                f"serde kvstore with codec {self.codec.name} needs head_size, the elements of a head of K and V"
            )
        if width % head_size:
            raise ConfigError(f"{width} elements per token are no multiple of head_size {head_size}")
        return KVLayout(layers, width // head_size, head_size)


def _shapes_digest(groups: Sequence[Group]) -> int:
    text = ";".join(f"{','.join(map(str, group.shape))}:{group.dtype}" for group in groups)
    return checksum(text.encode())


def _parse_head(src: memoryview, groups: Sequence[Group], name: str) -> tuple[int, int]:
    """Number of parts, and length of all. Raises `CorruptRecord`."""
    if len(src) < _HEAD.size:
        raise CorruptRecord(f"{len(src)} bytes are no encoded object")
    magic, version, _, count, length, raw_bytes, shapes, named, body, head = _HEAD.unpack_from(src)
    if magic != MAGIC:
        raise CorruptRecord("these bytes were not written by serde kvstore")
    if checksum(src[: _HEAD.size - 8]) != head:
        raise CorruptRecord("the checksum of the header is wrong")
    if version != VERSION:
        raise CorruptRecord(f"format version {version} is not known to this release")
    if length > len(src) or _HEAD.size + _ENTRY.size * count > length:
        raise CorruptRecord(f"it takes {length} bytes, and {len(src)} are there")
    if raw_bytes != sum(group.nbytes for group in groups) or shapes != _shapes_digest(groups):
        raise CorruptRecord("it was encoded of an object of another shape or dtype")
    if named != checksum(name.encode()):
        raise CorruptRecord("it was stored under another name")
    if checksum(src[_HEAD.size : length]) != body:
        raise CorruptRecord("a checksum is wrong")
    return count, length
