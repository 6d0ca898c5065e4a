"""Static distributions, as integers that sum to 2^12, and the tables that coders look symbols up in."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError

__all__ = ["PROBABILITY_BITS", "Distributions", "stream_words"]

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
LOW = 1 << 16  # states stay at or above it
RECIPROCAL_BITS = 44
MAX_SYMBOLS = 256
MAX_CLASSES = 1 << 14  # a table of 16 KiB each

Counts = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def stream_words(tokens: int, channels: int, lanes: int) -> int:
    """No stream has more words of 16 bits: a symbol takes at most 12 bits, and rounding a state a tenth of one."""
    return -(-(PROBABILITY_BITS + 1) * tokens * channels // 16) + lanes


class Distributions:
    """A set of distributions ("classes") over the symbols 0 … symbols - 1. Immutable; safe for use from any thread.

    Args:
        frequencies: uint `[classes, symbols]`; each row sums to 2^12. A symbol of frequency 0 cannot be coded.

    Attributes:
        classes, symbols: how many of each.
        frequencies: uint16 `[classes, symbols]`, read-only; 4096 is the largest.

    Raises:
        ConfigError: the shape or the sums are wrong.
    """

    def __init__(self, frequencies: npt.ArrayLike) -> None:
        given = np.asarray(frequencies)
        if given.ndim != 2 or not 1 <= given.shape[0] <= MAX_CLASSES or not 1 <= given.shape[1] <= MAX_SYMBOLS:
            raise ConfigError(
                f"distributions need the shape [1 to {MAX_CLASSES} classes, 1 to {MAX_SYMBOLS} symbols], "
                f"not {list(given.shape)}"
            )
        if given.dtype.kind not in "iu":
            raise ConfigError(f"frequencies are integers, not {given.dtype}")
        wide = given.astype(np.int64)
        if (wide < 0).any() or (wide > TOTAL).any() or (wide.sum(1) != TOTAL).any():
            raise ConfigError(f"the frequencies of each class must sum to {TOTAL}")
        self.frequencies: npt.NDArray[np.uint16] = wide.astype(np.uint16)
        self.frequencies.flags.writeable = False
        self.classes, self.symbols = self.frequencies.shape

    @classmethod
    def from_counts(cls, counts: Counts) -> Distributions:
        """The nearest distributions in which every symbol can be coded.

        Args:
            counts: `[classes, symbols]`, not negative; weights or probabilities do as well.

        Raises:
            ConfigError: as the constructor; a count is negative or no finite number.
        """
        weights = np.asarray(counts, np.float64)
        if weights.ndim != 2 or not np.isfinite(weights).all() or (weights < 0).any():
            raise ConfigError("counts must be finite and not negative, and have the shape [classes, symbols]")
        symbols = weights.shape[1]
        if not 1 <= symbols <= MAX_SYMBOLS:
            raise ConfigError(f"1 to {MAX_SYMBOLS} symbols can be coded, not {symbols}")
        sums = weights.sum(1, keepdims=True)
        shares = np.where(sums > 0, weights / np.where(sums > 0, sums, 1), 1 / symbols)
        # Each symbol gets at least 1; the rest is shared out by largest remainders, which costs the fewest bits.
        exact = shares * (TOTAL - symbols)
        frequencies = np.floor(exact).astype(np.int64)
        missing = TOTAL - symbols - frequencies.sum(1)
        rank = np.argsort(np.argsort(frequencies - exact, axis=1, kind="stable"), axis=1, kind="stable")
        frequencies += 1 + (rank < missing[:, None])
        return cls(frequencies)

    @cached_property
    def bits(self) -> npt.NDArray[np.float32]:
        """float32 `[classes, symbols]`: what a symbol costs, in bits; infinity if it cannot be coded."""
        with np.errstate(divide="ignore"):
            return (PROBABILITY_BITS - np.log2(self.frequencies)).astype(np.float32)

    @cached_property
    def starts(self) -> npt.NDArray[np.uint16]:
        """uint16 `[classes, symbols]`: sum of the frequencies before each symbol."""
        return (np.cumsum(self.frequencies, axis=1, dtype=np.int64) - self.frequencies).astype(np.uint16)

    @cached_property
    def lookup(self) -> npt.NDArray[np.uint8]:
        """uint8 `[classes, 4096]`, for decoders: the symbol whose share of the states ends in these 12 bits. With what
        else they need in `packed`, a class takes 4 KiB of the cache instead of 16 (1.3 to 3 times as fast)."""
        table = np.empty((self.classes, TOTAL), np.uint8)
        symbols = np.arange(self.symbols, dtype=np.uint8)
        for row, frequencies in zip(table, self.frequencies, strict=True):
            row[:] = np.repeat(symbols, frequencies)
        return table

    @cached_property
    def packed(self) -> npt.NDArray[np.uint32]:
        """uint32 `[classes, symbols]`: frequency (bits 0-15) and start (16-31)."""
        return self.frequencies.astype(np.uint32) | self.starts.astype(np.uint32) << np.uint32(16)

    @cached_property
    def reciprocals(self) -> npt.NDArray[np.uint64]:
        """uint64 `[classes * symbols * 2]`, for encoders: of each symbol ⌈2^44 / frequency⌉, and frequency (bits 0-15),
        4096 - frequency (16-31) and start (32-47).

        A state below frequency * 2^20, times the first, fits 64 bits, and its bits from 44 on are state // frequency,
        exactly: what the rounding adds is less than 1 / frequency, since frequency^2 is at most 2^24.
        """
        wide = self.frequencies.astype(np.uint64).reshape(-1)
        some = np.maximum(wide, 1)
        table = np.empty((len(wide), 2), np.uint64)
        table[:, 0] = ((np.uint64(1) << np.uint64(RECIPROCAL_BITS)) + some - 1) // some
        table[:, 1] = (
            wide | (TOTAL - wide) << np.uint64(16) | self.starts.astype(np.uint64).reshape(-1) << np.uint64(32)
        )
        return table.reshape(-1)

    def check(self, contexts: npt.NDArray[np.integer], tokens: int, channels: int) -> npt.NDArray[np.uint16]:
        """The contexts as coders take them: uint16 `[channels]`, or `[tokens, channels]`.

        Raises:
            ConfigError: the shape is another, or a class is not known.
        """
        if contexts.shape not in ((channels,), (tokens, channels)):
            raise ConfigError(
                f"contexts have the shape {list(contexts.shape)}, not [{channels}] or [{tokens}, {channels}]"
            )
        if contexts.size and (int(contexts.max()) >= self.classes or int(contexts.min()) < 0):
            raise ConfigError(f"contexts name a class beyond the {self.classes} there are")
        return np.ascontiguousarray(contexts, np.uint16)
