"""8 bits per element and one scale per token and head: the common part of the codecs int8 and fp8, and their format.

Each vector (the K or the V of one head of one token) has a scale of its own, its largest magnitude divided by the
largest code, rounded up, so that nothing overflows; then every element is divided by it and rounded. K and V never
share a scale. Scales are float16 where all of a segment fit it as normal numbers, else float32. A vector of zeros has
scale 0.

An encoded segment, little-endian, T tokens, H heads, widths k of K and v of V (0 for MLA):

    0   1   format version (1)
    1   1   dtype of the elements: 0 bfloat16, 1 float16, 2 float32
    2   1   bytes per scale: 2 or 4
    3   1   reserved (0)
    4   16  T, H, k, v, each u32
    20  …   scales of K [T, H], then those of V [T, H], if v is not 0
    …       codes of K [T, H, k], then those of V [T, H, v]

With 64 elements per vector that is 0.516 of bfloat16. There is no entropy coder and no profile. A segment is stored raw
if it holds inf or nan, if its elements have 8 bits already, or if this would not make it smaller.

Nothing is trusted: counts must give the bytes there are, and the destination; scales must be finite and not negative.
"""

from __future__ import annotations

import functools
import struct
from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import DTYPES

from .base import Codec, Encoded, SegmentInfo, only_part, stored_raw
from .floats import FLOATS, from_float32, to_float32

__all__ = ["ScaledCodec", "native"]

Array: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[np.float32]

_HEAD = struct.Struct("<BBBBIIII")
_FORMAT = 1
_BLOCK = 64 << 10  # elements handled in one step: 256 KiB of float32 stay in the cache
_INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}  # the first magnitude that is not finite
_MOST = {"bfloat16": np.float32(3.3895314e38), "float16": np.float32(65504), "float32": np.finfo(np.float32).max}
_NORMAL_16 = np.float16(2**-14)


@functools.cache
def native() -> ModuleType | None:
    """The loops as machine code; None without numba (`pip install 'kvstore[codec]'`)."""
    try:
        from . import scaled_native
    except ImportError:
        return None
    return scaled_native


