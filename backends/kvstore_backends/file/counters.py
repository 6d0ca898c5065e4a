"""How often something unusual was dealt with."""

from __future__ import annotations

import threading

__all__ = ["Counters"]


class Counters:
    """Named counters. Cheap enough for the rare events that they count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
