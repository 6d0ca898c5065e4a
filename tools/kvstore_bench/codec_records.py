"""Contexts as the records that a store would keep, and back: what is counted and judged is what lies there.

A context is cut into chunks; each becomes one record of `kvstore.record`, with header, table, meta block and padding.
It is read back from those bytes alone: parsed, checked, and decoded up to a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.codec import codec_by_number
from kvstore.codec.base import RAW, Codec, SegmentInfo
from kvstore.errors import CorruptRecord
from kvstore.keys import opaque_key
from kvstore.layout import KVLayout
from kvstore.record import Header, build_record, checksum, kv_spec, parse_header

from .quality import DTYPE, Segments

__all__ = ["Stored", "about", "chunk_of", "chunks_of", "refines_alike", "store"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Stored:
    """A context in records.

    Attributes:
        records: the bytes of each, with the tokens it holds.
        layout: of the KV.
    """

    records: Sequence[tuple[bytes, int]]
    layout: KVLayout

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.records)

    @property
    def values(self) -> int:
        """Elements of K and V in the context."""
        return self.tokens * self.layout.elements_per_token * self.layout.num_layers

    @property
    def nbytes(self) -> int:
        """All stored bytes, every level."""
        return sum(len(record) for record, _ in self.records)

    @property
    def levels(self) -> int:
        """How many levels the records have."""
        return max(parse_header(record).levels for record, _ in self.records)

    @property
    def raw_segments(self) -> int:
        """Segments that the codec left as they are."""
        return sum(each.codec == RAW for record, _ in self.records for each in parse_header(record).segments)

    def fetched(self, level: int) -> int:
        """Bytes that a reader of levels 0 to `level` needs: of each record everything up to the last segment of that
        level, header and the whole table included (levels lie one after the other)."""
        total = 0
        for record, _ in self.records:
            header = parse_header(record)
            total += max(each.offset + each.length for each in header.segments if each.level <= level)
        return total

    def read(self, level: int) -> Segments:
        """The context's segments, decoded from the records.

        Raises:
            CorruptRecord: a record is damaged.
        """
        sizes = [self.layout.segment_bytes(self.tokens, DTYPE)] * self.layout.num_layers
        out = [np.empty(size, np.uint8) for size in sizes]
        begin = 0
        for record, tokens in self.records:
            header = parse_header(record, nbytes=len(record))
            room = np.empty(self.layout.segment_bytes(tokens, DTYPE), np.uint8)
            for layer, whole in enumerate(out):
                decode(record, header, layer, level, room)
                _put(whole, room, begin, tokens, self.tokens)
            begin += tokens
        return out


def decode(record: bytes, header: Header, layer: int, level: int, room: Bytes) -> None:
    """One layer of a record into `room`, its checksums verified first.

    Raises:
        CorruptRecord: it is damaged. `room` is then undefined.
    """
    parts = []
    view = memoryview(record)
    (entries,) = header.parts(layer, 1, level)
    for entry in entries:
        part = view[entry.offset : entry.offset + entry.length]
        if checksum(part) != entry.checksum:
            raise CorruptRecord(f"layer {layer}: the record's own checksum is wrong")
        parts.append(part)
    codec_by_number(entries[0].codec).decode_into(parts, room.data)


def _put(whole: Bytes, part: Bytes, begin: int, tokens: int, total: int) -> None:
    """A chunk's segment into a context's segment, both K and then V."""
    whole.reshape(2, total, -1)[:, begin : begin + tokens] = part.reshape(2, tokens, -1)


def chunk_of(segments: Segments, begin: int, end: int, total: int) -> Segments:
    """The segments of tokens `begin` to `end` of a context of `total` tokens."""
    return [np.ascontiguousarray(each.reshape(2, total, -1)[:, begin:end]).reshape(-1) for each in segments]


def chunks_of(segments: Segments, total: int, chunk: int) -> list[tuple[int, int, Segments]]:
    """A context cut into chunks: (first token, tokens, segments) of each; the last one may be shorter."""
    return [
        (begin, min(chunk, total - begin), chunk_of(segments, begin, min(begin + chunk, total), total))
        for begin in range(0, total, chunk)
    ]


def about(layout: KVLayout, layer: int, begin: int, tokens: int) -> SegmentInfo:
    """What a store tells a codec of a segment: K is stored after the rotary embedding."""
    return SegmentInfo(itemsize=2, layer=layer, layout=layout, dtype=DTYPE, tokens=tokens, start=begin, rope="applied")


def store(codec: Codec, segments: Segments, layout: KVLayout, tokens: int, chunk: int, model: str = "bench") -> Stored:
    """A context encoded and made into records.

    Args:
        segments: of the whole context.
        tokens: in the context.
        chunk: tokens per record.
        model: name for the meta block.
    """
    return Stored([
        (_record(codec, some, layout, begin, count, model), count)
        for begin, count, some in chunks_of(segments, tokens, chunk)
    ], layout)  # fmt: skip


def _record(codec: Codec, segments: Segments, layout: KVLayout, begin: int, tokens: int, model: str) -> bytes:
    # The meta block is what the transformers integration writes.
    meta = {
        "model": model, "revision": "bench", "namespace": "default", "dtype": DTYPE, "tokens": [begin, begin + tokens],
        "layers": layout.num_layers, "kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim, "rope": "applied",
    }  # fmt: skip
    encoded = [
        codec.encode(segment.data, about(layout, layer, begin, tokens)) for layer, segment in enumerate(segments)
    ]
    views = build_record(
        opaque_key(f"{model} {begin}"),
        kv_spec(layout, DTYPE, tokens),
        [levels[0].data for levels in encoded],
        meta=meta,
        codecs=[levels[0].codec for levels in encoded],
        refinements=[
            (layer, part.level, part.data) for layer, levels in enumerate(encoded) for part in levels[1:]
        ],
    )  # fmt: skip
    return b"".join(views)


def refines_alike(stored: Stored) -> bool:
    """Whether refining in place, level by level, gives the bytes that decoding at once gives, at every level, in the
    first record."""
    record, tokens = stored.records[0]
    header = parse_header(record)
    size = stored.layout.segment_bytes(tokens, DTYPE)
    view = memoryview(record)
    for layer, entries in enumerate(header.parts(0, header.layers)):
        refined, at_once = np.empty(size, np.uint8), np.empty(size, np.uint8)
        decoder = codec_by_number(entries[0].codec).decoder(refined.data)
        for level, entry in enumerate(entries):
            decoder.feed(view[entry.offset : entry.offset + entry.length])
            decode(record, header, layer, level, at_once)
            if not np.array_equal(refined, at_once):
                return False
    return True
