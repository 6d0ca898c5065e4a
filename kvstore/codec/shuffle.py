"""Byte planes packed with zstd: the codec for real KV caches."""

from __future__ import annotations

import threading
from typing import ClassVar

import zstandard

from kvstore.errors import CorruptRecord

from .planes import Pack, PlaneCodec

__all__ = ["ShuffleZstdCodec"]

# Exponent bytes repeat all the time, but by chance: a match among them saves less than its Huffman codes would cost,
# and finding it takes time. With 7-byte matches and the smallest table zstd's level 1 becomes nearly a Huffman coder,
# which still sees runs. High plane of real bf16 KV: 2.85 bits, packs at 700 and unpacks at 1700 MB/s of the plane;
# with the usual parameters of level 1: 3.02 bits, 290 and 950 MB/s. Left alone: a table of 1024 entries (2.81 bits,
# packs 40 % slower); the sign moved into the low plane (0.8 % smaller, three more passes over the elements).
_FEW_MATCHES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,  # more would switch Huffman coding off
    write_content_size=True,
)


class _Contexts(threading.local):
    """zstd's contexts must not be shared by threads."""

    def __init__(self) -> None:
        self.level_1 = zstandard.ZstdCompressor(level=1, write_content_size=True)
        self.few_matches = zstandard.ZstdCompressor(compression_params=_FEW_MATCHES)
        self.decompressor = zstandard.ZstdDecompressor()


class ShuffleZstdCodec(PlaneCodec):
    """Byte planes, each packed as one zstd frame (RFC 8878) of level 1 per block. Format: `kvstore.codec.planes`.

    Which of two sets of match parameters packs a plane is decided on a sample; the frames do not differ in kind.
    """

    name = "shuffle-zstd"
    number: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self._contexts = _Contexts()

    def _choose(self, sample: memoryview) -> Pack | None:
        contexts = self._contexts
        matching = len(contexts.level_1.compress(sample))
        if matching > len(sample) * 0.95:
            return None
        if matching < len(contexts.few_matches.compress(sample)) * 0.85:
            return contexts.level_1.compress
        return contexts.few_matches.compress

    def _unpack(self, data: memoryview, nbytes: int) -> bytes:
        try:
            # The library allocates what the frame claims, so the claim is compared first.
            if zstandard.get_frame_parameters(data).content_size != nbytes:
                raise CorruptRecord(f"a zstd frame does not claim {nbytes} bytes")
            return self._contexts.decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptRecord("a zstd frame is broken", cause=error) from error
