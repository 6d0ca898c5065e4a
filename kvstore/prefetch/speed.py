"""How fast bytes come, over all streams: for the size of read buffers."""

from __future__ import annotations

import math

__all__ = ["Speed"]

_MEMORY_S = 2.0  # seconds of loading after which a measurement counts for half
_NEWEST = 0.2  # how much the last latency counts


class Speed:
    """Bytes per second while anything was loading; recent transfers count more. Not thread-safe: its owner's lock.

    Attributes:
        bytes_per_s: None before the first transfer has ended.
        latency_s: what a transfer takes besides its bytes and those that were under way with it; None: unknown.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self.bytes_per_s: float | None = None
        self.latency_s: float | None = None

    def window(self, seconds: float) -> float:
        """Bytes that come in so many seconds and twice the latency: as much under way fills the link, whatever its
        latency, also if the speed was measured too low. inf: not enough is known."""
        if self.bytes_per_s is None or self.latency_s is None:
            return math.inf
        return max(1.0, self.bytes_per_s * (seconds + 2 * self.latency_s))

    def took(self, seconds: float, under_way: int) -> None:
        """A transfer took so long from when it was asked for, with so many bytes under way then, its own included."""
        if self.bytes_per_s is None:
            return
        latency = max(0.0, seconds - under_way / self.bytes_per_s)
        self.latency_s = latency if self.latency_s is None else self.latency_s + _NEWEST * (latency - self.latency_s)

    def begin(self, now: float) -> None:
        """A transfer begins."""
        if self._under_way:
            self._charge(now)
        self._under_way += 1
        self._since = now

    def end(self, now: float, nbytes: int) -> None:
        """A transfer has ended and brought so many bytes."""
        self._charge(now)
        self._under_way -= 1
        self._bytes += nbytes
        if self._seconds > 0 and self._bytes > 0:
            self.bytes_per_s = self._bytes / self._seconds

    def _charge(self, now: float) -> None:
        """Time until now counts as loading; what is older fades."""
        passed = max(0.0, now - self._since)
        fade = 0.5 ** (passed / _MEMORY_S)
        self._bytes *= fade
        self._seconds = self._seconds * fade + passed
        self._since = now
