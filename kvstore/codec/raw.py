"""Segments stored as they are."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import CorruptRecord

from .base import RAW, Codec, Encoded, SegmentInfo, only_part, stored_raw

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Stores a segment as it is: `encode` copies nothing, `decode_into` once."""

    name = "raw"
    number = RAW
    lossless = True

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """`raw` itself; the caller keeps it alive and unchanged until it is written."""
        return stored_raw(raw)

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Copy the one part into `dst`.

        Raises:
            CorruptRecord: the lengths differ.
        """
        data = only_part(parts, self.name)
        if len(data) != len(dst):
            raise CorruptRecord(f"a raw segment has {len(data)} bytes instead of {len(dst)}")
        dst[:] = data
