"""Lookups that found nothing, remembered briefly: an engine asks for the same prompt at every scheduling step."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvstore.keys import Key

__all__ = ["MissMemory"]


class MissMemory:
    """Keys that were not there a moment ago. Only what the service said counts, never an error.

    A put through the same backend makes it forget; a put by others is seen after `seconds` at the latest. A lookup that
    began before the put and is answered after it is not remembered.

    Args:
        seconds: how long; 0: nothing is remembered.
        most: keys; the oldest go first.
    """

    def __init__(self, seconds: float, *, most: int = 1 << 16, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[Key, float] = OrderedDict()
        self.epoch = 0
        """Counts puts; a lookup takes it before it asks."""

    def __contains__(self, key: Key) -> bool:
        until = self._until.get(key)
        return until is not None and self._clock() < until

    def add(self, keys: list[Key], epoch: int) -> None:
        """These were not there, asked after `epoch` was taken."""
        if not self._seconds or not keys:
            return
        until = self._clock() + self._seconds
        with self._lock:
            if epoch != self.epoch:
                return
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._most:
                self._until.popitem(last=False)

    def forget(self, keys: list[Key]) -> None:
        """These were, or are being, put."""
        with self._lock:
            self.epoch += 1
            for key in keys:
                self._until.pop(key, None)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
