"""The coder as machine code, by numba: one core, no lock of the interpreter held.

Compiled on first use and kept in numba's cache (NUMBA_CACHE_DIR says where, if the package's folder is read-only).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, uint32, uint64

from .tables import PROBABILITY_BITS, Distributions, stream_words

__all__ = ["decode", "encode"]

_BITS = PROBABILITY_BITS


@njit(cache=True, nogil=True)
def _encode(
    symbols: Any, classes: Any, per_symbol: bool, frequencies: Any, starts: Any, words: Any, states: Any
) -> Any:
    """Fills `words` from its end. Returns where they begin."""
    tokens, channels = symbols.shape
    lanes = states.shape[0]
    at = words.shape[0]
    rows = (channels + lanes - 1) // lanes
    for row in range(rows - 1, -1, -1):
        first = row * lanes
        here = min(lanes, channels - first)
        for token in range(tokens - 1, -1, -1):
            source = token if per_symbol else 0
            for lane in range(here - 1, -1, -1):
                kind = classes[source, first + lane]
                symbol = symbols[token, first + lane]
                frequency = uint32(frequencies[kind, symbol])
                state = states[lane]
                if uint64(state) >= uint64(frequency) << uint64(32 - _BITS):
                    at -= 1
                    words[at] = state & uint32(0xFFFF)
                    state = state >> uint32(16)
                quotient = state // frequency
                rest = state - quotient * frequency
                states[lane] = (quotient << uint32(_BITS)) + rest + uint32(starts[kind, symbol])
    return at


@njit(cache=True, nogil=True)
def _decode(words: Any, states: Any, classes: Any, per_symbol: bool, lookup: Any, packed: Any, out: Any) -> Any:
    """`words` has one more than there are for each lane: a step's words can be read before their number is checked."""
    tokens, channels = out.shape
    lanes = states.shape[0]
    count = words.shape[0] - lanes
    mask = uint32((1 << _BITS) - 1)
    at = 0
    for first in range(0, channels, lanes):
        here = min(lanes, channels - first)
        for token in range(tokens):
            kinds = classes[token if per_symbol else 0]
            row = out[token]
            for lane in range(here):
                state = states[lane]
                kind = kinds[first + lane]
                slot = state & mask
                symbol = lookup[kind, slot]
                entry = packed[kind, symbol]
                row[first + lane] = symbol
                state = (entry & uint32(0xFFFF)) * (state >> uint32(_BITS)) + slot - (entry >> uint32(16))
                more = state < uint32(1 << 16)
                refilled = (state << uint32(16)) | uint32(words[at])
                states[lane] = refilled if more else state
                at += more
            if at > count:
                return count + 1
    return at


def _rows(classes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return classes if classes.ndim == 2 else classes[None]


def encode(
    symbols: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint16], distributions: Distributions, lanes: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """See `reference.encode`."""
    tokens, channels = symbols.shape
    words = np.empty(stream_words(tokens, channels, lanes), np.uint16)
    states = np.full(lanes, 1 << 16, np.uint32)
    begin = _encode(
        symbols,
        _rows(classes),
        classes.ndim == 2,
        distributions.frequencies,
        distributions.starts,
        words,
        states,
    )
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
