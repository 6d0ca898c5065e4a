"""CacheGen's quantiser as machine code, by numba. Definitions and arguments: `cachegen_reference`, whose bits it gives.

Everything is done row by row (a token's K or V), in buffers that stay in the first cache, in loops that LLVM makes SIMD
code of: no branches in them, magnitudes compared as integers, rounding by adding 1.5 · 2^23 and taking it away again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float32, int32, uint8, uint16, uint32

from .cachegen_reference import ANCHOR_LIMIT, LARGEST, LARGEST_STEP, MOST, SMALLEST_STEP
from .compiled import compiled

__all__ = ["dequantise", "quantise"]

_KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
_ROUND = np.float32(1.5 * (1 << 23))
_HALF_SCALE = np.float32(2.0**112)  # between the exponents of float16 and float32
_HALF_NORMAL = np.uint32(113 << 23)  # smallest normal float16, as a float32
_HALF_MAGIC = np.float32(0.5)  # added to what will be subnormal, it shifts the mantissa to its place, rounded

_fast = compiled(error_model="numpy")


@_fast
def _load(words: Any, kind: Any, row: Any, bits: Any) -> None:
    """A row of elements as float32. `bits` is `row` as uint32."""
    n = row.shape[0]
    if kind == 0:
        for c in range(n):
            bits[c] = uint32(words[c]) << uint32(16)
    elif kind == 1:
        for c in range(n):
            bits[c] = (uint32(words[c]) & uint32(0x7FFF)) << uint32(13)
        for c in range(n):
            row[c] *= _HALF_SCALE
        for c in range(n):
            bits[c] |= (uint32(words[c]) & uint32(0x8000)) << uint32(16)
    else:
        for c in range(n):
            bits[c] = uint32(words[c])


@_fast
def _store(row: Any, bits: Any, kind: Any, largest: Any, small: Any, small_bits: Any, words: Any) -> None:
    """A row of float32 as elements. `bits` is `row` as uint32, `small` room for such a row."""
    n = row.shape[0]
    for c in range(n):
        row[c] = min(max(row[c], -largest), largest)
    if kind == 0:
        for c in range(n):
            words[c] = uint16((bits[c] + uint32(0x7FFF) + ((bits[c] >> uint32(16)) & uint32(1))) >> uint32(16))
    elif kind == 1:
        for c in range(n):
            small[c] = abs(row[c]) + _HALF_MAGIC
        for c in range(n):
            sign = (bits[c] >> uint32(16)) & uint32(0x8000)
            size = bits[c] & uint32(0x7FFFFFFF)
            normal = (size - uint32(112 << 23) + uint32(0xFFF) + ((size >> uint32(13)) & uint32(1))) >> uint32(13)
            tiny = small_bits[c] - uint32(126 << 23)
            words[c] = uint16((normal if size >= _HALF_NORMAL else tiny) | sign)
    else:
        for c in range(n):
            words[c] = bits[c]


@_fast
def _step_bits(bits: Any, share: Any, one: Any, one_bits: Any) -> Any:
    """bfloat16 bits of the step of a row; `one` is a float32 to work in, `one_bits` the same memory."""
    largest = uint32(0)
    for c in range(bits.shape[0]):
        largest = max(largest, bits[c] & uint32(0x7FFFFFFF))
    one_bits[0] = largest
    one[0] *= share
    found = (one_bits[0] + uint32(0xFFFF)) >> uint32(16)
    return uint32(0) if found < uint32(SMALLEST_STEP) else found


@_fast
def _quantise(
    words: Any, kind: Any, group: Any, step: Any, limit: Any, anchors: Any, deltas: Any,
    anchor_steps: Any, delta_steps: Any, escapes: Any,
) -> Any:  # fmt: skip
    tokens, n = words.shape
    row = np.empty(n, np.float32)
    bits = row.view(np.uint32)
    anchor = np.zeros(n, np.float32)
    whole = np.empty(n, np.int32)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.uint32)
    anchor_share = float32(1) / float32(ANCHOR_LIMIT)
    delta_share = float32(1) / float32(limit)
    fixed = step > float32(0)
    inverse = float32(1) / step if fixed else float32(0)
    end = float32(MOST + 9) if fixed else float32(limit)
    beyond = int32(2 * limit + 1)
    top = int32(limit)
    found = 0
    group_at = -1
    delta_at = 0
    for token in range(tokens):
        _load(words[token], kind, row, bits)
        if token % group == 0:
            group_at += 1
            code = _step_bits(bits, anchor_share, one, one_bits)
            if code >= uint32(LARGEST_STEP):
                return -1
            anchor_steps[group_at] = uint16(code)
            one_bits[0] = code << uint32(16)
            size = one[0]
            invert = float32(1) / size if code else float32(0)
            out = anchors[group_at]
            for c in range(n):
                q = (row[c] * invert + _ROUND) - _ROUND
                q = min(max(q, float32(-ANCHOR_LIMIT)), float32(ANCHOR_LIMIT))
                anchor[c] = q * size
                out[c] = uint8(int32(q) + int32(ANCHOR_LIMIT))
            continue
        for c in range(n):
            row[c] -= anchor[c]
        if not fixed:
            code = _step_bits(bits, delta_share, one, one_bits)
            if code >= uint32(LARGEST_STEP):
                return -1
            delta_steps[delta_at] = uint16(code)
            one_bits[0] = code << uint32(16)
            inverse = float32(1) / one[0] if code else float32(0)
        out = deltas[delta_at]
        largest = int32(0)
        for c in range(n):
            q = min(max(row[c] * inverse, -end), end)
            w = int32((q + _ROUND) - _ROUND)
            whole[c] = w
            largest = max(largest, abs(w))
            out[c] = uint8(beyond if abs(w) > top else w + top)
        if largest > top:
            if largest > MOST:
                return -1
            for c in range(n):
                if abs(whole[c]) > top:
                    escapes[found] = whole[c]
                    found += 1
        delta_at += 1
    return found


@_fast
def _dequantise(
    anchors: Any, deltas: Any, anchor_steps: Any, delta_steps: Any, limit: Any, escapes: Any, group: Any, words: Any,
    kind: Any, largest: Any,
) -> Any:  # fmt: skip
    tokens, n = words.shape
    row = np.empty(n, np.float32)
    bits = row.view(np.uint32)
    small = np.empty(n, np.float32)
    small_bits = small.view(np.uint32)
    anchor = np.zeros(n, np.float32)
    beyond = uint8(2 * limit + 1)
    found = 0
    group_at = -1
    delta_at = 0
    for token in range(tokens):
        if token % group == 0:
            group_at += 1
            size = anchor_steps[group_at]
            source = anchors[group_at]
            for c in range(n):
                anchor[c] = float32(int32(source[c]) - int32(ANCHOR_LIMIT)) * size
                row[c] = anchor[c]
        else:
            size = delta_steps[delta_at]
            source = deltas[delta_at]
            delta_at += 1
            large = int32(0)
            for c in range(n):
                row[c] = anchor[c] + float32(int32(source[c]) - int32(limit)) * size
                large += int32(source[c] >= beyond)
            if large:
                if found + large > escapes.shape[0]:
                    return -1
                for c in range(n):
                    if source[c] >= beyond:
                        row[c] = anchor[c] + float32(escapes[found]) * size
                        found += 1
        _store(row, bits, kind, largest, small, small_bits, words[token])
    return found


def quantise(
    words: npt.NDArray[Any],
    dtype: str,
    group: int,
    step: float,
    limit: int,
    anchors: npt.NDArray[np.uint8],
    deltas: npt.NDArray[np.uint8],
    anchor_steps: npt.NDArray[np.uint16],
    delta_steps: npt.NDArray[np.uint16],
) -> npt.NDArray[np.int16] | None:
    """See `cachegen_reference.quantise`."""
    source = words.view()
    source.flags.writeable = False  # always, so that one version is compiled
    escapes = np.empty(deltas.size, np.int16)
    found = _quantise(
        source, _KINDS[dtype], group, np.float32(step), limit, anchors, deltas, anchor_steps, delta_steps, escapes
    )
    return None if found < 0 else escapes[:found]


def dequantise(
    anchors: npt.NDArray[np.uint8],
    deltas: npt.NDArray[np.uint8],
    anchor_steps: npt.NDArray[np.float32],
    delta_steps: npt.NDArray[np.float32],
    limit: int,
    escapes: npt.NDArray[np.int16],
    group: int,
    words: npt.NDArray[Any],
    dtype: str,
) -> int:
    """See `cachegen_reference.dequantise`."""
    listed = escapes.view()
    listed.flags.writeable = False
    return int(
        _dequantise(
            anchors, deltas, anchor_steps, delta_steps, limit, listed, group, words, _KINDS[dtype],
            np.float32(LARGEST[dtype]),
        )
    )  # fmt: skip
