"""The records of a `MemoryBackend`, their memory, and who uses it. See `kvstore_backends.memory`."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from kvstore.backend import Outcome, Status
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.eviction import RecordInfo, make_policy
from kvstore.keys import Key

from ._memory_reservation import ALIGNMENT, Claimed, Expiry, Record, Reservation, span

__all__ = ["MemoryStore", "drop_name", "open_named"]

_LOOK_AGAIN_S = 0.01  # the end of a lease is not announced, so a put that waits for it looks now and then
_KNOWN_SIZES = 4096
_SLICE = 1000  # records removed under one lock by a sweep


class MemoryStore:
    """What several `MemoryBackend`s of one name share. Methods that end in `_locked` want `lock` held.

    Attributes:
        nbytes: of all records together.
        note: if it is set, told once per batch, in order and under the lock: ("admit" or "evict", keys).

    Raises:
        ConfigError: unknown policy, or a limit that is too small or cannot be mapped.
    """

    def __init__(
        self, nbytes: int, policy: str, name: str, *, shared: bool = False, expiry: Expiry | None = None
    ) -> None:  # fmt: skip
        if nbytes < ALIGNMENT:
            raise ConfigError(f"a memory store needs at least {ALIGNMENT} bytes, not {nbytes}")
        self.name = name
        self.asked = (nbytes, policy)
        self.policy = make_policy(policy)
        self.pool = BufferPool(nbytes & -ALIGNMENT, alignment=ALIGNMENT, shared=shared)
        self.expiry = expiry or Expiry()
        self.records: dict[Key, Record] = {}
        self.pending: dict[Key, Reservation] = {}  # being stored; by whom
        self.handles = 1
        self.closed = ""  # why, if it is
        self.nbytes = self.evicted = self.expired = 0
        self.note: Callable[[str, Sequence[Key]], None] | None = None
        self._left: list[Key] = []  # gone, but not told of yet
        self.sizes: dict[int, Outcome] = {}
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        _live.add(self)

    def check(self, operation: str) -> None:
        if self.closed:
            raise ClosedError(self.closed, backend=self.name, operation=operation)

    def size_outcome(self, nbytes: int) -> Outcome:
        """OK with `nbytes`; one object per size, since most records of a store have one of few sizes."""
        outcome = self.sizes.get(nbytes)
        if outcome is None:
            outcome = Outcome(Status.OK, nbytes)
            if len(self.sizes) < _KNOWN_SIZES:
                self.sizes[nbytes] = outcome
        return outcome

    def expires(self) -> float:
        """When a record goes by age that is put or used now."""
        ttl, _, clock = self.expiry
        return math.inf if ttl == math.inf else clock() + ttl

    def look_locked(self, keys: Sequence[Key], *, use: bool = False) -> list[Record | None]:
        """The records of `keys`, without those whose time has come: they are removed. `use` puts that off."""
        found = [*map(self.records.get, keys)]
        ttl, from_use, clock = self.expiry
        if ttl != math.inf:
            now = clock()
            for index, record in enumerate(found):
                if record is None:
                    continue
                if record.expires <= now:
                    found[index] = None
                    self.expired += self.remove_locked(keys[index])
                elif use and from_use:
                    record.expires = now + ttl
        return found

    def pin(self, keys: Sequence[Key]) -> list[Record | None]:
        """The records of `keys` with one more reader each, but not made recent. Give the list to `let_go`."""
        with self.lock:
            if self.closed:
                return [None] * len(keys)
            records = self.look_locked(keys)
            for record in records:
                if record is not None:
                    record.readers += 1
        return records

    def find(self, keys: Sequence[Key], operation: str) -> list[Record | None]:
        """The records of `keys`, made recent, and with one more reader each. Give the list to `let_go`."""
        now = time.time()
        with self.lock:
            self.check(operation)
            records = self.look_locked(keys, use=True)
            if None in records:
                keys = [key for key, record in zip(keys, records, strict=True) if record is not None]
            for record in records:
                if record is not None:
                    record.readers += 1
                    record.read = True
                    record.used = now
            self.policy.touch(keys)
        return records

    def let_go(self, records: Sequence[Record | None]) -> None:
        free = []
        with self.lock:
            for record in records:
                if record is not None:
                    record.readers -= 1
                    if record.gone and not record.readers:
                        free.append(record.buffer)
        for buffer in free:
            buffer.release()

    def claim(
        self, keys: Sequence[Key], sizes: Sequence[int], parents: Sequence[Key | None], places: Sequence[int],
        *, rival: bool = False, infos: Sequence[RecordInfo | None] = (),
    ) -> Claimed:  # fmt: skip
        """Announce the records of a batch that are not there yet.

        Args:
            keys, sizes, parents: of the whole batch; bytes, and see `Write.parent`.
            infos: of the whole batch, see `Write.info`; empty: nothing is known.
            places: which of them to look at.
            rival: take also those that somebody else is storing: who commits first has stored it.

        Raises:
            ClosedError: the store is closed.
        """
        records, pending, policy = self.records, self.pending, self.policy
        largest = self.pool.largest
        reservation = Reservation(self, keys, sizes, parents)
        mine = reservation._mine
        there: list[int] = []
        others: list[int] = []
        too_large: list[int] = []
        with self.lock:
            self.check("put")
            asked = keys if len(places) == len(keys) else [keys[place] for place in places]
            if self.expiry.ttl != math.inf:
                self.look_locked(asked, use=True)
            for place in places:
                key, nbytes = keys[place], sizes[place]
                if key in records:
                    there.append(place)
                elif key in pending and (not rival or key in mine):
                    others.append(place)
                elif nbytes > largest:
                    too_large.append(place)
                else:
                    mine[key] = place
                    if key in pending:
                        reservation._rival = True
                    else:
                        pending[key] = reservation
                        # Known to the policy before it is asked for room, so that the parent is not taken for a tail.
                        policy.admit(key, nbytes, parent=parents[place], info=infos[place] if infos else None)
            policy.touch(asked)
        reservation._settle()
        return Claimed(reservation, there, others, too_large)

    def wait_for_others(self, keys: Sequence[Key], deadline: float) -> None:
        """Until one of `keys`, which others are storing, is no longer being stored; until the deadline at most."""
        with self.lock:
            while not self.closed and all(key in self.pending for key in keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self.changed.wait(None if left > threading.TIMEOUT_MAX else left)

    def remove_locked(self, key: Key) -> bool:
        record = self.records.pop(key, None)
        if record is None:
            return False
        if key not in self.pending:  # else it was a rival's, and the claim of the first writer stands
            self.policy.forget(key)
        self.nbytes -= record.found.nbytes
        if self.note is not None:
            self._left.append(key)
        record.gone = True
        if not record.readers:
            record.buffer.release()
        return True

    def tell_locked(self, came: Sequence[Key] = ()) -> None:
        """Tell `note` what has gone since it was told last, then what came."""
        if self.note is not None:
            if self._left:
                left, self._left = self._left, []
                self.note("evict", left)
            if came:
                self.note("admit", came)

    def make_room(self, sizes: Sequence[int], mine: Collection[Key], held: int = 0) -> list[Buffer] | bool:
        """Memory for records of `sizes` bytes, all or none; evicts what it must, but nothing of `mine`.
        If there is none: whether that may change by waiting. `held`: buffers that the asker itself holds."""
        spans = [span(n) for n in sizes]
        busy = False
        with self.lock:
            self.check("put")
            stats = self.pool.stats()
            wanted = sum(spans) - (stats.total - stats.in_use)
            victims = self.policy.victims(keep={*self.pending, *mine})
            while True:
                key = next(victims, None) if wanted > 0 else None
                if key is None:
                    try:
                        return self.pool.acquire_many(sizes)
                    except PoolExhausted:
                        if wanted > 0:
                            break
                        wanted = max(spans)  # there is enough, but in pieces
                        continue
                record = self.records[key]
                if record.readers or not record.buffer.exclusive:
                    busy = True
                    continue
                wanted -= span(record.buffer.nbytes)
                self.remove_locked(key)
                self.evicted += 1
            # Others' writes under way, and memory of removed records that is still read or leased.
            others = any(key not in mine for key in self.pending)
            return busy or others or self.pool.stats().buffers - held > len(self.records)

    def wait_for_room(self, nbytes: int, mine: Collection[Key], until: float, held: int = 0) -> Buffer | None:
        """Memory for one record; None if there was none by `until`, or waiting is in vain."""
        while True:
            room = self.make_room([nbytes], mine, held)
            if isinstance(room, list):
                return room[0]
            left = until - time.monotonic()
            if not room or left <= 0:
                return None
            with self.lock:
                self.changed.wait(min(left, _LOOK_AGAIN_S))

    def replace(self, key: Key, data: memoryview, until: float) -> bool:
        """Give a record other bytes, for whoever reads it from now on. False: it is not there.

        Args:
            until: `time.monotonic()` seconds until which it waits for memory.

        Raises:
            PoolExhausted: there is no memory; the record is as it was.
        """
        buffer = self.wait_for_room(len(data), (key,), until)
        if buffer is None:
            raise PoolExhausted(f"no memory for {len(data)} bytes became free", backend=self.name, operation="put")
        buffer.view[:] = data
        unused = buffer
        with self.lock:
            old = self.records.get(key)
            if old is not None and not self.closed:
                record = Record(buffer, buffer.view, self.size_outcome(len(data)), old.used, old.expires)
                record.read = old.read
                self.records[key] = record
                self.nbytes += len(data) - old.found.nbytes
                self.policy.admit(key, len(data))
                old.gone = True
                unused = old.buffer
            if old is None or not old.readers or unused is buffer:
                unused.release()
            self.changed.notify_all()
        return unused is not buffer

    def expire(self) -> int:
        """Remove the records whose time has come; returns how many."""
        if self.expiry.ttl == math.inf:
            return 0
        with self.lock:
            items = [*self.records.items()]
        now = self.expiry.clock()
        due = [key for key, record in items if record.expires <= now]
        del items
        count = 0
        for at in range(0, len(due), _SLICE):
            with self.lock:
                for key in due[at : at + _SLICE]:
                    record = self.records.get(key)
                    if record is not None and record.expires <= now:
                        count += self.remove_locked(key)
                self.changed.notify_all()
        with self.lock:
            self.expired += count
        return count

    def shut_down(self, why: str) -> None:
        """Drop everything. Work under way ends by itself; its memory goes with it."""
        with self.lock:
            if self.closed:
                return
            self.closed = why
            records = [*self.records.values()]
            self.records.clear()
            self.nbytes = 0
            for record in records:
                record.gone = True
            idle = [record.buffer for record in records if not record.readers]
            self.policy = make_policy("none")
            self.changed.notify_all()
        for buffer in idle:
            buffer.release()
        self.pool.close()


_live: weakref.WeakSet[MemoryStore] = weakref.WeakSet()
_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Locks may have been held by threads that the child does not have, and records half written."""
    global _named_lock  # noqa: PLW0603
    _named_lock = threading.Lock()
    _named.clear()
    for store in list(_live):
        store.lock = threading.Lock()
        store.changed = threading.Condition(store.lock)
        store.closed = "this memory store was opened before os.fork(); open one in the child process"


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_named(name: str, nbytes: int, policy: str) -> MemoryStore:
    """The open store `memory://name` of this process, with one more handle, or a new one.

    Raises:
        ConfigError: it is open with other options.
    """
    with _named_lock:
        store = _named.get(name)
        if store is not None:
            with store.lock:
                if not store.closed:
                    if store.asked != (nbytes, policy):
                        raise ConfigError(
                            f"memory://{name} is open in this process with bytes={store.asked[0]} and "
                            f"policy={store.asked[1]}; open it with the same options, or choose another name"
                        )
                    store.handles += 1
                    return store
        store = _named[name] = MemoryStore(nbytes, policy, f"memory://{name}")
        return store


def drop_name(store: MemoryStore) -> None:
    """Forget the name of a store that is closed."""
    with _named_lock:
        for name in [name for name, each in _named.items() if each is store]:
            del _named[name]
