"""The loops of the codecs with scales as machine code, by numba: one core, no lock of the interpreter held.

`scaled` has the same in numpy; a test holds both equal. Inputs are read-only arrays, so that each loop is compiled
once. Where `values` and `bits` are given, they are the same memory, as float32 and as uint32. Loops are cut so that
each one vectorises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint8, uint16, uint32

from .compiled import compiled

__all__ = [
    "divide",
    "from_e4m3",
    "from_half",
    "largest",
    "narrow",
    "quantise",
    "scale",
    "to_e4m3",
    "to_half",
    "widen",
]


@compiled()
def largest(words: Any, mask: Any, out: Any) -> None:
    """The largest magnitude of each row, as bits: those of floats are ordered like the floats. words `[rows, width]`,
    `mask`: all bits but the sign."""
    for row in range(words.shape[0]):
        most = words[row, 0] & mask
        for column in range(words.shape[1]):
            most = max(most, words[row, column] & mask)
        out[row] = most


@compiled()
def widen(words: Any, bits: Any) -> None:
    """bfloat16 as the bits of float32."""
    for index in range(words.shape[0]):
        bits[index] = uint32(words[index]) << uint32(16)


@compiled()
def narrow(bits: Any, words: Any) -> None:
    """float32 as bits, to bfloat16, ties to even. There is no nan among them."""
    for index in range(bits.shape[0]):
        value = bits[index]
        words[index] = uint16((value + uint32(0x7FFF) + ((value >> uint32(16)) & uint32(1))) >> uint32(16))


@compiled(error_model="numpy")
def quantise(values: Any, divisors: Any, codes: Any) -> None:
    """values float32 `[rows, width]` / divisors `[rows]`, rounded to int8, ties to even."""
    for row in range(values.shape[0]):
        divisor = divisors[row]
        for column in range(values.shape[1]):
            codes[row, column] = np.int8(np.int32(np.rint(values[row, column] / divisor)))


@compiled(error_model="numpy")
def divide(values: Any, divisors: Any, out: Any) -> None:
    """values float32 `[rows, width]` / divisors `[rows]`."""
    for row in range(values.shape[0]):
        divisor = divisors[row]
        for column in range(values.shape[1]):
            out[row, column] = values[row, column] / divisor


@compiled()
def to_e4m3(values: Any, bits: Any, codes: Any) -> None:
    """float32 of magnitudes up to 448 as e4m3, ties to even. `bits`: the same memory as uint32."""
    for index in range(bits.shape[0]):
        word = bits[index]
        magnitude = word & uint32(0x7FFFFFFF)
        normal = (magnitude + uint32(0x7FFFF) + ((magnitude >> uint32(20)) & uint32(1))) >> uint32(20)
        small = uint32(np.int32(np.rint(abs(values[index]) * np.float32(512))))
        code = normal - uint32(120 << 3) if magnitude >= uint32(0x3C800000) else small
        codes[index] = uint8(code | ((word >> uint32(24)) & uint32(0x80)))


@compiled()
def from_e4m3(codes: Any, scales: Any, bits: Any, values: Any) -> Any:
    """e4m3 `[rows, width]` times scales `[rows]`, float32. Returns the largest magnitude of a code."""
    most = uint8(0)
    for row in range(codes.shape[0]):
        factor = scales[row]
        for column in range(codes.shape[1]):
            magnitude = codes[row, column] & uint8(0x7F)
            most = max(most, magnitude)
            bits[row, column] = (uint32(magnitude) << uint32(20)) + uint32(120 << 23)
        for column in range(codes.shape[1]):
            magnitude = codes[row, column] & uint8(0x7F)
            small = np.float32(magnitude) * np.float32(2**-9)
            value = values[row, column] if magnitude >= 8 else small
            values[row, column] = (-value if codes[row, column] & uint8(0x80) else value) * factor
    return most


@compiled()
def from_half(words: Any, bits: Any, values: Any) -> None:
    """float16 as float32. There is no inf or nan among them."""
    for index in range(words.shape[0]):
        bits[index] = (uint32(words[index] & uint16(0x7FFF)) << uint32(13)) + uint32(112 << 23)
    for index in range(words.shape[0]):
        magnitude = words[index] & uint16(0x7FFF)
        small = np.float32(magnitude) * np.float32(2**-24)
        value = values[index] if magnitude >= 0x400 else small
        values[index] = -value if words[index] & uint16(0x8000) else value


@compiled()
def to_half(values: Any, bits: Any, words: Any) -> None:
    """float32 to float16, ties to even. There is none beyond 65504 in magnitude."""
    for index in range(bits.shape[0]):
        word = bits[index]
        magnitude = word & uint32(0x7FFFFFFF)
        normal = (magnitude + uint32(0xFFF) + ((magnitude >> uint32(13)) & uint32(1))) >> uint32(13)
        small = uint32(np.int32(np.rint(min(abs(values[index]), np.float32(1)) * np.float32(2**24))))
        code = normal - uint32(112 << 10) if magnitude >= uint32(0x38800000) else small
        words[index] = uint16(code | ((word >> uint32(16)) & uint32(0x8000)))


@compiled()
def scale(codes: Any, scales: Any, out: Any) -> None:
    """int8 `[rows, width]` times scales `[rows]`, float32."""
    for row in range(codes.shape[0]):
        factor = scales[row]
        for column in range(codes.shape[1]):
            out[row, column] = np.float32(codes[row, column]) * factor
