"""How a layer segment is encoded: what a codec must do.

A codec works on one layer segment at a time. Encoded bytes describe themselves: decoding needs them and the
destination, whose length is the raw length, and nothing else (a lossy codec finds its profile by the id in the bytes).
It trusts no length found in the stored bytes: what is decoded is capped by the destination. A segment that encoding
does not make smaller, that holds inf or nan, or that a lossy codec knows nothing of, is stored raw (`RAW`).

A codec may have levels: level 0 is a segment by itself, each further one adds precision to what is decoded already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvstore.errors import CorruptRecord, PermanentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvstore.layout import KVLayout

    from .profile import Profile

__all__ = ["RAW", "Codec", "Decoder", "Encoded", "SegmentInfo", "UnknownProfile", "only_part", "stored_raw"]

RAW = 0
"""The codec number of a segment that is stored as it is."""


class SegmentInfo(NamedTuple):
    """What is known of a segment besides its bytes.

    Attributes:
        itemsize: bytes per element of the KV dtype: 1, 2 or 4.
        layer: number of the layer in this shard.
        layout: shape of the KV cache; None: an opaque record, which lossy codecs store raw.
        dtype: canonical name (`kvstore.layout.DTYPES`); None where `layout` is.
        tokens: number of tokens in the segment.
        start: absolute position of the first token; None: not said.
        positions: int32 `[tokens]`, absolute position of each token, if tokens were dropped; None: they are
            `start`, `start + 1`, …
        rope: how K is stored: "applied" (rotated) or "none" (before the rotation, or there is none); None: not said.
    """

    itemsize: int = 1
    layer: int = 0
    layout: KVLayout | None = None
    dtype: str | None = None
    tokens: int = 0
    start: int | None = None
    positions: npt.NDArray[np.int32] | None = None
    rope: str | None = None

    def token_positions(self) -> npt.NDArray[np.int32] | None:
        """Absolute position of each token, int32 `[tokens]`; None if it is not said."""
        if self.positions is not None:
            return self.positions
        if self.start is None:
            return None
        import numpy as np

        return np.arange(self.start, self.start + self.tokens, dtype=np.int32)


class Encoded(NamedTuple):
    """An encoded segment, or one level of it: what goes into the record's table, and the bytes.

    Attributes:
        codec: the number of the codec that decodes it; `RAW` if encoding did not pay (then `data` is the input).
        level: 0 for the coarsest, which stands alone; n refines what levels 0..n-1 decode to.
        data: flat byte view of the stored bytes.
    """

    codec: int
    level: int
    data: memoryview


def stored_raw(raw: memoryview) -> Sequence[Encoded]:
    """What `encode` returns for a segment that is stored as it is."""
    return (Encoded(RAW, 0, raw),)


class UnknownProfile(PermanentError):
    """A segment names a profile that is not loaded here. For a reader it is a miss, and no fault of the record."""

    def __init__(self, profile_id: str) -> None:
        super().__init__(f"profile {profile_id} is not loaded; option codec_profile")
        self.args = (profile_id,)  # what copying and sending to another process call it with
        self.profile_id = profile_id


class Codec(ABC):
    """Encodes and decodes layer segments. Stateless, or safe for use from several threads at once.

    Attributes:
        name: as in configuration (`remote_serde`) and in the key.
        number: as in the record's table; never reused for another format.
        lossless: decoding gives back the exact bytes.
        levels: how many levels a segment of it may have.
        profile: what it encodes with; None if it needs none, or only decodes. (It decodes by whatever profile a
            segment names.)
    """

    name: ClassVar[str]
    number: ClassVar[int]
    lossless: ClassVar[bool]
    levels: int = 1
    profile: Profile | None = None

    @abstractmethod
    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """Encode one segment.

        Args:
            raw: flat, contiguous bytes; not modified; may be read-only, and need not be aligned.
            about: what is known of them.

        Returns:
            Its levels 0, 1, 2, …; none of them is longer than `raw`, and all together at most twice as long. Or
            `stored_raw(raw)`.

        Raises:
            ConfigError: the segment is not of the kind that the codec's profile is for; names both sides.
        """

    @abstractmethod
    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Decode a segment this codec encoded into `dst`, filling it exactly.

        Args:
            parts: the stored bytes of levels 0, 1, …; at least the first one, at most all.
            dst: flat, writable bytes, as long as the raw segment; need not be aligned.

        Raises:
            CorruptRecord: `parts` are not such a segment, or decode to another length. `dst` is then undefined.
            UnknownProfile: they name a profile that is not loaded here.
        """

    def decoder(self, dst: memoryview) -> Decoder:
        """A decoder that takes one level after the other and refines `dst` in place.

        Args:
            dst: as in `decode_into`; must stay as it is between the levels.
        """
        return _OneLevel(self, dst)


class Decoder(ABC):
    """Decodes one segment level by level. Not thread-safe. Holds what refining needs, about half of the raw bytes at
    most."""

    @abstractmethod
    def feed(self, part: memoryview) -> None:
        """The next level: the first fills `dst`, each later one refines it in place.

        Raises:
            CorruptRecord: it is not the next level of this segment. `dst` is then undefined, and the decoder useless.
            UnknownProfile: it names a profile that is not loaded here.
        """


class _OneLevel(Decoder):
    """For codecs without refinements."""

    def __init__(self, codec: Codec, dst: memoryview) -> None:
        self._codec = codec
        self._dst: memoryview | None = dst

    def feed(self, part: memoryview) -> None:
        if self._dst is None:
            raise CorruptRecord(f"a {self._codec.name} segment has one level, not several")
        dst, self._dst = self._dst, None
        self._codec.decode_into((part,), dst)


def only_part(parts: Sequence[memoryview], name: str) -> memoryview:
    """The one part of a segment of a codec without refinements. Raises `CorruptRecord` if there are others."""
    if len(parts) != 1:
        raise CorruptRecord(f"a {name} segment has one level, not {len(parts)}")
    return parts[0]
