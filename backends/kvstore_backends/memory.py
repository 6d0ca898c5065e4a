"""`memory://`: records in memory of this process.

    memory://?bytes=1GiB&policy=lru      a store of its own
    memory://NAME?bytes=…                the same store for everybody in this process who opens that name

Option `bytes` takes sizes with units (64KiB, 1.5GiB, 4096). It is a hard limit: what the records occupy (their sizes
rounded up to 64 bytes), what is being written, and what was removed while somebody still leases it together never
exceed it. The memory is mapped at open and backed by pages when first used. On top of it Python keeps about 600 bytes
per record. A named store lives until the last of its openers closes it; all must open it with the same options.

One copy on put, one on get, none on `lease`. No lock is held while bytes are copied, and large copies release the GIL.
A batch takes the lock twice: once to find its records and keep their memory from being given away, once to let go.

Room is made by the eviction policy (`kvstore.eviction`). Records that are leased, or being read or written at the
moment, are passed over: removing them would give no memory back. If nothing else is left a put waits for them, until
its deadline and never longer than 5 seconds, then ends in `PoolExhausted`. A put does not evict records of its own
batch, nor those that lead up to them; what it cannot store beside them is refused.

`get_into` and `lease` make records recent, as does a put that finds its record there; `stat` does not.

`quarantine` removes only records that were read since they were put: a late report about a record that was replaced
meanwhile is MISS, unless the new one was read as well. It keeps nothing aside, for that would take from the limit.

After `os.fork()` a store that was opened before raises `ClosedError` in the child; open another one there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.backend import EXISTS, MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Write
from kvstore.buffers import Buffer, copy_bytes
from kvstore.errors import ClosedError, ConfigError, PermanentError, PoolExhausted, TransientError
from kvstore.eviction import POLICIES
from kvstore.keys import Key
from kvstore.options import Option
from kvstore.registry import BackendURL

from ._memory_reservation import ALIGNMENT, Expiry, Record, Reservation
from ._memory_store import MemoryStore, drop_name, open_named

__all__ = ["MemoryBackend", "MemoryStats"]

_SMALL_BYTES = 32 << 10  # below this a copy is cheaper than looking at the clock or releasing the GIL
_LONGEST_WAIT_S = 5.0  # for memory, even if the deadline is later
_PAGE_RECORDS = 1000
_WRONG_VIEW = (TypeError, ValueError, BufferError, NotImplementedError)  # what a copy says of views it cannot use

_UNDECIDED = Outcome.failed(TransientError("the record was not reached"))


class MemoryStats(NamedTuple):
    """What a `MemoryBackend` holds.

    Attributes:
        records: number of records.
        nbytes: sum of their sizes, in bytes.
        capacity: the limit, in bytes.
        in_use: bytes of the limit that are taken: by records, by writes under way, by leases.
        evicted: records removed so far to make room.
        expired: records removed so far because of their age.
    """

    records: int
    nbytes: int
    capacity: int
    in_use: int
    evicted: int
    expired: int


class MemoryBackend(Backend):
    """Records in memory of this process. See the module's docstring.

    Args:
        nbytes: the limit in bytes; at least 64.
        policy: a name of `kvstore.eviction.POLICIES`; "none" refuses new records when full.
        name: for errors and metrics.
        shared: the memory is shared memory (memfd), which other processes of this host can map.
        expiry: when records go by their age; None: never.

    Raises:
        ConfigError: unknown policy, or a limit that is too small or cannot be mapped.
    """

    options = (
        Option("bytes", "size", 1 << 30, "Limit for records and leases together.", minimum=ALIGNMENT),
        Option(
            "policy", "choice", "lru", "What goes when the limit is reached; `none`: new records are refused.",
            choices=tuple(POLICIES),
        ),
    )  # fmt: skip
    capabilities = (
        Capability.RANGED_READ
        | Capability.NATIVE_BATCH
        | Capability.LEASE
        | Capability.LIST
        | Capability.CAPACITY
        | Capability.LANDING
    )

    def __init__(
        self,
        nbytes: int = 1 << 30,
        *,
        policy: str = "lru",
        name: str = "memory",
        shared: bool = False,
        expiry: Expiry | None = None,
    ) -> None:
        self._use(MemoryStore(nbytes, policy, name, shared=shared, expiry=expiry))

    def _use(self, memory: MemoryStore) -> None:
        self._memory = memory
        self._closed = False
        self.capabilities = type(self).capabilities
        if memory.expiry.ttl != math.inf:
            self.capabilities |= Capability.TTL
        self.name = memory.name
        self.limits = Limits(
            max_value_bytes=memory.pool.largest,
            lanes=min(8, max(2, os.cpu_count() or 1)),
            preferred_io_bytes=1 << 20,
        )

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> MemoryBackend:
        """A store of its own, or for `memory://NAME` the one of that name in this process.

        Raises:
            ConfigError: the URL has a path, or the store of that name is open with other options.
        """
        if url.path not in {"", "/"}:
            raise ConfigError(f"memory:// takes no path, but {url.path!r} was given; write memory:// or memory://NAME")
        nbytes, policy, name = options["bytes"], options["policy"], url.authority
        if not name:
            return cls(nbytes, policy=policy)
        backend = cls.__new__(cls)
        backend._use(open_named(name, nbytes, policy))
        return backend

    @property
    def store(self) -> MemoryStore:
        """What holds the records, for a node server: it receives them from the wire straight into their memory."""
        return self._memory

    def _check(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("the memory store is closed", backend=self.name, operation=operation)

    def _late(self, operation: str) -> Outcome:
        return Outcome.failed(TransientError("the deadline passed", backend=self.name, operation=operation))

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self._check("stat")
        if time.monotonic() >= deadline:
            return [self._late("stat")] * len(keys)
        memory = self._memory
        with memory.lock:
            memory.check("stat")
            records = memory.look_locked(keys)
        return [MISS if record is None else record.found for record in records]

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self._check("get")
        if time.monotonic() >= deadline:
            return [self._late("get")] * len(reads)
        memory = self._memory
        records = memory.find([read[0] for read in reads], "get")
        outcomes: list[Outcome] = []
        try:
            for (key, dst, offset, landed), record in zip(reads, records, strict=True):
                if record is None:
                    outcomes.append(MISS)
                    continue
                found = record.found
                size = len(dst)
                try:
                    if offset == 0 and size == found[1] and size < _SMALL_BYTES:
                        dst[:] = record.view
                        outcomes.append(found)
                        if landed is not None:
                            landed()
                        continue
                    if offset < 0:
                        raise ValueError("negative offset")
                    size = max(0, min(size, found[1] - offset))
                    if size >= _SMALL_BYTES and time.monotonic() >= deadline:
                        outcomes.append(self._late("get"))
                        continue
                    copy_bytes(dst[:size], record.view[offset : offset + size])
                    outcomes.append(memory.size_outcome(size))
                    if landed is not None:
                        landed()
                except _WRONG_VIEW as error:
                    text = f"the destination is not a writable flat view of bytes, or the offset is wrong: {error}"
                    wrong = PermanentError(text, backend=self.name, operation="get", key=key, cause=error)
                    outcomes.append(Outcome.failed(wrong))
        finally:
            memory.let_go(records)
        return outcomes

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self._check("put")
        if not writes:
            return []
        memory = self._memory
        keys, sources, parents, infos = zip(*writes, strict=True)
        sizes = [len(src[0]) if len(src) == 1 else sum(map(len, src)) for src in sources]
        outcomes = [_UNDECIDED] * len(writes)
        todo: Sequence[int] = range(len(writes))
        while todo:
            if time.monotonic() >= deadline:
                late = self._late("put")
                for place in todo:
                    outcomes[place] = late
                break
            reservation, there, todo, too_large = memory.claim(keys, sizes, parents, todo, infos=infos)
            for place in there:
                outcomes[place] = EXISTS
            for place in too_large:
                text = f"a record of {sizes[place]} bytes; this store has {memory.pool.largest} bytes in all"
                error = PermanentError(text, backend=self.name, operation="put", key=keys[place])
                outcomes[place] = Outcome.failed(error)
            if reservation.places:
                try:
                    self._store(writes, reservation, outcomes, deadline)
                finally:
                    reservation.close()
            if todo:  # the same keys, being stored by others or before in this batch: EXISTS, unless that fails
                memory.wait_for_others([keys[place] for place in todo], deadline)
        return outcomes

    def _store(
        self, writes: Sequence[Write], reservation: Reservation, outcomes: list[Outcome], deadline: float
    ) -> None:  # fmt: skip
        done = 0
        for wave in reservation.rooms(min(deadline, time.monotonic() + _LONGEST_WAIT_S)):
            self._fill(writes, reservation, wave, outcomes, deadline)
            done += len(wave)
        if done < len(reservation.places):
            for place, nbytes in zip(reservation.places, reservation.sizes, strict=True):
                if outcomes[place] is _UNDECIDED:
                    text = f"no room for {nbytes} bytes: the store is full with what is leased, in use, of this batch, "
                    error = PoolExhausted(f"{text}or kept", backend=self.name, operation="put", key=writes[place].key)
                    outcomes[place] = Outcome.failed(error)

    def _fill(
        self, writes: Sequence[Write], reservation: Reservation, wave: Sequence[int], outcomes: list[Outcome],
        deadline: float,
    ) -> None:  # fmt: skip
        """Copy records into their memory and make them visible."""
        memory = self._memory
        places, sizes, views = reservation.places, reservation.sizes, reservation.views
        failed: list[int] = []
        for index in wave:
            place, view, size = places[index], views[index], sizes[index]
            key, src, _, _ = writes[place]
            if size >= _SMALL_BYTES and time.monotonic() >= deadline:
                outcomes[place] = self._late("put")
                failed.append(index)
                continue
            try:
                if len(src) != 1:
                    at = 0
                    for part in src:
                        copy_bytes(view[at : at + len(part)], part)
                        at += len(part)
                elif size < _SMALL_BYTES:
                    view[:] = src[0]
                else:
                    copy_bytes(view, src[0])
            except _WRONG_VIEW as error:
                text = f"the source is not made of flat views of bytes: {error}"
                wrong = PermanentError(text, backend=self.name, operation="put", key=key, cause=error)
                outcomes[place] = Outcome.failed(wrong)
                failed.append(index)
                continue
            outcomes[place] = memory.size_outcome(size)
        if failed:
            reservation.give_back(failed)
            wave = sorted({*wave}.difference(failed))
        for index in reservation.commit(wave):
            outcomes[places[index]] = EXISTS

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._remove(keys, "delete", deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._remove(keys, "quarantine", deadline, only_read=True)

    def _remove(
        self, keys: Sequence[Key], operation: str, deadline: float, *, only_read: bool = False
    ) -> list[Outcome]:  # fmt: skip
        self._check(operation)
        if time.monotonic() >= deadline:
            return [self._late(operation)] * len(keys)
        memory = self._memory
        with memory.lock:
            memory.check(operation)
            records = memory.look_locked(keys)
            found = [record is not None and (record.read or not only_read) for record in records]
            outcomes = [OK if yes and memory.remove_locked(key) else MISS for key, yes in zip(keys, found, strict=True)]
            memory.changed.notify_all()
        return outcomes

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        self._check("lease")
        if time.monotonic() >= deadline:
            return [None] * len(keys)
        memory = self._memory
        records = memory.find(keys, "lease")
        try:
            return [None if record is None else record.buffer.readonly() for record in records]
        finally:
            memory.let_go(records)

    def stats(self) -> MemoryStats:
        """What it holds right now. Raises `ClosedError`."""
        self._check("stats")
        memory = self._memory
        with memory.lock:
            memory.check("stats")
            pool = memory.pool.stats()
            return MemoryStats(
                len(memory.records), memory.nbytes, pool.total, pool.in_use, memory.evicted, memory.expired
            )

    def close(self) -> None:
        memory = self._memory
        with memory.lock:
            if self._closed:
                return
            self._closed = True
            memory.handles -= 1
            last = memory.handles == 0
        if last:
            memory.shut_down("the memory store is closed")
            drop_name(memory)

    def __repr__(self) -> str:
        return f"<MemoryBackend {self.name!r} of {self._memory.pool.nbytes} bytes{', closed' * self._closed}>"

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        self._check("list")
        memory = self._memory
        with memory.lock:
            memory.check("list")
            items = [*memory.records.items()]
        if memory.expiry.ttl != math.inf:
            now = memory.expiry.clock()
            items = [item for item in items if item[1].expires > now]
        return self._pages(items, deadline)

    def _pages(self, items: Sequence[tuple[Key, Record]], deadline: float) -> Iterator[Sequence[KeyInfo]]:
        for at in range(0, len(items), _PAGE_RECORDS):
            self._check("list")
            if time.monotonic() >= deadline:
                raise TransientError("the deadline passed", backend=self.name, operation="list")
            yield [KeyInfo(key, each.found.nbytes, each.used) for key, each in items[at : at + _PAGE_RECORDS]]
