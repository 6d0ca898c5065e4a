"""What a node keeps of a connection between two requests: the memory promised to a write, and listings half read.

All of it is given back when the connection ends, and when nobody comes for it for too long.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, MutableMapping, Sequence

from kvstore.backend import KeyInfo
from kvstore.keys import Key

from ._memory_reservation import Reservation
from ._node_gate import Pass
from ._node_space import Space

__all__ = ["Cursor", "Cursors", "Session", "Sessions", "Ticket"]

_CURSORS = 64
_CURSORS_PER_SESSION = 4
_CURSOR_IDLE_S = 60.0
_NAME = "kvstore_node"


class Ticket:
    """Memory promised to the records of a PUT, until their DATA comes or `until` passes.

    Attributes:
        indices: the records that are wanted, in the order of the batch.
        until: `time.monotonic()` seconds.
    """

    __slots__ = ("_held", "indices", "reservation", "until")

    def __init__(self, reservation: Reservation, held: Pass) -> None:
        self.reservation = reservation
        self._held = held
        self.indices: Sequence[int] = ()
        self.until = 0.0

    def drop(self) -> None:
        """Give back what was not committed."""
        self.reservation.close()
        self._held.leave()


class Session:
    """One connection. Its requests come one at a time; the sweep and the end of the connection come in between."""

    def __init__(self, space: Space, ended: Callable[[Session], None]) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._ended = ended
        self._number = 0
        self._ticket: Ticket | None = None

    def keep(self, ticket: Ticket) -> int:
        """Keep a ticket; returns its number."""
        with self._lock:
            self._number += 1
            self._ticket = ticket
            return self._number

    def give(self, number: int) -> Ticket | None:
        """The ticket of that number, which is the caller's now. None if there is none, or no longer."""
        with self._lock:
            if number != self._number:
                return None
            ticket, self._ticket = self._ticket, None
        return ticket

    def drop(self, before: float = float("inf")) -> None:
        """Drop the ticket, if its time ended `before`: its bytes never came."""
        with self._lock:
            ticket = self._ticket
            if ticket is None or ticket.until > before:
                return
            self._ticket = None
        ticket.drop()
        self._space.count(abandoned=len(ticket.indices))

    def announce(self, client: bytes, waiting: Sequence[Sequence[Key]]) -> None:
        """The queue of the engine at the other end, until it announces another one or this connection ends."""
        self._space.ahead.announce(client, self, waiting)

    def close(self) -> None:
        self.drop()
        self._space.ahead.forget(self)
        self._ended(self)


class Sessions:
    """All connections."""

    def __init__(self, ended: Callable[[Session], None]) -> None:
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._on_end = ended

    def of(self, state: MutableMapping[str, object], space: Space) -> Session:
        """The session that `state`, the dict of a connection, belongs to."""
        session = state.get(_NAME)
        if isinstance(session, Session):
            return session
        session = Session(space, self._gone)
        with self._lock:
            self._sessions.add(session)
        state[_NAME] = session
        state["on_close"] = session.close
        return session

    def _gone(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
        self._on_end(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def sweep(self) -> None:
        """Drop the tickets whose time is over."""
        now = time.monotonic()
        with self._lock:
            sessions = [*self._sessions]
        for session in sessions:
            session.drop(before=now)


class Cursor:
    """A listing of memory and what lies below, as far as it was read. A record that is in both is listed once."""

    def __init__(self, space: Space, until: float) -> None:
        self.number = 0
        self.session: Session | None = None
        self.used = 0.0
        self._infos = _infos(space, until)
        self._ahead: list[KeyInfo] = []  # one, to know whether more follow

    def next(self, count: int) -> list[KeyInfo]:
        """The next `count` records. Raises what `Backend.list` raises."""
        page = [*self._ahead, *itertools.islice(self._infos, count + 1 - len(self._ahead))]
        self._ahead = page[count:]
        return page[:count]

    @property
    def ended(self) -> bool:
        """Whether nothing follows what `next` has returned."""
        return not self._ahead

    def close(self) -> None:
        self._infos.close()


def _infos(space: Space, until: float) -> Generator[KeyInfo, None, None]:
    seen: set[bytes] = set()
    for page in space.backend.list(deadline=until):
        if space.below is not None:
            seen.update(info.key for info in page)
        yield from page
    if space.below is not None:
        for page in space.below.pages(until):
            yield from (info for info in page if info.key not in seen)


class Cursors:
    """All listings that are half read: few in all, and few per connection, for each holds a copy of the keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Cursor] = {}  # the least recently used first
        self._numbers = itertools.count(1)

    def keep(self, session: Session, cursor: Cursor) -> int:
        """Keep a listing until its number is given; 0 if there are too many in all. The oldest of too many of one
        connection is dropped."""
        cursor.session, cursor.used = session, time.monotonic()
        with self._lock:
            mine = [each for each in self._kept.values() if each.session is session]
            dropped = mine[: max(0, len(mine) + 1 - _CURSORS_PER_SESSION)]
            for each in dropped:
                del self._kept[each.number]
            if len(self._kept) >= _CURSORS:
                dropped.append(cursor)
                cursor.number = 0
            else:
                cursor.number = next(self._numbers)
                self._kept[cursor.number] = cursor
        for each in dropped:
            each.close()
        return cursor.number

    def give(self, session: Session, number: int) -> Cursor | None:
        """The listing of that number, which is the caller's now; None if this connection has none."""
        with self._lock:
            cursor = self._kept.get(number)
            if cursor is None or cursor.session is not session:
                return None
            return self._kept.pop(number)

    def __len__(self) -> int:
        return len(self._kept)

    def drop(self, session: Session) -> None:
        """Drop those of a connection that ended."""
        self._drop(lambda cursor: cursor.session is session)

    def sweep(self) -> None:
        """Drop those that nobody has asked for in a minute."""
        old = time.monotonic() - _CURSOR_IDLE_S
        self._drop(lambda cursor: cursor.used < old)

    def close(self) -> None:
        self._drop(lambda cursor: True)

    def _drop(self, which: Callable[[Cursor], bool]) -> None:
        with self._lock:
            dropped = [cursor for cursor in self._kept.values() if which(cursor)]
            for cursor in dropped:
                del self._kept[cursor.number]
        for cursor in dropped:
            cursor.close()
