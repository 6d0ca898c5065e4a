"""The loops of the kvt codec as machine code, by numba. The same results as `kvt_reference`, to the last bit.

A level is coded in one pass from indices to words and back: symbols and classes are looked up where the entropy coder
wants them, and are nowhere in memory. Compiled on first use and kept on disk (`kvstore.codec.compiled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import int32, uint8, uint32, uint64

from . import kvt_reference
from .compiled import compiled
from .kvt_reference import ABSENT, LARGEST, Float32, Int8, UInt8, UInt16, UInt32
from .kvt_tables import NEAR, NONE
from .rans import PROBABILITY_BITS
from .rans.tables import LOW, RECIPROCAL_BITS, TOTAL, stream_words

if TYPE_CHECKING:
    from kvstore.rope import Rotation

    from .kvt_tables import Level
    from .rans import Distributions

__all__ = ["decode_level", "dequantise", "encode_level", "finite", "load", "quantise", "store"]

# Numba takes an index that may be negative for one from the end, and counts who uses a row that is taken out of an
# array: places are unsigned, and of the whole array.

_ABSENT, _LARGEST, _NEAR, _NONE = ABSENT, LARGEST, NEAR, NONE
_BITS, _TOTAL, _LOW = PROBABILITY_BITS, TOTAL, LOW


def _grown() -> Int8:
    """Value `[256]` (as it lies in memory) and symbol `[4]` → value one bit finer."""
    known = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int16)[:, None]
    symbol = np.arange(4)
    finer = np.where(known == 0, np.array([0, 1, -1, -1]), 2 * known + np.sign(known) * (symbol & 1))
    table: Int8 = finer.astype(np.int8)
    return table.reshape(-1)


_GROWN = _grown()


@compiled()
def _finite(words: Any) -> Any:
    largest = np.uint16(0)
    for i in range(words.shape[0]):
        largest = max(largest, np.uint16(words[i] & np.uint16(0x7FFF)))
    return largest < np.uint16(0x7F80)


@compiled()
def _load(words: Any, out: Any) -> None:
    for i in range(words.shape[0]):
        out[i] = uint32(words[i]) << uint32(16)


@compiled()
def _load_turned(words: Any, cos: Any, sin: Any, raw: Any, out: Any) -> None:
    """`raw` is memory for a token. Elements behind twice the width of the table are not rotated."""
    tokens, heads, width = out.shape
    half = cos.shape[1]
    bits = raw.view(np.uint32)
    for t in range(tokens):
        u = uint64(t)
        for i in range(heads * width):
            bits[i] = uint32(words[u, uint64(i)]) << uint32(16)
        for h in range(heads):
            first = uint64(h * width)
            second = first + uint64(half)
            for i in range(half):
                j = uint64(i)
                a, b = raw[first + j], raw[second + j]
                out[u, uint64(h), j] = a * cos[u, j] - b * sin[u, j]
                out[u, uint64(h), uint64(half) + j] = b * cos[u, j] + a * sin[u, j]
            for i in range(2 * half, width):
                out[u, uint64(h), uint64(i)] = raw[first + uint64(i)]


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
def _seldom(
    v: Any, i: Any, token: Any, before: Any, after: Any, classes: Any, frequencies: Any, escapes: Any, count: Any
) -> Any:
    """The place in `reciprocals` of an index that `codes` does not know; an escape is noted."""
    alphabet = frequencies.shape[1]
    magnitude = abs(v) >> int32(after[i])
    if before[i] == _ABSENT:
        kind = uint32(classes[i, 0])
        middle = alphabet // 2
        value = -magnitude if v < 0 else magnitude
        symbol = uint32(0)
        if magnitude < middle and frequencies[kind, value + middle]:
            symbol = uint32(value + middle)
        if symbol == uint32(0):
            place = uint64(token) * uint64(before.shape[0]) + i
            escapes[count[0]] = place << uint64(8) | uint64(uint8(value))
            count[0] += uint64(1)
    else:
        known = magnitude >> 1
        kind = uint32(classes[i, min(known, 2)])
        symbol = uint32(magnitude & 1) if known else uint32(magnitude != 0) << uint32(v < 0)
    return (kind * uint32(alphabet) + symbol) * uint32(2)


@compiled()
def _encode(
    indices: Any, live: Any, before: Any, after: Any, classes: Any, codes: Any, frequencies: Any, reciprocals: Any,
    words: Any, states: Any, escapes: Any,
) -> Any:  # fmt: skip
    """Fills `words` from its end, and `escapes` (place * 256 + value) in any order. Returns where the words begin, and
    how many escapes there are. A word is written before it is known whether it is needed (see `rans.native`)."""
    rows, n, lanes = indices.shape[0], live.shape[0], states.shape[0]
    at = uint64(words.shape[0])
    count = np.zeros(1, np.uint64)
    for block in range((n + lanes - 1) // lanes - 1, -1, -1):
        first = uint64(block * lanes)
        last = uint64(min(block * lanes + lanes, n))
        for token in range(rows - 1, -1, -1):
            t = uint64(token)
            for behind in range(last, first, -1):
                i = uint64(behind) - uint64(1)
                v = int32(indices[t, live[i]])
                place = uint32(v + _NEAR)
                code = codes[i * uint64(2 * _NEAR) + uint64(place)] if place < uint32(2 * _NEAR) else uint32(_NONE)
                if code == uint32(_NONE):
                    code = _seldom(v, i, token, before, after, classes, frequencies, escapes, count)
                reciprocal, entry = reciprocals[code], reciprocals[code + uint32(1)]
                state = uint64(states[i - first])
                words[at - uint64(1)] = state
                full = uint64(state >> uint64(32 - _BITS) >= entry & uint64(0xFFFF))
                at -= full
                state >>= full << uint64(4)
                quotient = state * reciprocal >> uint64(RECIPROCAL_BITS)
                state += quotient * (entry >> uint64(16) & uint64(0xFFFF)) + (entry >> uint64(32))
                states[i - first] = state
    return at, count[0]


@compiled()
def _decode(
    words: Any, states: Any, live: Any, kinds: Any, bounds: Any, grown: Any, lookup: Any, packed: Any, alphabet: Any,
    escapes: Any, values: Any,
) -> Any:  # fmt: skip
    """`words` has one more than there are for each lane. Fills `escapes` with their places, in any order. Returns how
    many words it read, and the number of escapes, or (more words than there are, any) if there are more of one."""
    rows, n, lanes = values.shape[0], live.shape[0], states.shape[0]
    total, most = uint64(words.shape[0] - lanes), uint64(escapes.shape[0])
    mask, middle = uint32(_TOTAL - 1), int32(alphabet // 2)
    at = count = uint64(0)
    for begin in range(0, n, lanes):
        first = uint64(begin)
        last = uint64(min(begin + lanes, n))
        for token in range(rows):
            t = uint64(token)
            for i in range(first, last):
                state = states[i - first]
                slot = state & mask
                c = live[i]
                kind = kinds[i]
                if kind != uint32(_NONE):
                    symbol = uint32(lookup[kind << uint32(_BITS) | slot])
                    entry = packed[kind * uint32(alphabet) + symbol]
                    frequency, start = entry & uint32(0xFFFF), entry >> uint32(16)
                    values[t, c] = int32(symbol) - middle
                    if symbol == uint32(0):
                        if count >= most:
                            return total + uint64(1), count
                        escapes[count] = t * uint64(n) + i
                        count += uint64(1)
                else:
                    v = int32(values[t, c])
                    bound = bounds[i * uint64(4) + uint64(min(abs(v), int32(2)))]
                    one, two = bound & uint32(0xFFFF), bound >> uint32(16)
                    some, more = slot >= one, slot >= two
                    start = one if some else uint32(0)
                    start = two if more else start
                    end = two if some else one
                    end = uint32(_TOTAL) if more else end
                    frequency = end - start
                    values[t, c] = grown[uint32(uint8(v)) * uint32(4) + uint32(some) + uint32(more)]
                state = frequency * (state >> uint32(_BITS)) + slot - start
                low = uint64(state < uint32(_LOW))
                refilled = state << uint32(16) | uint32(words[at])
                states[i - first] = refilled if low else state
                at += low
            if at > total:
                return total + uint64(1), count
    return at, count


@compiled()
def _fill(places: Any, escapes: Any, live: Any, after: Any, values: Any) -> Any:
    n = uint64(live.shape[0])
    for k in range(places.shape[0]):
        place = places[uint64(k)]
        i = place % n
        value = int32(escapes[uint64(k)])
        if abs(value) > _LARGEST >> int32(after[i]):
            return False
        values[place // n, live[i]] = value
    return True


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
def _store(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        bits = values[i]
        out[i] = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)


@compiled()
def _store_turned(values: Any, cos: Any, sin: Any, turned: Any, out: Any) -> None:
    """`turned` is memory for a token."""
    tokens, heads, width = values.shape
    half = cos.shape[1]
    words = turned.view(np.uint32)
    for t in range(tokens):
        u = uint64(t)
        for h in range(heads):
            first = uint64(h * width)
            second = first + uint64(half)
            for i in range(half):
                j = uint64(i)
                a, b = values[u, uint64(h), j], values[u, uint64(h), uint64(half) + j]
                turned[first + j] = a * cos[u, j] - b * sin[u, j]
                turned[second + j] = b * cos[u, j] + a * sin[u, j]
            for i in range(2 * half, width):
                turned[first + uint64(i)] = values[u, uint64(h), uint64(i)]
        for i in range(heads * width):
            bits = words[i]
            out[u, uint64(i)] = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)


def _here(dtype: str, turn: Rotation | None) -> bool:
    """Whether the loops above are for this."""
    return dtype == "bfloat16" and (turn is None or turn.plain or turn.spec.layout == "neox")


def finite(raw: memoryview, dtype: str) -> bool:
    """See `kvstore.codec.floats.finite`."""
    if dtype != "bfloat16":
        return kvt_reference.finite(raw, dtype)
    return bool(_finite(np.frombuffer(raw, "<u2")))


def load(raw: UInt8, dtype: str, turn: Rotation | None, out: Float32) -> None:
    """See `kvt_reference.load`."""
    if not _here(dtype, turn):
        kvt_reference.load(raw, dtype, turn, out)
    elif turn is None or turn.plain:
        _load(raw.reshape(-1).view("<u2"), out.reshape(-1).view(np.uint32))
    else:
        row = np.empty(out.shape[1] * out.shape[2], np.float32)
        _load_turned(raw.view("<u2"), turn.cos, turn.sin, row, out)


def quantise(z: Float32, offset: Float32, rounding: float, out: Int8) -> npt.NDArray[np.bool_]:
    """See `kvt_reference.quantise`."""
    beyond = np.empty(len(z), np.bool_)
    _quantise(z, offset, np.float32(rounding), out, beyond)
    return beyond


def encode_level(
    indices: Int8, level: Level, distributions: Distributions, lanes: int
) -> tuple[UInt16, UInt32, Int8]:  # fmt: skip
    """See `kvt_reference.encode_level`."""
    rows, n = len(indices), len(level.live)
    words = np.empty(1 + stream_words(rows, n, lanes), np.uint16)
    states = np.full(lanes, LOW, np.uint32)
    noted = np.empty(rows * int(np.count_nonzero(level.before == ABSENT)), np.uint64)
    begin, count = _encode(
        indices, level.live, level.before, level.after, level.classes, level.codes, distributions.frequencies,
        distributions.reciprocals, words, states, noted,
    )  # fmt: skip
    escapes = np.sort(noted[: int(count)]).astype(np.uint8).view(np.int8)
    return words[int(begin) :], states, escapes


def decode_level(
    words: UInt16, states: UInt32, level: Level, distributions: Distributions, lanes: int, escapes: Int8, values: Int8
) -> bool:
    """See `kvt_reference.decode_level`."""
    padded = np.concatenate((words, np.zeros(lanes, np.uint16)))
    places = np.empty(len(escapes), np.uint64)
    read, count = _decode(
        padded, states, level.live, level.kinds, level.bounds, _GROWN, distributions.lookup.reshape(-1),
        distributions.packed.reshape(-1), distributions.symbols, places, values,
    )  # fmt: skip
    if read != len(words) or count != len(escapes) or (states != LOW).any():
        return False
    places.sort()
    return not len(places) or bool(_fill(places, escapes, level.live, level.after, values))


def dequantise(values: Int8, centres: Float32, scale: Float32, offset: Float32, out: Float32) -> None:
    """See `kvt_reference.dequantise`."""
    _dequantise(values, centres[0], centres[1], centres[2], scale, offset, out)


def store(values: Float32, dtype: str, turn: Rotation | None, out: UInt8) -> None:
    """See `kvt_reference.store`."""
    if not _here(dtype, turn):
        kvt_reference.store(values, dtype, turn, out)
    elif turn is None or turn.plain:
        _store(values.reshape(-1).view(np.uint32), out.reshape(-1).view("<u2"))
    else:
        row = np.empty(values.shape[1] * values.shape[2], np.float32)
        _store_turned(values, turn.cos, turn.sin, row, out.view("<u2"))
