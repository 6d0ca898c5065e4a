"""How fast bytes come, over all streams: for the size of read buffers."""

from __future__ import annotations

__all__ = ["Speed"]

_MEMORY_S = 2.0  # seconds of loading after which a measurement counts for half


class Speed:
    """Bytes per second while anything was loading; recent transfers count more. Not thread-safe: its owner's lock.

    Attributes:
        bytes_per_s: None before the first transfer has ended.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self.bytes_per_s: float | None = None

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
