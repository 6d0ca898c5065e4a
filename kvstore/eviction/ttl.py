"""Time to live: what lies unused for too long goes, room or not."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Container, Iterator

from kvstore.errors import ConfigError
from kvstore.keys import Key

from .base import Clock, RecordInfo
from .chain import ChainPolicy, Record

__all__ = ["TTLPolicy"]


class TTLPolicy(ChainPolicy):
    """Expired records first, then the least recently used, leaf-first.

    A record expires when it was not used for its time to live; a record that has resident children does not expire
    before they are gone. A tier below that takes a demoted record over admits it with a longer `info.ttl`, and its time
    begins anew there.

    A record whose own time is 0 or less is expired at once.

    Args:
        ttl: seconds for records that come without one of their own: one policy per namespace, one default each.
    """

    name = "ttl"

    def __init__(self, *, ttl: float = 3600.0, clock: Clock = time.monotonic) -> None:
        if not ttl > 0:
            raise ConfigError(f"ttl must be more than 0 seconds, not {ttl}")
        super().__init__(clock=clock)
        self._ttl = ttl
        self._own: dict[Key, float] = {}  # of records that do not have the default
        # A record is in one of these: those with children or pins wait, and only the others need a place in the heap.
        self._waiting: set[Key] = set()
        self._due: list[tuple[float, Key]] = []  # (not after it is due, record)
        self._look: list[Key] = []  # to be looked at: new ones, and those that need not wait any more

    def ttl_of(self, key: Key) -> float:
        """Seconds that a record may lie unused."""
        return self._own.get(key, self._ttl)

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        super()._arrive(record, info)
        self._set(record, info)
        self._look.append(record.key)
        if len(self._look) > 2 * len(self._records) + 64:  # nobody asks
            self._look = [key for key in dict.fromkeys(self._look) if key in self._records]

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        super()._again(record, info)
        if info is not None and info.ttl is not None and info.ttl != self.ttl_of(record.key):
            self._set(record, info)
            self._look.append(record.key)  # it may be shorter than before

    def _set(self, record: Record, info: RecordInfo | None) -> None:
        if info is None or info.ttl is None:
            return
        if info.ttl == self._ttl:
            self._own.pop(record.key, None)
        else:
            self._own[record.key] = info.ttl

    def _push(self, record: Record) -> None:
        due = record.last + self.ttl_of(record.key)
        if due < math.inf:
            if len(self._due) > 2 * len(self._records) + 64:
                self._due = [(each.last + self.ttl_of(key), key) for key, each in self._records.items()]
                heapq.heapify(self._due)
            heapq.heappush(self._due, (due, record.key))

    def _gone(self, record: Record) -> None:
        self._own.pop(record.key, None)
        self._waiting.discard(record.key)

    def _freed(self, record: Record) -> None:
        super()._freed(record)
        self._due_again(record)

    def _unpinned(self, key: Key) -> None:
        super()._unpinned(key)
        record = self._records.get(key)
        if record is not None:
            self._due_again(record)

    def _due_again(self, record: Record) -> None:
        if record.key in self._waiting:
            self._waiting.remove(record.key)
            self._look.append(record.key)

    def expired(self) -> Iterator[Key]:
        records, now = self._records, self._clock()
        stuck: list[Key] = []
        try:
            while True:
                if self._look:  # the removal of the last one may have freed its parent
                    key = self._look.pop()
                elif self._due and self._due[0][0] <= now:
                    key = heapq.heappop(self._due)[1]
                else:
                    return
                record = records.get(key)
                if record is None or key in self._waiting:
                    continue
                if record.children or key in self._pins:
                    self._waiting.add(key)
                elif record.last + self.ttl_of(key) > now:
                    self._push(record)
                else:
                    yield key
                    if records.get(key) is record:
                        stuck.append(key)
        finally:
            self._look += stuck

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        offered: set[Key] = set()
        for key in self.expired():
            if key not in keep:
                offered.add(key)
                yield key
        for key in super().victims(keep=keep):
            if key not in offered:
                yield key
