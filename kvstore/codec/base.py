"""How a layer segment is encoded: what a codec must do.

A codec works on one layer segment at a time and is self-describing: decoding needs the stored bytes and the
destination, whose length is the raw length, and nothing else. It trusts no length found in the stored bytes: what is
decoded is capped by the destination. A segment that encoding does not make smaller is stored raw (`RAW`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

__all__ = ["RAW", "Codec", "Encoded"]

RAW = 0
"""The codec number of a segment that is stored as it is."""


class Encoded(NamedTuple):
    """An encoded segment: what goes into the record's table, and the bytes.

    Attributes:
        codec: the number of the codec that decodes it; `RAW` if encoding did not pay (then `data` is the input).
        level: the codec's own level, 0 if it has none.
        data: flat byte view of the stored bytes.
    """

    codec: int
    level: int
    data: memoryview


class Codec(ABC):
    """Encodes and decodes layer segments. Stateless, or safe for use from several threads at once.

    Attributes:
        name: as in configuration (`remote_serde`) and in the key.
        number: as in the record's table; never reused for another format.
        lossless: decoding gives back the exact bytes.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, raw: memoryview, *, itemsize: int) -> Encoded:
        """Encode one segment.

        Args:
            raw: flat, contiguous bytes; not modified; may be read-only.
            itemsize: bytes per element of the KV dtype (1, 2 or 4).
        """

    @abstractmethod
    def decode_into(self, data: memoryview, dst: memoryview) -> None:
        """Decode a segment this codec encoded into `dst`, filling it exactly.

        Raises:
            CorruptRecord: `data` is not such a segment, or decodes to another length. `dst` is then undefined.
        """
