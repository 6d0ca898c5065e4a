"""What a codec's own distributions say that its bytes must be.

Modelled are: -log2 p of every symbol that goes through the entropy coder, by the static distributions it is coded with,
and, as they are, the bytes that are no symbols (sinks stored raw, scales, escapes). Not modelled, so what the ratio of
actual bytes to modelled ones shows: headers, tables, meta block and padding of the record, headers of the segments, and
what the coder loses by rounding and by the states of its lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kvstore.codec import codec_by_number
from kvstore.codec.base import RAW, Codec, Encoded
from kvstore.layout import KVLayout

from .codec_records import about, chunks_of
from .quality import Segments

__all__ = ["modelled_bits", "watched"]


class _Stream(NamedTuple):
    """One call of the coder: the stream it gave, and what its symbols cost by their distributions, in bits."""

    stream: bytes
    bits: float


@contextmanager
def watched() -> Iterator[list[_Stream]]:
    """The streams that the entropy coder makes meanwhile, in this process.

    kvt's machine code makes its streams itself, so its plain loops stand in for it: the same bytes, to the last bit.
    """
    from kvstore.codec import kvt, kvt_reference
    from kvstore.codec.rans import reference
    from kvstore.codec.rans.coder import coder

    seen: list[_Stream] = []

    def watching(plain: Any) -> Any:
        def encode(symbols: Any, classes: Any, distributions: Any, lanes: int) -> Any:
            words, states = plain(symbols, classes, distributions, lanes)
            cost = float(distributions.bits[classes, symbols].sum(dtype=np.float64))
            seen.append(_Stream(states.astype("<u4").tobytes() + words.astype("<u2").tobytes(), cost))
            return words, states

        return encode

    modules: list[Any] = [coder(), *([] if coder() is reference else [reference])]
    plain = [module.encode for module in modules]
    loops = kvt.loops
    for module in modules:
        module.encode = watching(plain[0])  # the fastest: all of them give the same bytes
    kvt.loops = lambda: kvt_reference  # type: ignore[assignment]
    try:
        yield seen
    finally:
        kvt.loops = loops
        for module, encode in zip(modules, plain, strict=True):
            module.encode = encode


def modelled_bits(codec: Codec, segments: Segments, layout: KVLayout, tokens: int, record: int) -> list[float] | None:
    """Bits that levels 0 to n of a context take together by the codec's model, for each n; None if it codes no entropy.

    Args:
        segments: of the whole context.
        record: tokens per record.
    """
    if codec.profile is None:
        return None
    totals: list[float] = []
    for begin, count, some in chunks_of(segments, tokens, record):
        for layer, raw in enumerate(some):
            with watched() as seen:
                parts = codec.encode(raw.data, about(layout, layer, begin, count))
            totals += [0.0] * (len(parts) - len(totals))
            for part in parts:
                bits = _bits(part, seen)
                if bits is None:
                    return None
                totals[part.level] += bits
    return list(accumulate(totals))


def _bits(part: Encoded, seen: list[_Stream]) -> float | None:
    """Of one part: the symbols of the streams found in it, and the rest of it but for its header."""
    if part.codec == RAW:
        return 8.0 * len(part.data)
    data, symbols, streams = bytes(part.data), 0.0, 0
    for each in list(seen):
        if each.stream in data:
            seen.remove(each)
            symbols += each.bits
            streams += len(each.stream)
    if not streams:
        return None
    return symbols + 8.0 * (len(data) - streams - _header_bytes(part))


def _header_bytes(part: Encoded) -> int:
    """Fixed bytes that a segment begins with."""
    name = codec_by_number(part.codec).name
    if name == "cachegen":
        from kvstore.codec.cachegen import HEAD_BYTES

        return HEAD_BYTES
    if name == "kvt":
        from kvstore.codec.kvt_format import _REFINEMENT, FIRST

        return _REFINEMENT.size if part.level else FIRST.size
    return 0
