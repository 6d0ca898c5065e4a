"""Whole conversations by a formula: long, often continued and recent ones stay."""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Iterator

from kvstore.errors import ConfigError
from kvstore.keys import Key

from .base import Clock, RecordInfo
from .chain import ChainPolicy, Queue, Record

__all__ = ["SessionPolicy"]

_GROWN = 1.05  # ranks are computed anew when a maximum has grown by this factor


class _Session(Queue):
    """The records of one conversation, and what the formula needs."""

    __slots__ = ("count", "entry", "last", "name", "tokens", "ttl", "turns")

    def __init__(self, name: str, now: float, ttl: float) -> None:
        super().__init__()
        self.name = name
        self.count = 0
        self.tokens = 0
        self.turns = 0
        self.last = now
        self.ttl = ttl
        self.entry: tuple[float, float, str] | None = None  # its valid entry in the heap of its ttl; None: idle


class SessionPolicy(ChainPolicy):
    """Lowest `retain` first, session by session, and within a session leaf-first and least recently used first:

        retain = α·tokens/max(tokens) + β·turns/max(turns) + γ·(1 - min(1, age/TTL))

    Sessions that were not used for their TTL go before all others, the longest unused first. Ties: least recently used.
    The maxima are over all sessions seen so far (and are let grow by 5 % before the order follows). A record without a
    session belongs to its parent's; without one it counts as a session of its own with no tokens and no turns.

    The formula in circulation adds (now - last)/TTL and evicts the lowest, so that the oldest would stay; this is the
    corrected one. On block-level traces it loses to LRU: use it where sessions are the unit.

    Args:
        alpha, beta, gamma: the weights; at least 0.
        ttl: seconds, for sessions whose records bring none of their own.
    """

    name = "session"

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        ttl: float = 3600.0,
        clock: Clock = time.monotonic,
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be at least 0, not {value}")
        if not ttl > 0:
            raise ConfigError(f"ttl must be more than 0 seconds, not {ttl}")
        super().__init__(clock=clock)
        self._alpha, self._beta, self._gamma, self._ttl = alpha, beta, gamma, ttl
        self._sessions: dict[str, _Session] = {}
        self._heaps: dict[float, list[tuple[float, float, str]]] = {}  # by ttl; within one the order does not age
        self._due: list[tuple[float, str]] = []  # (when it may have expired, session)
        self._over: OrderedDict[str, None] = OrderedDict()  # expired ones
        self._tokens = self._turns = 1  # maxima
        self._used_tokens = self._used_turns = 1  # … with which the heaps are ordered

    def retain(self, key: Key) -> float:
        """The value of the session of a resident record now; -inf if it has expired. Raises `KeyError`."""
        record = self._records[key]
        queue = record.queue
        if isinstance(queue, _Session):
            return self._retain(queue.tokens, queue.turns, queue.last, queue.ttl, self._clock())
        return self._retain(0, 0, record.last, self._ttl, self._clock())

    def _retain(self, tokens: int, turns: int, last: float, ttl: float, now: float) -> float:
        age = now - last
        if age >= ttl:
            return -math.inf
        return (
            self._alpha * tokens / self._used_tokens + self._beta * turns / self._used_turns
            + self._gamma * (1.0 - age / ttl)
        )  # fmt: skip

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        name = info.session if info is not None else None
        if name is None:
            above = self._records.get(record.parent) if record.parent is not None else None
            if above is None or not isinstance(above.queue, _Session):
                self._append(record, self._queues[0])
                return
            session = above.queue
        else:
            found = self._sessions.get(name)
            if found is None:
                found = self._sessions[name] = _Session(name, record.last, self._ttl)
            session = found
        session.count += 1
        self._append(record, session)
        self._told(session, record.last, info)

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        self._use(record, self._clock())
        if isinstance(record.queue, _Session) and info is not None and info.session in (None, record.queue.name):
            self._told(record.queue, record.last, info)

    def _use(self, record: Record, now: float) -> None:
        super()._use(record, now)
        if isinstance(record.queue, _Session):
            self._told(record.queue, now, None)

    def _told(self, session: _Session, now: float, info: RecordInfo | None) -> None:
        changed = session.last != now or session.entry is None
        session.last = now
        if info is not None:
            tokens, turns, ttl = info.start + info.tokens, info.turns, info.ttl
            if tokens > session.tokens:
                session.tokens, changed = tokens, True
                self._tokens = max(self._tokens, tokens)
            if turns > session.turns:
                session.turns, changed = turns, True
                self._turns = max(self._turns, turns)
            if ttl is not None and ttl != session.ttl:  # 0 or less: at once
                session.ttl, changed = max(ttl, 1e-9), True
        if changed:
            self._rank(session)

    def _rank(self, session: _Session) -> None:
        """Put it where it belongs now."""
        value = (
            self._alpha * session.tokens / self._used_tokens + self._beta * session.turns / self._used_turns
            + (self._gamma * session.last / session.ttl)
        )  # fmt: skip
        session.entry = (value, session.last, session.name)
        heap = self._heaps.setdefault(session.ttl, [])
        if len(heap) > 2 * len(self._sessions) + 64:
            heap[:] = [each.entry for each in self._sessions.values() if each.entry and each.ttl == session.ttl]
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, session.entry)
        self._over.pop(session.name, None)
        due = session.last + session.ttl
        if due < math.inf:
            if len(self._due) > 2 * len(self._sessions) + 64:
                self._due = [(each.last + each.ttl, each.name) for each in self._sessions.values()]
                heapq.heapify(self._due)
            else:
                heapq.heappush(self._due, (due, session.name))

    def _make_ready(self, record: Record) -> None:
        super()._make_ready(record)
        session = record.queue
        if isinstance(session, _Session) and session.entry is None:
            self._rank(session)

    def _gone(self, record: Record) -> None:
        session = record.queue
        if isinstance(session, _Session):
            session.count -= 1
            if not session.count:
                session.entry = None
                self._over.pop(session.name, None)
                if self._sessions.get(session.name) is session:
                    del self._sessions[session.name]

    def _pick_expired(self) -> Record | None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            session = self._sessions.get(name)
            if session is not None and session.last + session.ttl <= now and session.entry is not None:
                self._over[name] = None
        while self._over:
            name = next(iter(self._over))
            session = self._sessions[name]
            head = self._head(session)
            if head is not None:
                return head
            del self._over[name]
            session.entry = None
        head = self._head(self._queues[0])
        return head if head is not None and head.last + self._ttl <= now else None

    def _pick(self) -> Record | None:
        expired = self._pick_expired()
        if expired is not None:
            return expired
        if self._tokens > _GROWN * self._used_tokens or self._turns > _GROWN * self._used_turns:
            self._order_anew()
        now = self._clock()
        best = self._head(self._queues[0])
        lowest = (math.inf, 0.0)
        if best is not None:
            lowest = (self._retain(0, 0, best.last, self._ttl, now), best.last)
        for ttl, heap in list(self._heaps.items()):
            while heap:
                session = self._sessions.get(heap[0][2])
                if session is None or session.entry is not heap[0] or session.ttl != ttl:
                    heapq.heappop(heap)
                    continue
                value = (self._retain(session.tokens, session.turns, session.last, ttl, now), session.last)
                if best is not None and value >= lowest:
                    break
                head = self._head(session)
                if head is None:  # all of it is protected
                    session.entry = None
                    heapq.heappop(heap)
                    continue
                best, lowest = head, value
                break
            if not heap:
                del self._heaps[ttl]
        return best

    def _order_anew(self) -> None:
        self._used_tokens, self._used_turns = self._tokens, self._turns
        self._heaps.clear()
        for session in self._sessions.values():
            if session.entry is not None and session.name not in self._over:
                self._rank(session)

    def expired(self) -> Iterator[Key]:
        return self._walk(self._pick_expired, (), all_of_them=False)
