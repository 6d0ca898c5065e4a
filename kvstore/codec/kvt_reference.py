"""The loops of the kvt codec in plain numpy: what `kvt_native` is tested against, and what runs without numba.

Shapes: `rows` is the number of coded tokens, `channels` all values of a token (K of all heads, then V), `live` those
channels that a level says something of. A channel's `before` and `after` are its shifts before and after the level; a
shift of `ABSENT` means that nothing is known of the channel yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .floats import finite, from_float32, to_float32
from .rans import reference as rans
from .rans.tables import LOW

if TYPE_CHECKING:
    from kvstore.rope import Rotation

    from .kvt_tables import Level
    from .rans import Distributions

__all__ = [
    "ABSENT", "LARGEST", "contexts", "decode_level", "dequantise", "encode_level", "finite", "load", "merge",
    "quantise", "split", "store",
]  # fmt: skip

ABSENT = 255
"""The shift of a channel that no level has said anything of."""

LARGEST = 127
"""Of the magnitude of an index at shift 0."""

Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]


def load(raw: UInt8, dtype: str, turn: Rotation | None, out: Float32) -> None:
    """Elements of heads as float32, rotated by `turn`.

    Args:
        raw: uint8 `[tokens, bytes]`, C-contiguous: the elements of `dtype`.
        out: float32 `[tokens, heads, width]`, C-contiguous.
    """
    values = to_float32(raw, dtype).reshape(out.shape)
    if turn is None:
        out[:] = values
    else:
        turn(values, out=out)


def quantise(z: Float32, offset: Float32, rounding: float, out: Int8) -> npt.NDArray[np.bool_]:
    """Indices of transformed values: sign(y) * floor(|y| + rounding) of y = z - offset, in fp32.

    Args:
        z: float32 `[tokens, channels]`, in steps.
        offset: float32 `[channels]`, in steps.
        out: int8 of the same shape; magnitudes are cut to `LARGEST`.

    Returns:
        bool `[tokens]`: tokens of which a magnitude was cut (or was no number).
    """
    moved = z - offset
    magnitude = np.abs(moved)
    magnitude += np.float32(rounding)
    np.floor(magnitude, out=magnitude)
    fits = magnitude <= LARGEST
    magnitude[~fits] = LARGEST
    out[:] = np.where(moved < 0, -magnitude, magnitude).astype(np.int8)
    beyond: npt.NDArray[np.bool_] = ~fits.all(1)
    return beyond


def contexts(values: Int8, live: UInt16, before: UInt8, classes: UInt16, out: UInt16) -> None:
    """The class by which each symbol of a level is coded.

    Args:
        values: int8 `[rows, channels]`: what is known, each at its channel's shift before the level.
        live: uint16 `[n]`, the channels.
        before: uint8 `[n]`.
        classes: uint16 `[n, 3]`: for a known magnitude of 0, 1, and 2 or more; the first for a channel that is new.
        out: uint16 `[rows, n]`.
    """
    known = np.minimum(np.abs(values[:, live]), 2)
    known[:, before == ABSENT] = 0
    out[:] = classes[np.arange(len(live)), known]


def split(
    indices: Int8, live: UInt16, before: UInt8, after: UInt8, classes: UInt16, codable: UInt8, kinds: UInt16,
    out: UInt8,
) -> Int8:  # fmt: skip
    """The symbols of a level, and their classes.

    Args:
        indices: int8 `[rows, channels]`, at shift 0.
        live, before, classes: as in `contexts`.
        after: uint8 `[n]`.
        codable: uint8 `[all classes, alphabet]`: 1 where a class has a symbol.
        kinds: uint16 `[rows, n]`, filled with the classes.
        out: uint8 `[rows, n]`, filled with the symbols.

    Returns:
        int8 `[escapes]`: the values that have no symbol, in the order of the matrix.
    """
    of = indices[:, live].astype(np.int16)
    magnitude = np.abs(of)
    fresh = before == ABSENT
    here = magnitude >> after
    known = np.where(fresh, 0, magnitude >> np.where(fresh, 0, before))
    kinds[:] = classes[np.arange(len(live)), np.minimum(known, 2)]
    middle = codable.shape[1] // 2
    value = np.where(of < 0, -here, here)
    symbol = value + middle
    codes = (np.abs(value) < middle) & (codable[kinds, np.clip(symbol, 0, codable.shape[1] - 1)] > 0)
    symbol = np.where(codes, symbol, 0)
    grown = np.where(known > 0, here & 1, np.where(here == 0, 0, np.where(of > 0, 1, 2)))
    out[:] = np.where(fresh, symbol, grown)
    escapes: Int8 = value[fresh & ~codes].astype(np.int8)
    return escapes


def merge(
    symbols: UInt8, live: UInt16, before: UInt8, after: UInt8, alphabet: int, escapes: Int8, values: Int8
) -> bool:
    """Undo `split`: bring `values` from the shifts before a level to those after it.

    Args:
        symbols: uint8 `[rows, n]`.
        alphabet: how many symbols a class may have.
        escapes: int8, as `split` gave them.
        values: int8 `[rows, channels]`, changed in place.

    Returns:
        False if the escapes are not as many as the symbols say, or one of them is too large.
    """
    fresh = before == ABSENT
    known = values[:, live].astype(np.int16)
    direct = symbols.astype(np.int16) - alphabet // 2
    marked = (symbols == 0) & fresh
    if int(marked.sum()) != len(escapes):
        return False
    direct[marked] = escapes
    limits = np.broadcast_to(LARGEST >> np.where(fresh, after, 0), marked.shape)[marked]
    if (np.abs(escapes.astype(np.int16)) > limits).any():
        return False
    born = np.array([0, 1, -1], np.int16)[np.minimum(symbols, 2)]
    grown = np.sign(known) * (2 * np.abs(known) + (symbols & 1))
    values[:, live] = np.where(fresh, direct, np.where(known == 0, born, grown)).astype(np.int8)
    return True


def dequantise(values: Int8, centres: Float32, scale: Float32, offset: Float32, out: Float32) -> None:
    """What values stand for, plus `offset`: the sign times the centre of the magnitude; from 4 on, scale * (magnitude -
    3) beyond the centre of 3.

    Args:
        values: int8 `[rows, channels]`.
        centres: float32 `[3, channels]`, of the magnitudes 1, 2, 3; 0 stands for 0.
        scale, offset: float32 `[channels]`.
        out: float32 `[rows, channels]`.
    """
    magnitude = np.abs(values.astype(np.int16))
    out[:] = (magnitude - 3).astype(np.float32) * scale
    out += centres[2]
    for known in (1, 2):
        np.copyto(out, centres[known - 1], where=magnitude == known)
    np.negative(out, where=values < 0, out=out)
    out[values == 0] = 0
    out += offset


def store(values: Float32, dtype: str, turn: Rotation | None, out: UInt8) -> None:
    """Write values, which stay finite in `dtype`, as its elements (`kvstore.codec.floats.from_float32`), rotated by
    `turn`.

    Args:
        values: float32 `[tokens, heads, width]`, C-contiguous; undefined afterwards.
        out: uint8 `[tokens, bytes]`, C-contiguous, of the elements' bytes.
    """
    if turn is not None:
        turn(values, out=values)
    from_float32(values, dtype, out)


def encode_level(
    indices: Int8, level: Level, distributions: Distributions, lanes: int
) -> tuple[UInt16, UInt32, Int8]:  # fmt: skip
    """A level of a segment: (words, first states) of the entropy coder, and the escapes.

    Args:
        indices: int8 `[rows, channels]`, at shift 0; at least one row.
        level: says something of at least one channel.
    """
    shape = len(indices), len(level.live)
    symbols, kinds = np.empty(shape, np.uint8), np.empty(shape, np.uint16)
    codable = (distributions.frequencies > 0).astype(np.uint8)
    escapes = split(indices, level.live, level.before, level.after, level.classes, codable, kinds, symbols)
    words, states = rans.encode(symbols, kinds, distributions, lanes)
    return words, states, escapes


def decode_level(
    words: UInt16, states: UInt32, level: Level, distributions: Distributions, lanes: int, escapes: Int8, values: Int8
) -> bool:
    """Undo `encode_level`: bring `values`, int8 `[rows, channels]`, to what is known after the level.

    Args:
        states: the first ones; the last ones are left in it.

    Returns:
        False if the stream does not end where it should, or its escapes are not these. `values` is then undefined, but
        no value is beyond `LARGEST`.
    """
    shape = len(values), len(level.live)
    symbols, kinds = np.empty(shape, np.uint8), np.empty(shape, np.uint16)
    contexts(values, level.live, level.before, level.classes, kinds)
    read = rans.decode(words, states, kinds, distributions, symbols, lanes)
    if read != len(words) or (states != LOW).any():
        return False
    return merge(symbols, level.live, level.before, level.after, distributions.symbols, escapes, values)
