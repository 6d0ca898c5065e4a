"""The coder in plain numpy: one step per token and row, all lanes side by side. What the others are tested against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .tables import PROBABILITY_BITS, Distributions

__all__ = ["decode", "encode"]

_LOW = np.uint32(1 << 16)
_MASK = np.uint32((1 << PROBABILITY_BITS) - 1)


def encode(
    symbols: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint16], distributions: Distributions, lanes: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """(words, states) of a stream. Takes what the decoder will do, backwards."""
    tokens, channels = symbols.shape
    frequencies = distributions.frequencies.astype(np.uint64)
    starts = distributions.starts.astype(np.uint64)
    states = np.full(lanes, _LOW, np.uint64)
    backwards: list[npt.NDArray[np.uint16]] = []
    for first in reversed(range(0, channels, lanes)):
        row = slice(first, min(first + lanes, channels))
        here = states[: row.stop - row.start]
        for token in reversed(range(tokens)):
            of = classes[row] if classes.ndim == 1 else classes[token, row]
            frequency = frequencies[of, symbols[token, row]]
            full = here >= frequency << np.uint64(32 - PROBABILITY_BITS)
            backwards.append((here[full] & np.uint64(0xFFFF)).astype(np.uint16)[::-1])
            here[full] >>= np.uint64(16)
            quotient, rest = np.divmod(here, frequency)
            here[:] = (quotient << np.uint64(PROBABILITY_BITS)) + rest + starts[of, symbols[token, row]]
    words = np.concatenate(backwards)[::-1] if backwards else np.empty(0, np.uint16)
    return words, states.astype(np.uint32)


def decode(
    words: npt.NDArray[np.uint16],
    states: npt.NDArray[np.uint32],
    classes: npt.NDArray[np.uint16],
    distributions: Distributions,
    out: npt.NDArray[np.uint8],
    lanes: int,
) -> int:
    """Fill `out`; leaves the last states in `states`. Returns how many words it read, more than there are if they did
    not suffice."""
    tokens, channels = out.shape
    lookup, packed = distributions.lookup, distributions.packed
    padded = np.append(words, np.zeros(lanes, np.uint16)).astype(np.uint32)
    read = 0
    for first in range(0, channels, lanes):
        row = slice(first, min(first + lanes, channels))
        here = states[: row.stop - row.start]
        for token in range(tokens):
            of = classes[row] if classes.ndim == 1 else classes[token, row]
            slot = here & _MASK
            symbol = lookup[of, slot]
            out[token, row] = symbol
            entry = packed[of, symbol]
            here[:] = (
                (entry & np.uint32(0xFFFF)) * (here >> np.uint32(PROBABILITY_BITS)) + slot - (entry >> np.uint32(16))
            )
            low = np.flatnonzero(here < _LOW)
            if read + len(low) > len(words):
                return len(words) + 1
            here[low] = here[low] << np.uint32(16) | padded[read : read + len(low)]
            read += len(low)
    return read
