"""8-bit floats (e4m3) with a scale per token and head."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import CorruptRecord

from .scaled import ScaledCodec

__all__ = ["Fp8Codec"]


def _table() -> npt.NDArray[np.float32]:
    """The value of each e4m3 code (OCP OFP8, as torch.float8_e4m3fn): 0x7F and 0xFF are nan, there is no infinity."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[(code & 0x7F) == 0x7F] = np.nan
    values: npt.NDArray[np.float32] = np.where(code & 0x80, -value, value).astype(np.float32)
    return values


_VALUES = _table()


class Fp8Codec(ScaledCodec):
    """Codes of e4m3fn; an element is off by 1/16 of itself at most, or by 2^-10 of its vector's scale.

    Of use where small elements of a vector matter as much as large ones; elsewhere int8 is closer at the same size.
    Format: `kvstore.codec.scaled`.
    """

    name = "fp8"
    number: ClassVar[int] = 4
    most = 448.0

    def _quantise(
        self,
        values: npt.NDArray[np.float32],
        divisors: npt.NDArray[np.float32],
        codes: npt.NDArray[Any],
        using: ModuleType | None,
    ) -> None:
        ratios = np.empty_like(values)
        if using is not None:
            using.divide(values, divisors, ratios)
            flat = ratios.reshape(-1)
            using.to_e4m3(flat, flat.view(np.uint32), codes.reshape(-1))
            return
        np.divide(values, divisors[:, None], out=ratios)
        bits = ratios.view(np.uint32)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = np.rint(np.abs(ratios) * np.float32(512)).astype(np.uint32)
        code = np.where(magnitude >= 0x3C800000, normal, small) | ((bits >> 24) & 0x80)
        np.copyto(codes, code, casting="unsafe")

    def _restore(
        self,
        codes: npt.NDArray[Any],
        scales: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
        using: ModuleType | None,
    ) -> None:
        if using is not None:
            if int(using.from_e4m3(codes, scales, out.view(np.uint32), out)) == 0x7F:
                raise CorruptRecord("an fp8 segment holds a code that is not a number")
            return
        np.multiply(_VALUES[codes], scales[:, None], out=out)
        if ((codes & 0x7F) == 0x7F).any():
            raise CorruptRecord("an fp8 segment holds a code that is not a number")
