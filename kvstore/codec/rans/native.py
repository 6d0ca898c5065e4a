"""The coder as machine code, by numba: one core, no lock of the interpreter held.

Compiled on first use and kept on disk (`kvstore.codec.compiled`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from kvstore.codec.compiled import compiled

from .tables import PROBABILITY_BITS, RECIPROCAL_BITS, Distributions, stream_words

__all__ = ["decode", "encode"]

_BITS = PROBABILITY_BITS


# Numba takes an index that may be negative for one from the end, which costs a third of the time: places are unsigned.


@compiled()
def _encode(
    symbols: Any, classes: Any, per_symbol: bool, alphabet: Any, reciprocals: Any, words: Any, states: Any
) -> Any:  # fmt: skip
    """Fills `words` from its end. Returns where they begin. The first one is never of the stream: a word is written
    before it is known whether it is needed."""
    tokens, channels = symbols.shape
    lanes = states.shape[0]
    at = uint64(words.shape[0])
    rows = (channels + lanes - 1) // lanes
    for row in range(rows - 1, -1, -1):
        first = row * lanes
        here = min(lanes, channels - first)
        for token in range(tokens - 1, -1, -1):
            here_of, there_of = uint64(token), uint64(token if per_symbol else 0)
            for after in range(uint64(first + here), uint64(first), -1):
                channel = uint64(after) - uint64(1)
                symbol = uint64(classes[there_of, channel]) * uint64(alphabet) + uint64(symbols[here_of, channel])
                reciprocal, entry = reciprocals[symbol * uint64(2)], reciprocals[symbol * uint64(2) + uint64(1)]
                state = uint64(states[channel - uint64(first)])
                words[at - uint64(1)] = state
                full = uint64(state >> uint64(32 - _BITS) >= entry & uint64(0xFFFF))
                at -= full
                state >>= full << uint64(4)
                quotient = state * reciprocal >> uint64(RECIPROCAL_BITS)
                state += quotient * (entry >> uint64(16) & uint64(0xFFFF)) + (entry >> uint64(32))
                states[channel - uint64(first)] = state
    return at


@compiled()
def _decode(words: Any, states: Any, classes: Any, per_symbol: bool, lookup: Any, packed: Any, out: Any) -> Any:
    """`words` has one more than there are for each lane: a step's words can be read before their number is checked."""
    tokens, channels = out.shape
    lanes = states.shape[0]
    count = uint64(words.shape[0] - lanes)
    mask = uint32((1 << _BITS) - 1)
    at = uint64(0)
    for first in range(0, channels, lanes):
        here = min(lanes, channels - first)
        for token in range(tokens):
            here_of, there_of = uint64(token), uint64(token if per_symbol else 0)
            for channel in range(uint64(first), uint64(first + here)):
                lane = channel - uint64(first)
                state = states[lane]
                kind = classes[there_of, channel]
                slot = state & mask
                symbol = lookup[kind, slot]
                entry = packed[kind, symbol]
                out[here_of, channel] = symbol
                state = (entry & uint32(0xFFFF)) * (state >> uint32(_BITS)) + slot - (entry >> uint32(16))
                more = state < uint32(1 << 16)
                refilled = (state << uint32(16)) | uint32(words[at])
                states[lane] = refilled if more else state
                at += uint64(more)
            if at > count:
                return count + uint64(1)
    return at


def _rows(classes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return classes if classes.ndim == 2 else classes[None]


def encode(
    symbols: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint16], distributions: Distributions, lanes: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """See `reference.encode`."""
    tokens, channels = symbols.shape
    words = np.empty(1 + stream_words(tokens, channels, lanes), np.uint16)
    states = np.full(lanes, 1 << 16, np.uint32)
    tables = distributions.symbols, distributions.reciprocals
    begin = int(_encode(symbols, _rows(classes), classes.ndim == 2, *tables, words, states))
    return words[begin:], states


def decode(
    words: npt.NDArray[np.uint16],
    states: npt.NDArray[np.uint32],
    classes: npt.NDArray[np.uint16],
    distributions: Distributions,
    out: npt.NDArray[np.uint8],
    lanes: int,
) -> int:
    """See `reference.decode`."""
    padded = np.concatenate((words, np.zeros(lanes, np.uint16)))
    tables = distributions.lookup, distributions.packed
    return int(_decode(padded, states, _rows(classes), classes.ndim == 2, *tables, out))
