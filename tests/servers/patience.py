"""How tests check a bound in time on a machine where any step may stall for a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_time"]

T = TypeVar("T")


def in_time(call: Callable[[], T], seconds: float, *, tries: int = 5) -> T:
    """What `call` returns, if it does so within `seconds` once in so many tries. A stall makes it late now and then, a
    bound that is not kept each time."""
    took = 0.0
    for _ in range(tries):
        start = time.monotonic()
        result = call()
        took = time.monotonic() - start
        if took < seconds:
            return result
    raise AssertionError(f"it took {took:.2f} s, and more than {seconds:.2f} s {tries} times out of {tries}")
