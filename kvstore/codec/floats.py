"""Elements of a KV cache as float32 and back, by bit operations: numpy has neither bfloat16 nor 8-bit floats."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import DTYPES, canonical_dtype

__all__ = ["FLOATS", "finite", "from_float32", "to_float32"]

Float32: TypeAlias = npt.NDArray[np.float32]

FLOATS = ("bfloat16", "float16", "float32")
"""The dtypes that lossy codecs quantise; the others have 8 bits already."""


def _words(raw: memoryview | npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The bit patterns of the elements, unsigned integers, not copied."""
    if dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    flat = np.frombuffer(raw, np.uint8) if isinstance(raw, memoryview) else raw.view(np.uint8).reshape(-1)
    if flat.nbytes % DTYPES[dtype]:
        raise ConfigError(f"{flat.nbytes} bytes are not a whole number of {dtype} elements")
    return flat.view(f"<u{DTYPES[dtype]}")


def to_float32(raw: memoryview | npt.NDArray[Any], dtype: str) -> Float32:
    """The elements of a segment as float32, exactly; nan stays nan.

    Args:
        raw: flat bytes (not necessarily aligned), or a contiguous array of the elements' bytes.
        dtype: "bfloat16", "float16" or "float32".

    Returns:
        float32 `[elements]`: new memory, except for float32, where it may be a view of `raw` (do not write to it).

    Raises:
        ConfigError: another dtype, or not a whole number of elements.
    """
    words = _words(raw, canonical_dtype(dtype))
    if dtype == "bfloat16":
        wide = words.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    if dtype == "float16":
        return words.view("<f2").astype(np.float32)
    return words.view("<f4").astype(np.float32, copy=not words.flags.aligned)


def from_float32(values: npt.NDArray[np.float32], dtype: str, out: memoryview | npt.NDArray[Any]) -> None:
    """Write float32 values as elements of `dtype`, rounded to nearest, ties to even. nan stays nan; what is too large
    for float16 or bfloat16 becomes inf.

    Args:
        values: float32, any shape; read in C order.
        dtype: "bfloat16", "float16" or "float32".
        out: writable bytes for exactly as many elements; a memoryview need not be aligned.

    Raises:
        ConfigError: another dtype, or another number of elements.
    """
    dtype = canonical_dtype(dtype)
    words = _words(out, dtype)
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if len(words) != len(flat):
        raise ConfigError(f"{len(flat)} values do not fit the {len(words)} elements of the destination")
    if dtype == "float32":
        words.view("<f4")[:] = flat
    elif dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(words.view("<f2"), flat, casting="same_kind")
    else:
        bits = flat.view(np.uint32)
        # Adding 0x7FFF, and one more where the kept part is odd, carries into it where it must be rounded up.
        odd = bits >> 16
        odd &= 1
        odd += 0x7FFF
        odd += bits
        np.right_shift(odd, 16, out=words, casting="unsafe")
        nan = np.isnan(flat)
        if nan.any():  # the carry may have made inf or 0 of it
            words[nan] = (bits[nan] >> 16) | 0x40


def finite(raw: memoryview | npt.NDArray[Any], dtype: str) -> bool:
    """False if an element is inf or nan. Looks at the bits; cheaper than converting.

    Raises:
        ConfigError: as `to_float32`.
    """
    dtype = canonical_dtype(dtype)
    words = _words(raw, dtype)
    if not len(words):
        return True
    exponent = _EXPONENTS[dtype]
    # The largest magnitude has all exponent bits set just if some element has.
    shifted = np.left_shift(words, 1)  # drops the sign
    return int(shifted.max()) < exponent


_EXPONENTS = {"bfloat16": 0xFF00, "float16": 0xF800, "float32": 0xFF000000}
