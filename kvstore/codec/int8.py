"""int8 with a scale per token and head: the simplest lossy codec, and what others are compared with."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import CorruptRecord

from .scaled import ScaledCodec

__all__ = ["Int8Codec"]


class Int8Codec(ScaledCodec):
    """Codes -127 … 127; an element is off by half its vector's scale at most, and by the rounding of its dtype.

    Format: `kvstore.codec.scaled`. Encodes 3.7, decodes 8 GB/s of bfloat16 (raw bytes) per core here, with numba.
    """

    name = "int8"
    number: ClassVar[int] = 3
    most = 127.0

    def _quantise(
        self,
        values: npt.NDArray[np.float32],
        divisors: npt.NDArray[np.float32],
        codes: npt.NDArray[Any],
        using: ModuleType | None,
    ) -> None:
        if using is not None:
            using.quantise(values, divisors, codes.view(np.int8))
        else:
            np.copyto(codes.view(np.int8), np.rint(values / divisors[:, None]), casting="unsafe")

    def _restore(
        self,
        codes: npt.NDArray[Any],
        scales: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
        using: ModuleType | None,
    ) -> None:
        signed = codes.view(np.int8)
        if int(signed.min()) < -127:
            raise CorruptRecord("an int8 segment holds the code -128")
        if using is not None:
            using.scale(signed, scales, out)
        else:
            np.multiply(signed, scales[:, None], out=out, casting="unsafe", dtype=np.float32)
