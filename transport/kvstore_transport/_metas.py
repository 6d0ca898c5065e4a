"""`Metas`: how much memory the metas of all connections of a server may take together.

The limit of one frame is not enough: thousands of connections could each send one of the longest. A meta is charged
before it is received, and given back when the request is over. Short ones are not charged, so that an ordinary request
never waits for others' long ones.
"""

from __future__ import annotations

import threading
import time

__all__ = ["LEAST_RATE", "MetaShare", "Metas"]

LEAST_RATE = 1 << 20
"""Bytes per second at which metas and bodies must move, beyond the time that they may stall: however slow a peer is, it
ends."""

FREE_BYTES = 32 << 10
"""A frame's meta up to this length is not charged."""

_TOTAL = 64 << 20
_CLIENTS = 4  # so many clients can share the total before it is used up


class Metas:
    """The bytes that may be taken, and who has taken them.

    Args:
        max_meta: longest meta of a frame, in bytes. The total is four of them, or 64 MiB if that is more; one client
            may have a quarter of it.
    """

    def __init__(self, max_meta: int) -> None:
        self.total = max(_TOTAL, _CLIENTS * max_meta)
        self._changed = threading.Condition()
        self._clients: dict[bytes, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes taken now."""
        return self._used

    def take(self, client: bytes, nbytes: int, deadline: float) -> bool:
        """Wait for `nbytes` until `deadline`, in `time.monotonic()` seconds; False if there was no room by then."""
        most = self.total // _CLIENTS
        with self._changed:
            while self._used + nbytes > self.total or self._clients.get(client, 0) + nbytes > most:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._used += nbytes
            self._clients[client] = self._clients.get(client, 0) + nbytes
            return True

    def give(self, client: bytes, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            left = self._clients[client] - nbytes
            if left:
                self._clients[client] = left
            else:
                del self._clients[client]
            self._changed.notify_all()


class MetaShare:
    """What one connection has taken. For one thread."""

    def __init__(self, metas: Metas, client: bytes) -> None:
        self._metas = metas
        self._client = client
        self._taken = 0

    def take(self, nbytes: int, deadline: float) -> bool:
        """Before a meta of `nbytes` is received; False if there was no room by `deadline`."""
        if nbytes <= FREE_BYTES:
            return True
        if not self._metas.take(self._client, nbytes, deadline):
            return False
        self._taken += nbytes
        return True

    def free(self) -> None:
        """Give back all that was taken."""
        if self._taken:
            self._metas.give(self._client, self._taken)
            self._taken = 0
