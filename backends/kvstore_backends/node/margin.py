"""How much earlier than its caller's deadline a node of several must have answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Margin"]

_SHARE = 0.1
_MOST_S = 0.05
_FIRST_S = 0.02  # before anything was measured
_LEAST_S = 0.002
_SPARE = 1.5  # times what was measured
_FORGET = 0.2  # weight of a hand-over that was shorter than the last ones


class Margin:
    """What is left of a deadline for handing over.

    A node that is silent is waited for, and its caller goes on at his deadline, with nothing. So nodes get a little
    less time than there is: then what the others answered is back with the caller before he goes. That is a tenth of
    the time that is left, at most 50 ms; but not less than what it took lately from the end of the nodes' time until
    the pool answered (a busy machine wakes threads late), unless that is more than half of what is left.

    Racy updates do no harm: it is an estimate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._needed = _FIRST_S  # seconds

    def before(self, deadline: float) -> float:
        """When the nodes must have answered (absolute monotonic seconds), for a caller who waits until `deadline`."""
        left = deadline - self._clock()
        if left <= 0 or left == math.inf:
            return deadline
        return deadline - max(min(left * _SHARE, _MOST_S), min(self._needed, left / 2))

    def note(self, until: float) -> None:
        """A call whose nodes had time `until` ends now."""
        late = self._clock() - until
        if late > 0:
            wanted = _SPARE * late
            self._needed = max(wanted, (1 - _FORGET) * self._needed + _FORGET * wanted, _LEAST_S)