class ScaledCodec(Codec):
    """Codes of 8 bits with a scale per token and head. Subclasses say what the codes are."""

    lossless = False
    most: float
    """The largest code."""

    @abstractmethod
    def _quantise(self, values: Float32, divisors: Float32, codes: Array, using: ModuleType | None) -> None:
        """values `[rows, width]` / divisors `[rows]`, at most `most` in magnitude, as codes, uint8 `[rows, width]`."""

    @abstractmethod
    def _restore(self, codes: Array, scales: Float32, out: Float32, using: ModuleType | None) -> None:
        """The opposite. Raises `CorruptRecord` for a code that is none."""

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """Encode one segment.

        Args:
            raw: `[tokens, heads, head_dim]` of K, then `[tokens, heads, v_head_dim]` of V.
            about: layout, dtype and tokens are looked at.

        Returns:
            One level; or the segment as it is.

        Raises:
            ConfigError: `raw` is not as long as layout, dtype and tokens say.
        """
        layout, dtype, tokens = about.layout, about.dtype, about.tokens
        if layout is None or dtype not in FLOATS or not tokens:
            return stored_raw(raw)
        if len(raw) != layout.segment_bytes(tokens, dtype):
            raise ConfigError(
                f"a segment of {tokens} tokens of {dtype} has {layout.segment_bytes(tokens, dtype)} bytes in this "
                f"layout, not {len(raw)}"
            )
        heads, widths = layout.num_kv_heads, (layout.head_dim, layout.v_head_dim or 0)
        using = native()
        words = _frozen(np.frombuffer(raw, np.uint8)).view(f"<u{DTYPES[dtype]}")
        parts, magnitudes, at = [], [], 0
        for width in filter(None, widths):
            part = words[at : at + tokens * heads * width].reshape(-1, width)
            at += part.size
            bits = _largest(part, using)
            if int(bits.max()) >= _INFINITE[dtype]:
                return stored_raw(raw)
            parts.append(part)
            magnitudes.append(to_float32(bits, dtype))
        scales = _scales(np.concatenate(magnitudes), self.most)
        total = _HEAD.size + scales.nbytes + words.size
        if total >= len(raw):
            return stored_raw(raw)
        out = np.empty(total, np.uint8)
        code = FLOATS.index(dtype)
        _HEAD.pack_into(out.data, 0, _FORMAT, code, scales.itemsize, 0, tokens, heads, *widths)
        at = _HEAD.size + scales.nbytes
        out[_HEAD.size : at] = scales.view(np.uint8)
        divisors = scales.astype(np.float32)
        divisors[divisors == 0] = 1
        row = 0
        for part in parts:
            step = max(1, _BLOCK // part.shape[1])
            room = np.empty((min(step, len(part)), part.shape[1]), np.float32)
            for begin in range(0, len(part), step):
                some = part[begin : begin + step]
                codes = out[at : at + some.size].reshape(some.shape)
                values = _widened(some, dtype, room[: len(some)], using)
                self._quantise(values, divisors[row : row + len(some)], codes, using)
                at, row = at + some.size, row + len(some)
        return (Encoded(self.number, 0, out.data),)

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Decode a segment into `dst`, filling it exactly. The bytes are written once, by way of the cache.

        Raises:
            CorruptRecord: the bytes are not a segment of this codec, or of another length. `dst` is then undefined.
        """
        data = only_part(parts, self.name)
        dtype, shapes, scales, at = self._parse(data, len(dst))
        using = native()
        source = _frozen(np.frombuffer(data, np.uint8))
        target = np.frombuffer(dst, np.uint8).view(f"<u{DTYPES[dtype]}")
        clip = float(scales.max(initial=0)) * self.most > float(_MOST[dtype])
        row = place = 0
        for rows, width in shapes:
            step = max(1, _BLOCK // width)
            room = np.empty((min(step, rows), width), np.float32)
            for begin in range(0, rows, step):
                count = min(step, rows - begin)
                values, size = room[:count], count * width
                codes = source[at : at + size].reshape(count, width)
                with np.errstate(over="ignore"):
                    self._restore(codes, scales[row : row + count], values, using)
                if clip:  # the scale was rounded up
                    np.clip(values, -_MOST[dtype], _MOST[dtype], out=values)
                _narrowed(values, dtype, target[place : place + size], using)
                at, row, place = at + size, row + count, place + size

    def _parse(self, data: memoryview, size: int) -> tuple[str, list[tuple[int, int]], Float32, int]:
        """dtype, (vectors, width) of K and of V, all scales, and where the codes begin; all adds up, or
        `CorruptRecord`."""
        if len(data) < _HEAD.size:
            raise CorruptRecord(f"an {self.name} segment of {len(data)} bytes ends inside its header")
        version, code, scale_bytes, reserved, tokens, heads, *widths = _HEAD.unpack_from(data)
        if version != _FORMAT or reserved or code >= len(FLOATS) or scale_bytes not in (2, 4):
            raise CorruptRecord(f"not an {self.name} segment of format {_FORMAT}")
        dtype, vectors = FLOATS[code], tokens * heads
        shapes = [(vectors, width) for width in widths if width]
        elements = sum(rows * width for rows, width in shapes)
        if not elements or not widths[0] or elements * DTYPES[dtype] != size:
            raise CorruptRecord(f"an {self.name} segment holds {elements} {dtype} elements instead of {size} bytes")
        begin = _HEAD.size + vectors * len(shapes) * scale_bytes
        if len(data) != begin + elements:
            raise CorruptRecord(f"an {self.name} segment of {elements} elements cannot have {len(data)} bytes")
        stored = np.frombuffer(data[_HEAD.size : begin], np.uint8).view(f"<f{scale_bytes}")
        scales = stored.astype(np.float32)
        if not (np.isfinite(scales) & ~np.signbit(scales)).all():
            raise CorruptRecord(f"an {self.name} segment has a scale that is negative or not finite")
        return dtype, shapes, _frozen(scales), begin


def _frozen(array: Array) -> Array:
    """A read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view


def _aligned(array: Array) -> Array:
    return array if array.flags.aligned else _frozen(array.copy())


def _largest(words: Array, using: ModuleType | None) -> Array:
    """The largest magnitude of each row, as bits."""
    mask = words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
    out = np.empty(len(words), words.dtype)
    step = max(1, _BLOCK // words.shape[1])
    for begin in range(0, len(words), step):
        some = words[begin : begin + step]
        if using is not None:
            using.largest(_aligned(some), mask, out[begin : begin + len(some)])
        else:
            (some & mask).max(axis=1, out=out[begin : begin + len(some)])
    return out


def _scales(magnitudes: Float32, most: float) -> Array:
    """magnitude / most, rounded up: float16 if all of them are normal numbers there, or 0; else float32."""
    exact = magnitudes.astype(np.float64) / most
    with np.errstate(over="ignore", under="ignore"):
        half = exact.astype(np.float16)
        half = np.where(half < exact, np.nextafter(half, np.float16(np.inf)), half)
        if (np.isfinite(half) & ((half >= _NORMAL_16) | (exact == 0))).all():
            return half.astype("<f2")
        single = exact.astype(np.float32)
    return np.where(single < exact, np.nextafter(single, np.float32(np.inf)), single).astype("<f4")


def _widened(words: Array, dtype: str, room: Float32, using: ModuleType | None) -> Float32:
    """Elements as float32 `[rows, width]`: in `room`, or where they are."""
    if dtype == "float32":
        values: Float32 = _aligned(words).view("<f4")
    elif using is not None:
        flat, source = room.reshape(-1), _aligned(words).reshape(-1)
        if dtype == "float16":
            using.from_half(source, flat.view(np.uint32), flat)
        else:
            using.widen(source, flat.view(np.uint32))
        values = _frozen(room)
    else:
        values = _frozen(to_float32(words, dtype).reshape(words.shape))
    return values


def _narrowed(values: Float32, dtype: str, out: Array, using: ModuleType | None) -> None:
    """Write float32 values as elements of `dtype`."""
    if using is None or dtype == "float32" or not out.flags.aligned:
        from_float32(values, dtype, out)
        return
    flat = values.reshape(-1)
    if dtype == "float16":
        using.to_half(_frozen(flat), _frozen(flat.view(np.uint32)), out)
    else:
        using.narrow(_frozen(flat.view(np.uint32)), out)
