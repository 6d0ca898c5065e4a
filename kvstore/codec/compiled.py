"""Machine code of the codecs' loops, by numba."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]

logger = logging.getLogger("kvstore.codec")


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a loop that runs as machine code, without the interpreter's lock. It is compiled on first use, and kept
    on disk for the next process where numba finds a place for it; where all of them are read-only (a container, say),
    each process compiles anew.

    Args:
        options: further ones of `numba.njit`.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # "cannot cache function ...: no locator available"
            _say_so()
            return njit(nogil=True, **options)(function)

    return wrap


@functools.cache
def _say_so() -> None:
    logger.warning(
        "numba finds no folder that it may write to: codecs are compiled anew in each process, which takes seconds; "
        "NUMBA_CACHE_DIR names one"
    )
