"""Byte planes packed with LZ4. (Not called lz4.py: a module of that name would shadow the library for scripts here.)"""

from __future__ import annotations

from typing import ClassVar

import lz4.block

from kvstore.errors import CorruptRecord

from .planes import Pack, PlaneCodec

__all__ = ["Lz4Codec"]


def _pack(plane: memoryview) -> bytes:
    packed: bytes = lz4.block.compress(plane, mode="fast", store_size=False)
    return packed


class Lz4Codec(PlaneCodec):
    """Byte planes, each packed as one LZ4 block per block. Format: `kvstore.codec.planes`.

    For KV prefer "shuffle-zstd": LZ4 has no entropy coder, so it finds a third of what is there, and slower. Plain
    LZ4, without planes, finds nothing at all in real KV. It is quick where bytes really repeat.
    """

    name = "lz4"
    number: ClassVar[int] = 1

    def _choose(self, sample: memoryview) -> Pack | None:
        return _pack if len(_pack(sample)) <= len(sample) * 0.95 else None

    def _unpack(self, data: memoryview, nbytes: int) -> bytes:
        try:
            unpacked: bytes = lz4.block.decompress(data, uncompressed_size=nbytes)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptRecord("an LZ4 block is broken", cause=error) from error
        return unpacked
