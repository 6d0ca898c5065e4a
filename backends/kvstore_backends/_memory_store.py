"""The records of a `MemoryBackend`, their memory, and who uses it. See `kvstore_backends.memory`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from kvstore.backend import Outcome, Status
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.eviction import make_policy
from kvstore.keys import Key

__all__ = ["ALIGNMENT", "MemoryStore", "Record", "drop_name", "open_named"]

ALIGNMENT = 64  # a cache line; larger ones would waste most of the memory of tiny records
_LOOK_AGAIN_S = 0.01  # the end of a lease is not announced, so a put that waits for it looks now and then
_KNOWN_SIZES = 4096


def _span(nbytes: int) -> int:
    """What a record of `nbytes` bytes occupies."""
    return (max(nbytes, 1) + ALIGNMENT - 1) & -ALIGNMENT


class Record:
    """`readers` counts reads under way; `gone` says that the last of them has to release the memory."""

    __slots__ = ("buffer", "found", "gone", "read", "readers", "used", "view")

    def __init__(self, buffer: Buffer, view: memoryview, found: Outcome, used: float) -> None:
        self.buffer = buffer
        self.view = view
        self.found = found  # OK with its size; shared by all records of that size
        self.used = used
        self.read = False  # ever
        self.readers = 0
        self.gone = False


class MemoryStore:
    """What several `MemoryBackend`s of one name share. Methods that end in `_locked` want `lock` held.

    Raises:
        ConfigError: unknown policy, or a limit that is too small or cannot be mapped.
    """

    def __init__(self, nbytes: int, policy: str, name: str) -> None:
        if nbytes < ALIGNMENT:
            raise ConfigError(f"a memory store needs at least {ALIGNMENT} bytes, not {nbytes}")
        self.name = name
        self.asked = (nbytes, policy)
        self.policy = make_policy(policy)
        self.pool = BufferPool(nbytes & -ALIGNMENT, alignment=ALIGNMENT)
        self.records: dict[Key, Record] = {}
        self.pending: dict[Key, object] = {}  # being stored; by whom
        self.handles = 1
        self.closed = ""  # why, if it is
        self.evicted = 0
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

    def find(self, keys: Sequence[Key], operation: str) -> list[Record | None]:
        """The records of `keys`, made recent, and with one more reader each. Give the list to `let_go`."""
        now = time.time()
        with self.lock:
            self.check(operation)
            records = [*map(self.records.get, keys)]
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

    def remove_locked(self, key: Key) -> bool:
        record = self.records.pop(key, None)
        if record is None:
            return False
        self.policy.forget(key)
        record.gone = True
        if not record.readers:
            record.buffer.release()
        return True

    def make_room(self, sizes: Sequence[int], mine: Mapping[Key, int]) -> list[Buffer] | bool:
        """Memory for records of `sizes` bytes, all or none; evicts what it must, but nothing of `mine`.
        If there is none: whether that may change by waiting."""
        spans = [_span(n) for n in sizes]
        busy = False
        with self.lock:
            self.check("put")
            stats = self.pool.stats()
            wanted = sum(spans) - (stats.total - stats.in_use)
            victims = self.policy.victims(keep=self.pending.keys() | mine.keys())
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
                wanted -= _span(record.buffer.nbytes)
                self.remove_locked(key)
                self.evicted += 1
            # Others' writes under way, and memory of removed records that is still read or leased.
            return busy or len(self.pending.keys() - mine.keys()) > 0 or self.pool.stats().buffers > len(self.records)

    def wait_for_room(self, nbytes: int, mine: Mapping[Key, int], until: float) -> Buffer | None:
        """Memory for one record; None if there was none by `until`, or waiting is in vain."""
        while True:
            room = self.make_room([nbytes], mine)
            if isinstance(room, list):
                return room[0]
            left = until - time.monotonic()
            if not room or left <= 0:
                return None
            with self.lock:
                self.changed.wait(min(left, _LOOK_AGAIN_S))

    def shut_down(self, why: str) -> None:
        """Drop everything. Work under way ends by itself; its memory goes with it."""
        with self.lock:
            if self.closed:
                return
            self.closed = why
            records = [*self.records.values()]
            self.records.clear()
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
