"""Encode and decode by the fastest coder there is on this machine's CPU."""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord

from . import reference
from .tables import LOW, Distributions, stream_words

__all__ = ["coder", "decode", "encode", "lanes_for", "stream_bound"]

_SYMBOLS_PER_LANE = 512  # below, several channels share a lane
_FEWEST_LANES = 8  # enough for a core's pipelines


def lanes_for(tokens: int, channels: int) -> int:
    """How many lanes a stream of `[tokens, channels]` has. Part of the format.

    The channels go into as few rows as give each lane at least 512 symbols, but no fewer than 8 lanes are left.
    """
    if tokens <= 0 or channels <= 0:
        return 0
    rows = min(-(-_SYMBOLS_PER_LANE // tokens), -(-channels // _FEWEST_LANES))
    return -(-channels // rows)


def stream_bound(tokens: int, channels: int) -> int:
    """No stream of `[tokens, channels]` is longer; bytes."""
    lanes = lanes_for(tokens, channels)
    return 4 * lanes + 2 * stream_words(tokens, channels, lanes)


@functools.cache
def coder() -> ModuleType:
    """`native` if numba is installed (`pip install 'kvstore[codec]'`), else `reference`."""
    try:
        from . import native
    except ImportError:
        return reference
    return native


def encode(
    symbols: npt.NDArray[np.uint8],
    contexts: npt.NDArray[np.integer],
    distributions: Distributions,
    *,
    using: ModuleType | None = None,
) -> bytes:
    """The stream for a matrix of symbols; see the package's docstring for its format.

    Args:
        symbols: uint8 `[tokens, channels]`.
        contexts: class of each channel, `[channels]`, or of each symbol, `[tokens, channels]`.
        using: one of the coders; None takes the fastest.

    Raises:
        ConfigError: a shape is wrong, or a symbol has frequency 0 in its class.
    """
    if symbols.ndim != 2 or symbols.dtype != np.uint8:
        raise ConfigError(f"symbols are uint8 [tokens, channels], not {symbols.dtype} {list(symbols.shape)}")
    tokens, channels = symbols.shape
    classes = distributions.check(contexts, tokens, channels)
    if symbols.size and int(symbols.max()) >= distributions.symbols:
        raise ConfigError(f"a symbol is beyond the {distributions.symbols} that can be coded")
    if not symbols.size:
        return b""
    if (distributions.frequencies == 0).any() and (distributions.frequencies[classes, symbols] == 0).any():
        raise ConfigError("a symbol has frequency 0 in its class, and cannot be coded")
    words, states = (using or coder()).encode(
        np.ascontiguousarray(symbols), classes, distributions, lanes_for(tokens, channels)
    )
    stream: bytes = states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
    return stream


def decode(
    stream: bytes | memoryview,
    out: npt.NDArray[np.uint8],
    contexts: npt.NDArray[np.integer],
    distributions: Distributions,
    *,
    using: ModuleType | None = None,
) -> None:
    """Decode a stream into `out`, uint8 `[tokens, channels]`, C-contiguous.

    Args:
        contexts: as they were given to `encode`.

    Raises:
        CorruptRecord: this is no such stream. `out` is then undefined.
        ConfigError: a shape is wrong.
    """
    if out.ndim != 2 or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ConfigError(f"the output must be contiguous uint8 [tokens, channels], not {out.dtype} {list(out.shape)}")
    tokens, channels = out.shape
    classes = distributions.check(contexts, tokens, channels)
    lanes = lanes_for(tokens, channels)
    nbytes = len(stream)
    if nbytes < 4 * lanes or nbytes % 2 or nbytes > stream_bound(tokens, channels):
        raise CorruptRecord(f"an entropy-coded stream of {tokens} x {channels} symbols cannot have {nbytes} bytes")
    if not lanes:
        return
    states = np.frombuffer(stream, "<u4", lanes).astype(np.uint32)
    words = np.frombuffer(stream, "<u2", offset=4 * lanes)
    if (states < LOW).any():
        raise CorruptRecord("an entropy-coded stream begins with a state that no encoder leaves")
    read = (using or coder()).decode(words, states, classes, distributions, out, lanes)
    if read != len(words) or (states != LOW).any():
        raise CorruptRecord("an entropy-coded stream does not end where it should")
