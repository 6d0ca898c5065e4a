"""How a record comes into a `MemoryStore`, in three steps, whoever brings its bytes: `MemoryStore.claim` announces the
keys, `Reservation.rooms` takes memory for them (evicting what must go), and once the bytes are there
`Reservation.commit` makes them visible, all at once. A reservation that is closed before that gives its memory back and
frees the keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.backend import Outcome
from kvstore.buffers import Buffer
from kvstore.errors import ClosedError, PoolExhausted
from kvstore.keys import Key

if TYPE_CHECKING:
    from ._memory_store import MemoryStore

__all__ = ["ALIGNMENT", "Claimed", "Expiry", "Record", "Reservation", "span", "spans"]

ALIGNMENT = 64  # a cache line; larger ones would waste most of the memory of tiny records
_NO_MEMORY = memoryview(b"")


def span(nbytes: int) -> int:
    """What a record of `nbytes` bytes occupies."""
    return (max(nbytes, 1) + ALIGNMENT - 1) & -ALIGNMENT


def spans(sizes: Iterable[int]) -> int:
    """The sum of `span` of all `sizes`, without a call for each."""
    return sum([((nbytes if nbytes > 1 else 1) + ALIGNMENT - 1) & -ALIGNMENT for nbytes in sizes])


class Expiry(NamedTuple):
    """When records go by age.

    Attributes:
        ttl: seconds; math.inf: never.
        from_use: counted from the last get or put, else from the put that stored the record.
        clock: seconds, only ever compared with each other.
    """

    ttl: float = math.inf
    from_use: bool = True
    clock: Callable[[], float] = time.time


class Record:
    """`readers` counts reads under way; `gone` says that the last of them has to release the memory."""

    __slots__ = ("buffer", "expires", "found", "gone", "read", "readers", "used", "view")

    def __init__(self, buffer: Buffer, view: memoryview, found: Outcome, used: float, expires: float) -> None:
        self.buffer = buffer
        self.view = view
        self.found = found  # OK with its size; shared by all records of that size
        self.used = used
        self.expires = expires
        self.read = False  # ever
        self.readers = 0
        self.gone = False


class Claimed(NamedTuple):
    """What `MemoryStore.claim` found of a batch: places in it.

    Attributes:
        there: a record of the key is there.
        others: the key is being stored by somebody else, or stands before in this batch.
        too_large: more than the store could ever hold.
    """

    reservation: Reservation
    there: list[int]
    others: list[int]
    too_large: list[int]


class Reservation:
    """Keys that one writer has announced, and memory for their records. Used by one thread at a time.

    Attributes:
        places: where each of its records stands in the batch; `keys`, `sizes`, `parents` and `views` go along.
        views: the memory of each record, writable, once `rooms` has yielded its index.
    """

    __slots__ = (
        "_buffers", "_ended", "_mine", "_overtaken", "_rival", "_store", "keys", "parents", "places", "sizes", "views",
    )  # fmt: skip

    def __init__(
        self, store: MemoryStore, keys: Sequence[Key], sizes: Sequence[int], parents: Sequence[Key | None]
    ) -> None:  # fmt: skip
        self._store = store
        self._mine: dict[Key, int] = {}  # places by key
        self.parents = parents
        self._ended = False
        self._rival = False  # whether others have claimed one of its keys before
        self._overtaken = False  # whether one of them has stored one before us
        self.places: Sequence[int] = ()
        self.keys = keys
        self.sizes = sizes
        self.views: list[memoryview] = []
        self._buffers: list[Buffer | None] = []  # None: none yet, or no longer

    @property
    def contested(self) -> bool:
        """Whether somebody else may have stored one of its keys, so that it may lie elsewhere by now."""
        return self._rival or self._overtaken

    def _settle(self) -> None:
        """Of the batch, keep what was claimed."""
        places = self.places = [*self._mine.values()]
        if len(places) != len(self.keys):
            self.keys = [*self._mine]
            self.sizes = [self.sizes[place] for place in places]
            self.parents = [self.parents[place] for place in places]

    def rooms(self, until: float) -> Iterator[Sequence[int]]:
        """Take memory: yields the indices of records that have got theirs. All at once where that is possible;
        else one after the other, as many as there is room for, the head of the batch first.

        Args:
            until: `time.monotonic()` seconds until which it waits for memory that is in use.

        Raises:
            ClosedError: the store is closed.
        """
        store, sizes = self._store, self.sizes
        try:
            room: list[Buffer] | bool = store.pool.acquire_many(sizes)
        except PoolExhausted:
            room = store.make_room(sizes, self._mine)
        if isinstance(room, list):
            self._buffers = [*room]
            self.views = [buffer.view for buffer in room]
            yield range(len(room))
            return
        self._buffers = [None] * len(sizes)
        self.views = [_NO_MEMORY] * len(sizes)
        held = 0
        for index, nbytes in enumerate(sizes):
            buffer = store.wait_for_room(nbytes, self._mine, until, held)
            if buffer is not None:
                self._buffers[index] = buffer
                self.views[index] = buffer.view
                yield (index,)
                held += self._buffers[index] is buffer  # not if it was committed meanwhile

    def commit(
        self, indices: Sequence[int], *, born: Sequence[float] = (), held: dict[Key, Record] | None = None
    ) -> list[int]:  # fmt: skip
        """Make records visible whose bytes are there, all at once.

        Args:
            born: when each of them was put, on the clock of `MemoryStore.expiry`; empty: now.
            held: they are put here with a reader each, for `MemoryStore.let_go`, and count as read; None: they are
                not.

        Returns:
            indices of those that somebody else has stored meanwhile; their memory is given back.

        Raises:
            ClosedError: the store is closed, or one of them was committed or given back before.
        """
        store, keys, sizes, buffers, views = self._store, self.keys, self.sizes, self._buffers, self.views
        now, expires, outcome = time.time(), store.expires(), store.size_outcome
        ready: dict[Key, Record] = {}
        for index in indices:
            buffer = buffers[index]
            if buffer is None:
                raise ClosedError("this record was committed or given back before", backend=store.name, operation="put")
            ready[keys[index]] = Record(buffer, views[index], outcome(sizes[index]), now, expires)
        for index, when in zip(indices, born, strict=bool(born)):
            ready[keys[index]].expires = when + store.expiry.ttl
        lost: list[int] = []
        records, pending, policy = store.records, store.pending, store.policy
        with store.lock:
            store.check("put")
            if self._rival or not records.keys().isdisjoint(ready):
                for index in indices:
                    key = keys[index]
                    if key in records:
                        lost.append(index)
                        del ready[key]
                        continue
                    holder = pending.get(key)
                    if holder is self:
                        del pending[key]
                    elif holder is not None:
                        holder._overtaken = True
                    if key not in policy:  # the first to claim it gave up
                        policy.admit(key, sizes[index], parent=self.parents[index])
            else:
                for key in ready:
                    del pending[key]
            records.update(ready)
            store.nbytes += sum([record.found.nbytes for record in ready.values()])
            if store.note is not None:
                store.tell_locked([*ready])
            if held is not None:
                for record in ready.values():
                    record.readers, record.read = 1, True
                held.update(ready)
            store.changed.notify_all()
        self.give_back(lost)
        self._ended = len(ready) == len(self._mine)
        if len(indices) == len(buffers):
            self._buffers = [None] * len(buffers)
        else:
            for index in indices:
                buffers[index] = None
        return lost

    def give_back(self, indices: Iterable[int]) -> None:
        """Give back the memory of records that will not be committed. Their keys stay claimed until `close`."""
        buffers = self._buffers
        for index in indices:
            buffer = buffers[index]
            if buffer is not None:
                buffers[index] = None
                buffer.release()

    def close(self) -> None:
        """Give back what was not committed, and free the keys. May be called twice."""
        if self._ended:
            return
        self._ended = True
        store = self._store
        self.give_back(range(len(self._buffers)))
        with store.lock:
            for key in self._mine:
                if store.pending.get(key) is self:
                    del store.pending[key]
                    if key not in store.records:
                        store.policy.forget(key)
            store.changed.notify_all()
