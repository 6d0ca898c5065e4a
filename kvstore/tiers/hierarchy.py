"""What all parts of a `TieredBackend` share: the tiers, one lock, and who is at work on which key.

A key is *claimed* by whoever writes, removes or moves its record, in whatever tier: so a move that is under way can
never bring back what was deleted, and no record leaves one tier while another drops its copy. Reads claim nothing. One
lock guards everything; it is taken a few times per batch, for dictionary operations only, never during I/O.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from kvstore.backend import EXISTS, MISS, Outcome, Status, Write
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PermanentError, PoolExhausted, TransientError
from kvstore.eviction import RecordInfo
from kvstore.keys import Key
from kvstore.scheduler import seconds_left
from kvstore.wrappers.base import Operation, call_backend

from .tier import Tier
from .window import EMPTY, Window

__all__ = ["Hierarchy"]

logger = logging.getLogger("kvstore.tiers")

_MAX_SERVED = 1 << 17
_MAX_PICK = 64  # records that one step moves
_DROP_SECONDS = 30.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Hierarchy:
    """The shared state. Methods that end in `_locked` want `lock` held.

    Attributes:
        loose: records in a bounded tier that are not known to lie in an unbounded one.
        hints: parent and info of records in bounded tiers, if there are several of these; for moves between them.
        served: by which tier a record was last read, for `quarantine`.
        dropping: records that are about to leave the store.
        arrived: number of promotions so far.
    """

    def __init__(self, tiers: Sequence[Tier], name: str) -> None:
        self.tiers = tiers
        self.name = name
        self.last = len(tiers) - 1
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.claimed: set[Key] = set()
        self.loose: set[Key] = set()
        self.served: dict[Key, int] = {}
        self.dropping: set[Key] = set()
        self.window: Window = EMPTY
        self.pins: dict[Key, int] = {}
        self.arrived = 0
        self.closed = False
        self.bounded = [place for place, tier in enumerate(tiers) if tier.policy is not None]
        self._unbounded = [place for place, tier in enumerate(tiers) if tier.policy is None]
        self.hints: dict[Key, tuple[Key | None, RecordInfo | None]] | None = {} if len(self.bounded) > 1 else None
        self.wake_relief: Mapping[int, Any] = {}  # workers by tier; set by those who run them
        self.wake_settling: Mapping[int, Any] = {}

    # Calls.

    def until(self, place: int, deadline: float) -> float:
        """Until when a tier may take, so that there is time left to ask the next one."""
        if place == self.last:
            return deadline
        now, timeout = time.monotonic(), self.tiers[place].timeout
        half = now + max(0.0, deadline - now) / 2
        return half if timeout is None else min(half, now + timeout)

    def ask(self, place: int, operation: Operation, items: Sequence[Any], until: float) -> list[Outcome]:
        """One call of a tier. It never raises (but for `ClosedError` if all of this is closed): a tier that is unusable
        has failed as any other."""
        if not items:
            return []
        backend = self.tiers[place].backend
        try:
            return call_backend(backend, operation, items, until)
        except (ClosedError, ConfigError) as error:
            if self.closed:
                raise ClosedError("the tiers are closed", backend=self.name, operation=operation) from error
            text = f"the tier cannot be used: {error.message}"
            failed = TransientError(text, backend=backend.name, operation=operation, cause=error)
            return [Outcome.failed(failed)] * len(items)

    def late(self, operation: str) -> Outcome:
        return Outcome.failed(TransientError("the deadline passed", backend=self.name, operation=operation))

    # Claims.

    def take(self, keys: Iterable[Key], deadline: float) -> list[Key]:
        """Claim those of `keys` that are free; waits until one is. An empty list: the deadline passed. Raises
        `ClosedError`."""
        keys = list(keys)
        with self.changed:
            while True:
                if self.closed:
                    raise ClosedError("the tiers are closed", backend=self.name)
                taken = self.take_locked(keys)
                if taken or not keys:
                    return taken
                left = seconds_left(deadline)
                if left <= 0 or not self.changed.wait(left):
                    return []

    def take_locked(self, keys: Iterable[Key]) -> list[Key]:
        """Claim those of `keys` that are free."""
        taken = [key for key in dict.fromkeys(keys) if key not in self.claimed]
        self.claimed.update(taken)
        return taken

    def give(self, keys: Iterable[Key]) -> None:
        """Give claims back."""
        with self.changed:
            self.claimed.difference_update(keys)
            self.changed.notify_all()

    # Where records lie.

    def covered_locked(self, key: Key, place: int) -> bool:
        """Whether a slower tier than `place` has the record, as far as is known."""
        for lower in range(place + 1, self.last + 1):
            policy = self.tiers[lower].policy
            if (key not in self.loose) if policy is None else (key in policy):
                return True
        return False

    def mean_bytes_locked(self) -> float:
        """Mean bytes of the records in the bounded tiers; 0: there are none."""
        records = sum(len(policy) for place in self.bounded if (policy := self.tiers[place].policy) is not None)
        return sum(self.tiers[place].used for place in self.bounded) / records if records else 0.0

    def loosen_locked(self, key: Key, place: int) -> None:
        """A record is in a bounded tier, and nothing is known of others."""
        if self._unbounded and place < self._unbounded[-1] and not self.resident_locked(key):
            self.loose.add(key)

    def resident_locked(self, key: Key) -> bool:
        """Whether a bounded tier has the record."""
        return any(key in policy for place in self.bounded if (policy := self.tiers[place].policy) is not None)

    def hint_locked(self, key: Key) -> tuple[Key | None, RecordInfo | None]:
        """What is known of a record that is moved: its parent, and more."""
        parent, info = self.hints.get(key, (None, None)) if self.hints else (None, None)
        return (parent if parent is not None else self.window.parents.get(key)), info

    def forget_locked(self, place: int, key: Key) -> int:
        """A record is no longer in a tier. Returns the bytes it had there, as counted."""
        tier = self.tiers[place]
        nbytes = tier.forget(key)
        tier.settle(key)
        if tier.policy is None:  # a faster tier that still has it has the only copy now, for all that is known
            if self.resident_locked(key):
                self.loose.add(key)
        elif (self.hints or self.loose) and not self.resident_locked(key):
            self.loose.discard(key)
            if self.hints is not None:
                self.hints.pop(key, None)
        return nbytes

    def served_locked(self, keys: Iterable[Key], place: int) -> None:
        """Records were read from a tier."""
        served = self.served
        for key in keys:
            served[key] = place
        while len(served) > _MAX_SERVED:
            del served[next(iter(served))]

    def missed_locked(self, keys: Iterable[Key], place: int) -> bool:
        """Records were not found in a tier. True if one should have been there: others remove records too."""
        tier = self.tiers[place]
        if tier.policy is None:
            return False
        gone = [key for key in keys if key in tier.policy and key not in self.claimed]
        for key in gone:
            tier.doubt(key)
        return bool(gone)

    def room_locked(self, place: int) -> float:
        """Bytes that can be stored in a tier now."""
        tier = self.tiers[place]
        if tier.capacity is None:
            return math.inf
        return 0 if tier.uncertain else tier.capacity - tier.occupied

    def wait_dropped_locked(self, keys: Container[Key], end: float) -> None:
        """What is about to leave the store was chosen before it was known that it must not: wait until it has gone, or
        stays after all, at most until the monotonic time `end`."""
        while any(key in keys for key in self.dropping) and not self.closed and (left := seconds_left(end)) > 0:
            self.changed.wait(left)

    def largest(self, place: int) -> int:
        """The largest record that a tier takes, in bytes: it must be able to go down from there."""
        here, below = self.tiers[place].largest, [tier.largest for tier in self.tiers[place + 1 :]]
        return min(here, max(below, default=here))

    # Storing.

    def store(self, place: int, writes: Sequence[Write], deadline: float, *, retry: bool = True) -> list[Outcome]:
        """Put claimed records into one tier, as far as there is room. The last tier makes room itself; for the others
        it is made in the background.

        Args:
            retry: if the last tier itself says that it is full, drop some records and try once more.

        Returns:
            as `Backend.put`; `PoolExhausted` for what found no room.
        """
        tier = self.tiers[place]
        outcomes: list[Outcome] = [MISS] * len(writes)
        sizes = [write.nbytes for write in writes]
        held = [0] * len(writes)  # what is reserved
        go: list[int] = []
        crowded: list[int] = []
        largest = self.largest(place)
        with self.lock:
            for index, size in enumerate(sizes):
                if tier.policy is not None and writes[index].key in tier.policy:
                    go.append(index)  # it needs no room: it will be EXISTS
                elif size > largest:
                    text = f"a record of {size} bytes; this tier, or all below it, take at most {largest}"
                    error = PermanentError(text, backend=tier.name, operation="put", key=writes[index].key)
                    outcomes[index] = Outcome.failed(error)
                elif tier.reserve(size):
                    held[index] = size
                    go.append(index)
                else:
                    crowded.append(index)
        if crowded:
            for index in self._crowded(place, crowded, sizes, outcomes, deadline):
                held[index] = sizes[index]
                go.append(index)
            go.sort()
        if len(go) < len(writes):  # write-once, also for what would find no room
            refused = [index for index, outcome in enumerate(outcomes) if outcome.error is not None]
            found = self.ask(place, "stat", [writes[index].key for index in refused], deadline)
            for index, there in zip(refused, found, strict=True):
                if there.ok:
                    outcomes[index] = EXISTS
        if go:
            try:
                answers = self.ask(place, "put", [writes[index] for index in go], deadline)
            except BaseException:
                with self.changed:
                    tier.reserved -= sum(held)
                raise
            full = self._commit(place, writes, sizes, go, answers, outcomes, sum(held), deadline)
            if full and place == self.last and retry:
                need = sum(sizes[index] for index in full)
                with self.lock:
                    keys = self.pick_locked(place, need)
                    self.dropping.update(keys)
                if keys and self.drop(place, keys, deadline) and time.monotonic() < deadline:
                    again = self.store(place, [writes[index] for index in full], deadline, retry=False)
                    for index, answer in zip(full, again, strict=True):
                        outcomes[index] = answer
        return outcomes

    def _crowded(
        self, place: int, crowded: Sequence[int], sizes: Sequence[int], outcomes: list[Outcome], deadline: float
    ) -> list[int]:  # fmt: skip
        """What found no room at once: the indices of those that have it now."""
        tier = self.tiers[place]
        got = [index for index in crowded if place == self.last and self._make_room(place, sizes[index], deadline)]
        text = "what lies in this tier is still being listed" if tier.uncertain else "the tier is full"
        full = Outcome.failed(PoolExhausted(text, backend=tier.name, operation="put"))
        missing = [index for index in crowded if index not in {*got}]
        for index in missing:
            outcomes[index] = full
        with self.lock:
            tier.counts["refused"] += len(missing)
            if place < self.last and missing:
                tier.wanted = max(tier.wanted, *[sizes[index] for index in missing])
        if place < self.last and missing:
            self.wake_relief[place].wake()
        return got

    def make_way(self, place: int, nbytes: int, end: float) -> bool:
        """Have room made for `nbytes` in the background. True once there is; False if there can be none, or not by the
        monotonic time `end`. Reserves nothing; to be called without claims, which would stand in the way."""
        tier = self.tiers[place]
        if tier.capacity is None:
            return True
        asked = False
        with self.changed:
            while not self.closed:
                if not tier.uncertain and tier.occupied + min(nbytes, tier.capacity) <= tier.capacity:
                    return True
                if tier.uncertain or (asked and not tier.wanted):  # what could be done has been done
                    return False
                tier.wanted, asked = max(tier.wanted, nbytes), True
                self.wake_relief[place].wake()
                left = seconds_left(end)
                if left <= 0 or not self.changed.wait(left):
                    return False
            return False

    def _make_room(self, place: int, nbytes: int, deadline: float) -> bool:
        """In the last tier: drop records until `nbytes` are free, and reserve them."""
        tier = self.tiers[place]
        while time.monotonic() < deadline:
            with self.lock:
                if tier.reserve(nbytes):
                    return True
                if tier.uncertain:
                    return False
                need = tier.occupied + nbytes - (tier.capacity or 0)
                keys = self.pick_locked(place, need)
                self.dropping.update(keys)
            if not keys or not self.drop(place, keys, deadline):
                return False
        return False

    def _commit(
        self, place: int, writes: Sequence[Write], sizes: Sequence[int], go: Sequence[int],
        answers: Sequence[Outcome], outcomes: list[Outcome], held: int, deadline: float,
    ) -> list[int]:  # fmt: skip
        """Keep the books after a put for which `held` bytes were reserved. Returns what the place itself had no room
        for."""
        tier = self.tiers[place]
        doubtful: list[int] = []
        full: list[int] = []
        with self.changed:
            tier.reserved -= held
            stored: list[Key] = []
            for index, answer in zip(go, answers, strict=True):
                outcomes[index] = answer
                write = writes[index]
                if answer.status is Status.OK:
                    self._admit_locked(place, write, sizes[index])
                    stored.append(write.key)
                elif tier.policy is None:
                    if answer.status is Status.EXISTS:
                        self.loose.discard(write.key)
                elif answer.status is not Status.EXISTS or write.key not in tier.policy:
                    doubtful.append(index)
                    if _no_room(answer.error):
                        full.append(index)
            if tier.policy is not None:
                tier.policy.touch(stored)
            tier.counts["stored"] += len(stored)
            tier.counts["stored_bytes"] += sum(answer.nbytes for answer in answers if answer.status is Status.OK)
            for index in doubtful:
                tier.doubt(writes[index].key, sizes[index])
            if full:  # it counts otherwise than we do: in pieces, in blocks; or others fill it; or it is smaller
                tier.pressed = max(tier.pressed, tier.used // 64, *[sizes[index] for index in full])
            crowded = tier.excess() > 0
            self.changed.notify_all()
        if crowded and place in self.wake_relief:
            self.wake_relief[place].wake()
        if doubtful:
            for index, outcome in zip(
                doubtful, self.look_again(place, [writes[index].key for index in doubtful], deadline), strict=True
            ):
                if outcome.ok:  # it got there before the call failed, or was there before
                    outcomes[index] = EXISTS
        return [index for index in full if not outcomes[index].stored]

    def _admit_locked(self, place: int, write: Write, nbytes: int) -> None:
        key = write.key
        tier = self.tiers[place]
        if tier.policy is None:
            self.loose.discard(key)
            return
        if self.hints is not None and (write.parent is not None or write.info is not None):
            self.hints[key] = (write.parent, write.info)
        tier.admit(key, nbytes, place, write.parent, write.info)

    def look_again(self, place: int, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Find out whether claimed records, of which nobody knows it after a failure, are in a bounded tier."""
        tier = self.tiers[place]
        found = self.ask(place, "stat", keys, deadline)
        sure = True
        with self.changed:
            for key, outcome in zip(keys, found, strict=True):
                if outcome.status is Status.OK:
                    self.loosen_locked(key, place)
                    self._admit_locked(place, Write(key, (), *self.hint_locked(key)), outcome.nbytes)
                elif outcome.status is Status.MISS:
                    self.forget_locked(place, key)
                else:
                    sure = False
                    tier.doubt(key)
            self.changed.notify_all()
        if not sure and place in self.wake_settling:
            self.wake_settling[place].wake()
        return found

    # Removing.

    def remove(self, place: int, keys: Sequence[Key], deadline: float) -> tuple[list[Outcome], int]:
        """Delete claimed records in one tier. Returns the outcomes, and how many bytes the tier counts less."""
        outcomes = self.ask(place, "delete", keys, deadline)
        return outcomes, self.removed(place, keys, outcomes)

    def removed(self, place: int, keys: Sequence[Key], outcomes: Sequence[Outcome]) -> int:
        """Keep the books after a delete or quarantine in one tier. Returns how many bytes it counts less."""
        tier = self.tiers[place]
        doubt = False
        freed = 0
        with self.changed:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome.status is not Status.ERROR:
                    freed += self.forget_locked(place, key)
                elif tier.policy is not None:
                    tier.doubt(key)
                    doubt = True
                elif self.resident_locked(key):
                    self.loose.add(key)
            self.changed.notify_all()
        if doubt and place in self.wake_settling:
            self.wake_settling[place].wake()
        return freed

    def pick_locked(self, place: int, nbytes: int) -> list[Key]:
        """Claim records of a tier that should go, about `nbytes` bytes of them.

        What waiting jobs need is passed over. If there is nothing else above the watermark, and a slower tier can take
        it, what is needed last goes first; but not for the sake of others, and the last tier drops nothing of it.
        """
        tier = self.tiers[place]
        policy = tier.policy
        if policy is None or not len(policy):
            return []
        chosen: list[Key] = []
        now = time.monotonic()
        for key in policy.victims(keep=self.window.rank):
            if key not in self.claimed and tier.stuck.get(key, now) <= now and not tier.leased(key):
                chosen.append(key)
                nbytes -= policy.size_of(key)
                if nbytes <= 0 or len(chosen) >= _MAX_PICK:
                    break
        if not chosen and place < self.last and tier.crowded:
            for key in reversed(self.window.rank):
                if key not in policy or key in self.pins or key in self.claimed or tier.leased(key):
                    continue
                if tier.stuck.get(key, now) <= now:
                    chosen.append(key)
                    nbytes -= policy.size_of(key)
                    if nbytes <= 0 or len(chosen) >= _MAX_PICK:
                        break
        self.claimed.update(chosen)
        return chosen

    def drop(self, place: int, keys: Sequence[Key], deadline: float, *, why: str = "drops") -> int:
        """Delete records for good that were picked and are marked as `dropping`; gives their claims back. Returns how
        many are gone."""
        tier = self.tiers[place]
        try:
            with self.lock:
                still = [key for key in keys if key not in self.window.rank and key not in self.pins]
            outcomes, freed = self.remove(place, still, min(deadline, time.monotonic() + _DROP_SECONDS))
            count = sum(outcome.status is not Status.ERROR for outcome in outcomes)
            with self.lock:
                tier.counts[why] += count
                tier.counts["dropped_bytes"] += freed
            return count
        finally:
            with self.changed:
                self.dropping.difference_update(keys)
                self.claimed.difference_update(keys)
                self.changed.notify_all()


def _no_room(error: KVStoreError | None) -> bool:
    """Whether a put failed because the place is full in its own view."""
    full = isinstance(error, PermanentError) and isinstance(error.cause, OSError) and error.cause.errno in _FULL
    return full or isinstance(error, PoolExhausted)
