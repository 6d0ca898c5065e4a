"""CacheGen's quantiser in plain numpy: what the other two (`cachegen_native`, `cachegen_kernel`) are tested against.

All arithmetic is fp32, each operation rounded by itself (no fused multiply-add), so all of them give the same bits:

    absmax(v)        the largest magnitude in the vector v
    step(v, n)       up(absmax(v) · fp32(1 / n)), where up() rounds to bfloat16 away from zero; below 2^-100 it is 0
    round(x, step)   x · (1 / step), to the nearest integer, ties to even; 0 if step is 0
    anchor           q = round(x, step(v, 127)) in -127 … 127, and its value is q · step
    delta            q = round(x − value of its group's anchor, step), and its value is that of the anchor + q · step

A value is held at the largest finite one of the KV's dtype and rounded to it once, to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .floats import from_float32, to_float32

__all__ = ["ANCHOR_LIMIT", "LARGEST", "MOST", "dequantise", "quantise", "steps_from_bits"]

ANCHOR_LIMIT = 127
MOST = 32767
"""No quantised delta is larger."""
LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
"""The largest finite value of each dtype."""

SMALLEST_STEP = (127 - 100) << 7  # 2^-100, as the upper half of a float32
LARGEST_STEP = (127 + 120) << 7  # below 2^120, so that nothing overflows

Floats = npt.NDArray[np.float32]


def steps_from_bits(bits: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 bit patterns as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _steps(vectors: Floats, limit: int) -> npt.NDArray[np.uint16]:
    """uint16 `[n]`: bfloat16 steps of the vectors `[n, channels]`."""
    largest = np.abs(vectors).max(1, initial=0).astype(np.float32)
    exact = (largest * (np.float32(1) / np.float32(limit))).view(np.uint32)
    bits: npt.NDArray[np.uint16] = ((exact + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    bits[bits < SMALLEST_STEP] = 0
    return bits


def _inverse(steps: Floats) -> Floats:
    inverse = np.zeros_like(steps)
    np.divide(np.float32(1), steps, out=inverse, where=steps > 0)
    return inverse


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
    """Quantise K or V of one segment.

    Args:
        words: bit patterns of the elements, unsigned, `[tokens, channels]`, finite.
        dtype: of the KV.
        group: tokens per group; the first one of each is its anchor.
        step: of all deltas; 0: each delta vector has its own, by its largest magnitude and `limit`.
        limit: deltas in -limit … limit are symbols 0 … 2 · limit; others are symbol 2 · limit + 1, and listed. With
            steps of their own they are held at the limit instead.
        anchors, deltas: symbols are left here, `[groups, channels]` and `[tokens - groups, channels]`.
        anchor_steps, delta_steps: bfloat16 bits are left here, `[groups]` and, if step is 0, `[tokens - groups]`.

    Returns:
        The deltas that are beyond the limit, row by row; None if one is beyond ±32767 or a step would be too large.
    """
    tokens, channels = words.shape
    values = to_float32(np.ascontiguousarray(words), dtype).reshape(tokens, channels)
    where = np.arange(tokens)
    is_anchor = where % group == 0
    first = values[is_anchor]
    anchor_steps[:] = _steps(first, ANCHOR_LIMIT)
    if (anchor_steps >= LARGEST_STEP).any():
        return None
    steps = steps_from_bits(anchor_steps)[:, None]
    q = np.clip(np.rint(first * _inverse(steps)), -ANCHOR_LIMIT, ANCHOR_LIMIT)
    anchors[:] = (q + ANCHOR_LIMIT).astype(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = values[~is_anchor] - (q * steps)[where[~is_anchor] // group]
        if step:
            inverse: Any = np.float32(1) / np.float32(step)
            exact = np.clip(difference * inverse, -MOST - 9, MOST + 9)
        else:
            if not np.isfinite(difference).all():
                return None
            delta_steps[:] = _steps(difference, limit)
            if (delta_steps >= LARGEST_STEP).any():
                return None
            exact = np.clip(difference * _inverse(steps_from_bits(delta_steps))[:, None], -limit, limit)
    whole = np.rint(exact).astype(np.int32)
    large = np.abs(whole) > limit
    if (np.abs(whole) > MOST).any():
        return None
    deltas[:] = np.where(large, 2 * limit + 1, whole + limit).astype(np.uint8)
    beyond: npt.NDArray[np.int16] = whole[large].astype(np.int16)
    return beyond


def dequantise(
    anchors: npt.NDArray[np.uint8],
    deltas: npt.NDArray[np.uint8],
    anchor_steps: Floats,
    delta_steps: Floats,
    limit: int,
    escapes: npt.NDArray[np.int16],
    group: int,
    words: npt.NDArray[Any],
    dtype: str,
) -> int:
    """The opposite of `quantise`: fills `words`.

    Args:
        anchors, deltas: symbols, `[groups, channels]` and `[tokens - groups, channels]`.
        anchor_steps, delta_steps: float32 `[groups]` and `[tokens - groups]`.
        escapes: the deltas beyond the limit, and perhaps more behind them.
        words: bit patterns are left here, `[tokens, channels]`.

    Returns:
        How many of `escapes` it took; -1 if they did not suffice.
    """
    tokens, channels = words.shape
    where = np.arange(tokens)
    is_anchor = where % group == 0
    whole = deltas.astype(np.int32) - limit
    large = deltas > 2 * limit
    count = int(large.sum())
    if count > len(escapes):
        return -1
    whole[large] = escapes[:count]
    values = np.empty((tokens, channels), np.float32)
    first = (anchors.astype(np.float32) - np.float32(ANCHOR_LIMIT)) * anchor_steps[:, None]
    values[is_anchor] = first
    values[~is_anchor] = first[where[~is_anchor] // group] + whole.astype(np.float32) * delta_steps[:, None]
    largest = np.float32(LARGEST[dtype])
    np.clip(values, -largest, largest, out=values)
    from_float32(values, dtype, words)
    return count
