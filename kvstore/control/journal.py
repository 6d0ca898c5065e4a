"""`Journal`: what came into the tiers of an instance and what left them, in batches, for whoever follows.

A bounded ring. Who falls behind further than it reaches is told so by a gap, and takes a snapshot instead: the journal
loses, but never silently. An append costs one lock hop and one join of the batch's keys.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import KEY_BYTES, Key
from kvstore.metrics import renew_after_fork

__all__ = ["ADMIT", "CLEAR", "EVICT", "Event", "Events", "Journal", "split_keys"]

ADMIT = "admit"
"""Records are in a tier now, new ones and ones that came from another tier."""
EVICT = "evict"
"""Records are in a tier no more: evicted, expired, deleted, moved away."""
CLEAR = "clear"
"""Nothing of the namespace is in the tier any more; has no keys."""

_OPERATIONS = (ADMIT, EVICT, CLEAR)
_EVENT_COST = 8  # keys; what an event takes besides its keys, so that empty ones are bounded as well


class Event(NamedTuple):
    """One batch of changes.

    Attributes:
        seq: its number; the numbers of a journal follow each other without a hole, the first is 1.
        namespace: of the node; "" is the default one.
        tier: name of the tier, such as "memory", "disk" or "remote".
        op: `ADMIT`, `EVICT` or `CLEAR`.
        keys: the digests, joined: 32 bytes each (`split_keys`).
    """

    seq: int
    namespace: str
    tier: str
    op: str
    keys: bytes


class Events(NamedTuple):
    """What `Journal.read` found.

    Attributes:
        epoch: names this journal: another one (after a restart) counts from 1 again.
        events: in order, those behind `since`.
        next: what to give as `since` next time.
        gap: events behind `since` are lost, or `since` is from another journal: take a snapshot, and go on from `next`.
    """

    epoch: str
    events: Sequence[Event]
    next: int
    gap: bool


class Journal:
    """Batches of events, numbered; the last `capacity` keys of them are kept. Safe from any thread, and after fork (the
    child's is empty, under another epoch).

    Args:
        capacity: keys that are kept, 32 bytes each; an event counts 8 more.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        if capacity < 1:
            raise ConfigError(f"a journal of {capacity} keys keeps nothing; give it at least 1")
        self._capacity = capacity
        self._after_fork()
        renew_after_fork(self)

    def _after_fork(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._ring: deque[Event] = deque()
        self._kept = 0
        self._last = 0
        self._wake = 0
        self.epoch = secrets.token_hex(8)

    def append(self, namespace: str, tier: str, op: str, keys: Sequence[Key] = ()) -> None:
        """Note a batch. Nothing is noted for no keys, but for `CLEAR`.

        Whoever calls it sees to the order: changes of one record come in the order in which they became visible (from
        under the tier's own lock, or from one thread), and after that, never before.

        Raises:
            ConfigError: an unknown operation.
        """
        if op not in _OPERATIONS:
            raise ConfigError(f"an event of a journal is one of {', '.join(_OPERATIONS)}, not {op!r}")
        if not keys and op != CLEAR:
            return
        joined = b"".join(keys)
        with self._changed:
            self._last += 1
            self._ring.append(Event(self._last, namespace, tier, op, joined))
            self._kept += len(keys) + _EVENT_COST
            while self._kept > self._capacity and len(self._ring) > 1:
                self._kept -= len(self._ring.popleft().keys) // KEY_BYTES + _EVENT_COST
            self._changed.notify_all()

    @property
    def head(self) -> int:
        """Number of the last event; 0 before the first."""
        return self._last

    def read(self, since: int, *, limit: int = 1 << 16, timeout: float = 0.0) -> Events:
        """Events behind number `since`.

        Args:
            since: the last number that is known; 0 for all.
            limit: keys at most, but one event at least; what is left comes next time.
            timeout: seconds to wait for the first one; `wake` ends the wait.
        """
        with self._changed:
            if timeout > 0 and since == self._last:
                asked = self._wake
                self._changed.wait_for(lambda: self._last != since or self._wake != asked, timeout)
            first = self._last - len(self._ring) + 1
            if not first - 1 <= since <= self._last:
                return Events(self.epoch, (), self._last, gap=True)
            found: list[Event] = []
            count = 0
            for index in range(since + 1 - first, len(self._ring)):
                event = self._ring[index]
                count += len(event.keys) // KEY_BYTES + _EVENT_COST
                if found and count > limit:
                    break
                found.append(event)
            return Events(self.epoch, found, since + len(found), gap=False)

    def wake(self) -> None:
        """End the waits of all readers now, for instance because their threads should stop."""
        with self._changed:
            self._wake += 1
            self._changed.notify_all()


def split_keys(joined: bytes) -> list[bytes]:
    """The digests of an event, 32 bytes each.

    Raises:
        ConfigError: not a multiple of 32 bytes.
    """
    if len(joined) % KEY_BYTES:
        raise ConfigError(f"{len(joined)} bytes of joined keys are not a multiple of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
