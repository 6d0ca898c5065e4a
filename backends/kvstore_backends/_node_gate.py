"""`Gate`: how much of a node's memory its clients may hold at a time: by answers on their way and by writes under way.

Whoever reads slowly, or stops, holds memory until the transport ends his connection. The gate bounds that for each
client and for all together, so that the rest of the pool always serves the others:

    total               what all may hold together
      general  7/8      for any request
      reserve  1/8      for small ones only, when there is no room for them in general: however many large answers
                        stick, small ones get through
    per client          at most a quarter of the total, of which a quarter of the reserve; half of it by leases

Leases last as long as their holder likes: beyond half, his own reads and writes would wait for them in vain.
"""

from __future__ import annotations

import threading
import time
from collections import deque

__all__ = ["Gate", "Pass"]

_CLIENTS = 4  # so many can share the total, or the reserve, before it is used up
_RESERVE = 8  # its part of the total
_MOST_RESERVE = 256 << 20
_SMALL = 8  # as many small requests as fit into the reserve, at least
_MOST_SMALL = 4 << 20


class _Part:
    """One part of what may be held, and how much of it each client holds."""

    __slots__ = ("clients", "nbytes", "used")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.clients: dict[bytes, int] = {}

    def fits(self, nbytes: int) -> bool:
        return self.used + min(nbytes, self.nbytes) <= self.nbytes

    def add(self, client: bytes, nbytes: int) -> None:
        self.used += nbytes
        left = self.clients.get(client, 0) + nbytes
        if left > 0:
            self.clients[client] = left
        else:
            self.clients.pop(client, None)


class Pass:
    """Leave to hold `nbytes`. `leave` gives it back, once; calling it again does nothing."""

    __slots__ = ("_client", "_gate", "_part", "lent", "nbytes")

    def __init__(self, gate: Gate, part: _Part, client: bytes, nbytes: int) -> None:
        self._gate = gate
        self._part = part
        self._client = client
        self.nbytes = nbytes
        self.lent = 0

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
    """Admits requests by the bytes they hold: large and small ones each in the order they came, except that a client
    who is at his own limit is passed over.

    A request that asks for more than a limit counts as the limit: it runs alone. So ask for more than `per_client`
    only if it cannot be less (one record that is larger).

    Args:
        total: bytes that all clients may hold together.
        per_client: bytes that one client may hold; at most a quarter of `total` counts.

    Attributes:
        total: as given, at least 1.
        per_client: what holds.
        small: a request of so many bytes is small.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self.total = max(1, total)
        self.per_client = max(1, min(per_client, self.total // _CLIENTS))
        reserve = min(self.total // _RESERVE, _MOST_RESERVE)
        self.small = min(reserve // _SMALL, _MOST_SMALL)
        self._general, self._reserve = _Part(self.total - reserve), _Part(reserve)
        self._reserve_per_client = reserve // _CLIENTS
        self._lock = threading.Lock()
        self._large: deque[_Turn] = deque()
        self._small: deque[_Turn] = deque()
        self._lent: dict[bytes, int] = {}  # bytes that each client holds by leases
        self._held_up = False  # a large request waits for room, and small ones must not take it
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._general.used + self._reserve.used

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._large) + len(self._small)

    def enter(self, client: bytes, nbytes: int, deadline: float) -> Pass | None:
        """Leave for `client` to hold `nbytes` bytes; None if there was none by `deadline` (`time.monotonic()` seconds,
        in the past: does not wait), or the gate was closed."""
        turns = self._small if nbytes <= self.small else self._large
        with self._lock:
            if self._closed:
                return None
            if not nbytes:  # holds nothing: in nobody's way
                return Pass(self, self._general, client, 0)
            if not turns:
                given = self._admit(client, nbytes)
                if given is not None:
                    return given
            turn = _Turn(client, nbytes)
            turns.append(turn)
            self._serve()
            if turn.given is not None:
                return turn.given
            if time.monotonic() >= deadline:
                self._give_up(turn, turns)
                return None
        left = deadline - time.monotonic()
        turn.event.wait(None if left > threading.TIMEOUT_MAX else max(0.0, left))
        with self._lock:
            if turn.given is None and not self._closed:
                self._give_up(turn, turns)
            return turn.given

    def lend(self, client: bytes, nbytes: int, deadline: float) -> Pass | None:
        """As `enter`, for a lease. None at once beyond the half of a client's limit that his leases may hold; a single
        one may hold more."""
        with self._lock:
            before = self._lent.get(client, 0)
            if before and before + nbytes > self.per_client // 2:
                return None
            self._lent[client] = before + nbytes
        given = self.enter(client, nbytes, deadline)
        if given is None:
            with self._lock:
                self._returned(client, nbytes)
                self._serve()
        else:
            given.lent = nbytes
        return given

    def room(self, client: bytes) -> int:
        """Bytes that requests of `client` may hold beside his leases."""
        return max(1, self.per_client // 2, self.per_client - self._lent.get(client, 0))

    def close(self) -> None:
        """Nobody enters any more, and who waits is sent away."""
        with self._lock:
            self._closed = True
            for turns in (self._large, self._small):
                for turn in turns:
                    turn.event.set()
                turns.clear()

    def _give_up(self, turn: _Turn, turns: deque[_Turn]) -> None:
        turns.remove(turn)
        self._serve()  # it may have been in the way of others

    def _returned(self, client: bytes, nbytes: int) -> None:
        left = self._lent.get(client, 0) - nbytes
        if left > 0:
            self._lent[client] = left
        else:
            self._lent.pop(client, None)

    def _at_limit(self, client: bytes, nbytes: int) -> bool:
        mine = self._general.clients.get(client, 0) + self._reserve.clients.get(client, 0)
        lent, room = self._lent.get(client, 0), self.room(client)
        return mine - lent + min(nbytes, room) > room

    def _part_for(self, client: bytes, nbytes: int) -> _Part | None:
        """The part that has room."""
        small = nbytes <= self.small
        if not (small and self._held_up) and self._general.fits(nbytes):
            return self._general
        reserve = self._reserve
        if small and reserve.fits(nbytes) and reserve.clients.get(client, 0) + nbytes <= self._reserve_per_client:
            return reserve
        return None

    def _admit(self, client: bytes, nbytes: int) -> Pass | None:
        part = None if self._at_limit(client, nbytes) else self._part_for(client, nbytes)
        if part is None:
            return None
        part.add(client, nbytes)
        return Pass(self, part, client, nbytes)

    def _leave(self, given: Pass) -> None:
        with self._lock:
            nbytes, given.nbytes = given.nbytes, 0
            given._part.add(given._client, -nbytes)
            lent, given.lent = given.lent, 0
            if lent:
                self._returned(given._client, lent)
            if self._large or self._small:
                self._serve()

    def _serve(self) -> None:
        """Give turns to whom there is room for. What does not fit into the whole holds up all behind it, so that it is
        not starved, and small ones keep to their reserve while a large one waits; what does not fit its own client's
        limit holds up only that client."""
        self._held_up = False
        for turns in (self._large, self._small):
            held: set[bytes] = set()
            for turn in [*turns]:
                if turn.client in held:
                    continue
                given = self._admit(turn.client, turn.nbytes)
                if given is not None:
                    turns.remove(turn)
                    turn.given = given
                    turn.event.set()
                elif self._at_limit(turn.client, turn.nbytes):
                    held.add(turn.client)
                elif turns is self._large:
                    self._held_up = True
                    break
                elif self._reserve.fits(turn.nbytes):  # but he has his part of it
                    held.add(turn.client)
                else:
                    break
