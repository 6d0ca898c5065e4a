"""Segments stored as they are."""

from __future__ import annotations

from kvstore.errors import CorruptRecord

from .base import RAW, Codec, Encoded

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Stores a segment as it is: `encode` copies nothing, `decode_into` once."""

    name = "raw"
    number = RAW
    lossless = True

    def encode(self, raw: memoryview, *, itemsize: int) -> Encoded:
        """`raw` itself; the caller keeps it alive and unchanged until it is written."""
        return Encoded(RAW, 0, raw)

    def decode_into(self, data: memoryview, dst: memoryview) -> None:
        """Copy `data` into `dst`.

        Raises:
            CorruptRecord: the lengths differ.
        """
        if len(data) != len(dst):
            raise CorruptRecord(f"a raw segment has {len(data)} bytes instead of {len(dst)}")
        dst[:] = data
