"""How large the levels of records are, read from their headers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from kvstore.codec import LOSSY

from .terms import Group

if TYPE_CHECKING:
    from kvstore.codec.base import Codec
    from kvstore.record import Header

__all__ = ["Shape", "level_sizes"]


class Shape(NamedTuple):
    """How much of the raw bytes the levels of a record take.

    Attributes:
        shares: stored bytes of level 0, levels 0..1, … over raw bytes; the header counts.
        lossless: the finest is exact.
    """

    shares: tuple[float, ...]
    lossless: bool

    @classmethod
    def of(cls, header: Header, raw_bytes: int, codec: Codec) -> Shape:
        """Of records like the one that has this header. One that could not be encoded (it holds an inf, say) has one
        level; its like have as many as the codec, so further levels that cost nothing are added."""
        sizes = level_sizes(header)
        sizes += sizes[-1:] * (codec.levels - len(sizes))
        lossless = codec.lossless and not any(segment.codec in LOSSY for segment in header.segments)
        return cls(tuple(size / max(1, raw_bytes) for size in sizes), lossless)

    @classmethod
    def guess(cls, codec: Codec) -> Shape:
        """Before anything was read: what is stored raw has its raw size, one level about half of it, the first of
        several an eighth, each further one half as much more."""
        if codec.lossless:
            return cls((1.0,), True)
        if codec.levels == 1:
            return cls((0.5,), False)
        return cls(tuple(min(1.0, 0.125 + 0.0625 * level) for level in range(codec.levels)), False)

    def group(self, begin: int, tokens: int, raw_bytes: int) -> Group:
        """A group of such records."""
        sizes = tuple(math.ceil(share * raw_bytes) for share in self.shares)
        return Group(begin, tokens, sizes, self.lossless)


def level_sizes(header: Header) -> tuple[int, ...]:
    """Bytes of level 0 of a record, its header included; of levels 0..1; and so on."""
    sizes, total = [], header.data_offset
    for level in range(header.levels):
        total += sum(segment.length for segment in header.segments if segment.level == level)
        sizes.append(total)
    return tuple(sizes)
