"""The loops of the kvt codec as machine code, by numba. The same results as `kvt_reference`, to the last bit.

Compiled on first use and kept on disk (`kvstore.codec.compiled`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int32, uint8, uint32, uint64

from . import kvt_reference
from .compiled import compiled
from .kvt_reference import ABSENT, LARGEST, NEAR, Float32, Int8, UInt8, UInt16, UInt32

__all__ = ["contexts", "dequantise", "merge", "quantise", "split", "store"]

_ABSENT, _LARGEST, _NEAR = ABSENT, LARGEST, NEAR


def _grown() -> Int8:
    """Value `[256]` (as it lies in memory) and symbol `[4]` → value one bit finer."""
    known = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int16)[:, None]
    symbol = np.arange(4)
    finer = np.where(known == 0, np.array([0, 1, -1, -1]), 2 * known + np.sign(known) * (symbol & 1))
    table: Int8 = finer.astype(np.int8)
    return table


_GROWN = _grown()


@compiled()
def _quantise(z: Any, offset: Any, rounding: Any, out: Any, beyond: Any) -> None:
    rows, channels = z.shape
    largest = np.float32(_LARGEST)
    for t in range(rows):
        bad = 0
        for c in range(channels):
            x = z[t, c] - offset[c]
            a = np.floor(abs(x) + rounding)
            fits = a <= largest
            bad |= not fits
            a = a if fits else largest
            i = np.int32(a)
            out[t, c] = np.int8(-i if x < 0 else i)
        beyond[t] = bad != 0


@compiled()
def _contexts(values: Any, live: Any, classes: Any, out: Any) -> None:
    rows, n = out.shape
    for t in range(rows):
        known, kinds = values[t], out[t]
        for i in range(n):
            kinds[i] = classes[i, _known(known[live[i]])]


@compiled(inline="always")
def _known(value: Any) -> Any:
    return uint8(min(abs(int32(value)), int32(2)))


@compiled()
def _split(
    indices: Any, live: Any, before: Any, after: Any, classes: Any, codable: Any, near: Any, kinds: Any, out: Any,
    escapes: Any,
) -> Any:  # fmt: skip
    """Indices are small, nearly always, and then everything is in `near`: branches that hang on data cost most."""
    rows, n = out.shape
    middle = codable.shape[1] // 2
    count = uint64(0)
    for t in range(rows):
        own, symbols, kinds_here = indices[t], out[t], kinds[t]
        for i in range(n):
            v = int32(own[live[i]])
            place = uint32(v + _NEAR)
            if place < uint32(2 * _NEAR):
                entry = near[i, place]
                kinds_here[i] = (entry >> uint32(8)) & uint32(0xFFFF)
                symbols[i] = entry & uint32(0xFF)
                escaped = entry >> uint32(31)
            else:
                magnitude = abs(v) >> int32(after[i])
                if before[i] == _ABSENT:
                    kind, value = classes[i, 0], -magnitude if v < 0 else magnitude
                    symbol = value + middle if magnitude < middle and codable[kind, value + middle] else 0
                    escaped = uint32(symbol == 0)
                else:
                    known = magnitude >> 1
                    kind = classes[i, min(known, 2)]
                    symbol = magnitude & 1 if known else int32(magnitude != 0) << int32(v < 0)
                    escaped = uint32(0)
                kinds_here[i] = kind
                symbols[i] = symbol
            if escaped:
                magnitude = abs(v) >> int32(after[i])
                escapes[count] = -magnitude if v < 0 else magnitude
                count += uint64(1)
    return count


@compiled()
def _merge(symbols: Any, live: Any, fresh: Any, after: Any, middle: Any, escapes: Any, grown: Any, values: Any) -> Any:
    rows, n = symbols.shape
    at = uint64(0)
    for t in range(rows):
        own, values_here = symbols[t], values[t]
        for i in range(n):
            symbol = own[i]
            c = live[i]
            if fresh[i]:
                value = int32(symbol) - int32(middle)
                if symbol == 0:
                    if at >= uint64(escapes.shape[0]):
                        return False
                    value = int32(escapes[at])
                    at += uint64(1)
                    if abs(value) > _LARGEST >> int32(after[i]):
                        return False
                values_here[c] = value
            else:
                values_here[c] = grown[uint8(values_here[c]), symbol & uint8(3)]
    return at == uint64(escapes.shape[0])


@compiled()
def _dequantise(
    values: Any, one: Any, two: Any, three: Any, scale: Any, offset: Any, out: Any
) -> None:  # fmt: skip
    # Selections instead of a table look-up, so that the loop is done in vectors.
    rows, channels = values.shape
    for t in range(rows):
        for c in range(channels):
            v = np.int32(values[t, c])
            m = abs(v)
            x = three[c] + np.float32(m - 3) * scale[c]
            x = two[c] if m == 2 else x
            x = one[c] if m == 1 else x
            x = np.float32(0) if m == 0 else x
            out[t, c] = (-x if v < 0 else x) + offset[c]


@compiled()
def _bfloat16(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        bits = values[i]
        out[i] = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)


def quantise(z: Float32, offset: Float32, rounding: float, out: Int8) -> npt.NDArray[np.bool_]:
    """See `kvt_reference.quantise`."""
    beyond = np.empty(len(z), np.bool_)
    _quantise(z, offset, np.float32(rounding), out, beyond)
    return beyond


def contexts(values: Int8, live: UInt16, before: UInt8, classes: UInt16, out: UInt16) -> None:
    """See `kvt_reference.contexts`."""
    _contexts(values, live, classes, out)


def split(
    indices: Int8, live: UInt16, before: UInt8, after: UInt8, classes: UInt16, codable: UInt8, near: UInt32,
    kinds: UInt16, out: UInt8,
) -> Int8:  # fmt: skip
    """See `kvt_reference.split`."""
    escapes = np.empty(len(out) * int((before == ABSENT).sum()), np.int8)
    count = int(_split(indices, live, before, after, classes, codable, near, kinds, out, escapes))
    return escapes[:count]


def merge(
    symbols: UInt8, live: UInt16, before: UInt8, after: UInt8, alphabet: int, escapes: Int8, values: Int8
) -> bool:
    """See `kvt_reference.merge`."""
    return bool(_merge(symbols, live, before == ABSENT, after, alphabet // 2, escapes, _GROWN, values))


def dequantise(values: Int8, centres: Float32, scale: Float32, offset: Float32, out: Float32) -> None:
    """See `kvt_reference.dequantise`."""
    _dequantise(values, centres[0], centres[1], centres[2], scale, offset, out)


def store(values: Float32, dtype: str, out: UInt8) -> None:
    """See `kvt_reference.store`."""
    if dtype == "bfloat16":
        _bfloat16(values.reshape(-1).view(np.uint32), out.reshape(-1).view("<u2"))
    else:
        kvt_reference.store(values, dtype, out)
