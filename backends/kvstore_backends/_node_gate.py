"""`Gate`: how much of a node's memory its clients may hold at a time: by answers on their way and by writes under way.

Whoever reads slowly, or stops, holds memory until the transport ends his connection. The gate bounds that for each
client and for all together, so that the rest of the pool always serves the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque

__all__ = ["Gate", "Pass"]


class Pass:
    """Leave to hold `nbytes`. `leave` gives it back, once; calling it again does nothing."""

    __slots__ = ("_client", "_gate", "nbytes")

    def __init__(self, gate: Gate, client: bytes, nbytes: int) -> None:
        self._gate = gate
        self._client = client
        self.nbytes = nbytes

    def leave(self) -> None:
        self._gate._leave(self)


class _Turn:
    __slots__ = ("client", "event", "given", "nbytes")

    def __init__(self, client: bytes, nbytes: int) -> None:
        self.client = client
        self.nbytes = nbytes
        self.event = threading.Event()
        self.given: Pass | None = None


class Gate:
    """Admits requests by the bytes they hold: in the order they came, except that a client who is at his own limit
    is passed over.

    A request that asks for more than a limit counts as the limit: it runs alone.

    Args:
        total: bytes that all clients may hold together.
        per_client: bytes that one client may hold.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self.total = max(1, total)
        self.per_client = max(1, min(per_client, self.total))
        self._lock = threading.Lock()
        self._used = 0
        self._clients: dict[bytes, int] = {}
        self._turns: deque[_Turn] = deque()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._used

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._turns)

    def enter(self, client: bytes, nbytes: int, deadline: float) -> Pass | None:
        """Leave for `client` to hold `nbytes` bytes; None if there was none by `deadline` (`time.monotonic()` seconds,
        in the past: does not wait), or the gate was closed."""
        with self._lock:
            if self._closed:
                return None
            if not self._turns and self._fits(client, nbytes):
                return self._give(client, nbytes)
            if time.monotonic() >= deadline:
                return None
            turn = _Turn(client, nbytes)
            self._turns.append(turn)
            self._serve()
        left = deadline - time.monotonic()
        turn.event.wait(None if left > threading.TIMEOUT_MAX else max(0.0, left))
        with self._lock:
            if turn.given is None and not self._closed:
                self._turns.remove(turn)
                self._serve()  # it may have been in the way of others
            return turn.given

    def close(self) -> None:
        """Nobody enters any more, and who waits is sent away."""
        with self._lock:
            self._closed = True
            for turn in self._turns:
                turn.event.set()
            self._turns.clear()

    def _fits(self, client: bytes, nbytes: int) -> bool:
        mine = self._clients.get(client, 0)
        return self._fits_all(nbytes) and mine + min(nbytes, self.per_client) <= self.per_client

    def _fits_all(self, nbytes: int) -> bool:
        return self._used + min(nbytes, self.total) <= self.total

    def _give(self, client: bytes, nbytes: int) -> Pass:
        self._used += nbytes
        self._clients[client] = self._clients.get(client, 0) + nbytes
        return Pass(self, client, nbytes)

    def _leave(self, given: Pass) -> None:
        with self._lock:
            nbytes, given.nbytes = given.nbytes, 0
            self._used -= nbytes
            left = self._clients.get(given._client, 0) - nbytes
            if left > 0:
                self._clients[given._client] = left
            else:
                self._clients.pop(given._client, None)
            if self._turns:
                self._serve()

    def _serve(self) -> None:
        """Give turns to whom there is room for. What does not fit into the whole holds up all behind it, so that large
        requests are not starved; what does not fit its own client's limit holds up only that client."""
        stay: deque[_Turn] = deque()
        held: set[bytes] = set()
        while self._turns:
            turn = self._turns.popleft()
            if turn.client in held:
                stay.append(turn)
                continue
            if not self._fits_all(turn.nbytes):
                stay.append(turn)
                break
            if not self._fits(turn.client, turn.nbytes):
                held.add(turn.client)
                stay.append(turn)
                continue
            turn.given = self._give(turn.client, turn.nbytes)
            turn.event.set()
        stay.extend(self._turns)
        self._turns = stay
