"""`DiskTier`: the folder below a node's memory. Records are written behind, and read back into reserved memory.

A put is over when the record is in memory. One thread writes it to the folder later, from the same memory: the record
is pinned until then. What waits is bounded in bytes; what does not fit is counted and stays in memory only.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.backend import MISS, Backend, KeyInfo, Outcome, Read, Write
from kvstore.errors import ClosedError, ConfigError, KVStoreError, TransientError
from kvstore.eviction import FIFOPolicy
from kvstore.keys import Key
from kvstore.registry import BackendURL, open_backend, parse_url

from ._memory_reservation import Expiry, Record
from ._memory_store import MemoryStore
from .file.naming import record_path

__all__ = ["DiskCounts", "DiskTier", "Loaded"]

logger = logging.getLogger("kvstore.node")

_BATCH_BYTES = 32 << 20
_BATCH_RECORDS = 256
_WRITE_S = 60.0  # for one batch
_SWEEP_S = 600.0  # for one walk
_ROOM_S = 5.0  # longest wait for memory
_LAG = 0.1  # of a ttl, by which a use in memory may be unknown to the folder


class DiskCounts(NamedTuple):
    """What became of records on their way to the folder, and back.

    Attributes:
        written: records stored there.
        dropped: records that did not fit into the backlog, so are in memory only.
        failed: records that the folder refused.
        loaded: records read back into memory.
        backlog: bytes that wait now.
    """

    written: int
    dropped: int
    failed: int
    loaded: int
    backlog: int


class Loaded(NamedTuple):
    """What `DiskTier.load` brought.

    Attributes:
        records: with one reader each, for `MemoryStore.let_go`.
        failures: why others could not be read.
        elsewhere: records that somebody else has brought into memory meanwhile.
    """

    records: dict[Key, Record]
    failures: dict[Key, KVStoreError]
    elsewhere: list[Key]


class _Waiting(NamedTuple):
    record: Record
    parent: Key | None


class DiskTier:
    """A folder below a `MemoryStore`.

    Args:
        url: `file:///folder?…`, with the options of that backend.
        store: the memory above it.
        backlog_bytes: most bytes that wait to be written.

    Raises:
        ConfigError: not a file URL, its options are wrong, or they cannot go together with `store.expiry`.
    """

    def __init__(self, url: str, store: MemoryStore, *, backlog_bytes: int) -> None:
        parsed = parse_url(url)
        if parsed.scheme != "file":
            raise ConfigError(f"the disk below a node is a folder, file:///…, not {parsed.scheme}://")
        self._folder = parsed.path
        self._store = store
        self._expiry: Expiry = store.expiry
        self._check_expiry(parsed)
        self._backlog_bytes = backlog_bytes
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._writing: frozenset[Key] = frozenset()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog = self._written = self._dropped = self._failed = self._loaded = 0
        self._expired = 0
        self._closing = False
        self.backend: Backend = open_backend(parsed)
        self._thread = threading.Thread(target=self._run, name="kvstore-node-disk", daemon=True)
        self._thread.start()

    def _check_expiry(self, url: BackendURL) -> None:
        capped = "bytes" in url.options and url.options.get("policy", "lru") != FIFOPolicy.name
        if self._expiry.ttl != math.inf and not self._expiry.from_use and capped:
            raise ConfigError(
                "ttl_from=put needs the time of the put, which a folder with a cap keeps with policy=fifo only: "
                "there a read writes the time of last use. Give the disk policy=fifo, or use ttl_from=use"
            )

    # On the way down.

    def offer(self, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
        """Have records written that were just put into memory, as far as the backlog allows."""
        records = self._store.pin(keys)
        refused: list[Record] = []
        with self._lock:
            for key, record, parent in zip(keys, records, parents, strict=True):
                if record is None:  # gone again
                    continue
                nbytes = record.found.nbytes
                if self._closing or key in self._waiting or self._backlog + nbytes > self._backlog_bytes:
                    self._dropped += key not in self._waiting
                    refused.append(record)
                    continue
                self._waiting[key] = _Waiting(record, parent)
                self._backlog += nbytes
            self._changed.notify_all()
        self._store.let_go(refused)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                batch, nbytes = self._next_batch()
            try:
                written, failed = self._write(batch)
            finally:
                self._store.let_go([waiting.record for waiting in batch.values()])
                with self._lock:
                    self._backlog -= nbytes
                    self._writing = frozenset()
                    self._changed.notify_all()
            with self._lock:
                self._written += written
                self._failed += failed

    def _next_batch(self) -> tuple[dict[Key, _Waiting], int]:
        batch: dict[Key, _Waiting] = {}
        nbytes = 0
        while self._waiting and len(batch) < _BATCH_RECORDS:
            key, waiting = next(iter(self._waiting.items()))
            if batch and nbytes + waiting.record.found.nbytes > _BATCH_BYTES:
                break
            batch[key] = waiting
            nbytes += waiting.record.found.nbytes
            del self._waiting[key]
        self._writing = frozenset(batch)
        return batch, nbytes

    def _write(self, batch: dict[Key, _Waiting]) -> tuple[int, int]:
        writes = [Write(key, [waiting.record.view], waiting.parent) for key, waiting in batch.items()]
        try:
            outcomes = self.backend.put(writes, deadline=time.monotonic() + _WRITE_S)
        except ClosedError:
            return 0, len(writes)
        failed = [outcome for outcome in outcomes if not outcome.stored]
        if failed:
            logger.debug("%d of %d records were not written: %s", len(failed), len(writes), failed[0].error)
        return len(writes) - len(failed), len(failed)

    def _recall(self, keys: Sequence[Key], deadline: float) -> bool:
        """Have records not written any more. False if one is being written and was not done by the deadline."""
        with self._lock:
            recalled = [self._waiting.pop(key) for key in keys if key in self._waiting]
            self._backlog -= sum(waiting.record.found.nbytes for waiting in recalled)
            wanted = set(keys)
            while not wanted.isdisjoint(self._writing):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(None if left > threading.TIMEOUT_MAX else left)
            done = wanted.isdisjoint(self._writing)
        self._store.let_go([waiting.record for waiting in recalled])
        return done

    # On the way up.

    def sizes(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """As `Backend.stat`, without records whose time has come."""
        outcomes = self.backend.stat(keys, deadline=deadline)
        if self._expiry.ttl != math.inf:
            now = self._expiry.clock()
            for index, outcome in enumerate(outcomes):
                if outcome.ok and now - self._age_mark(keys[index]) >= self._expiry.ttl:
                    outcomes[index] = MISS
        return outcomes

    def _age_mark(self, key: Key) -> float:
        """When the record was put, or used last; seconds since the epoch, 0.0 if it is gone."""
        try:
            return os.stat(f"{self._folder}/{record_path(key)}").st_mtime
        except OSError:
            return 0.0

    def load(self, keys: Sequence[Key], sizes: Sequence[int], deadline: float) -> Loaded:
        """Read records into the memory above. `keys` are distinct, `sizes` as `sizes` told.

        What is gone by now is in no part of the answer.
        """
        store, loaded = self._store, Loaded({}, {}, [])
        todo: Sequence[int] = range(len(keys))
        nobody: list[Key | None] = [None] * len(keys)
        while todo:
            if time.monotonic() >= deadline:
                late = TransientError("the deadline passed", backend=self.backend.name, operation="get")
                loaded.failures.update((keys[place], late) for place in todo)
                break
            reservation, there, todo, too_large = store.claim(keys, sizes, nobody, todo)
            loaded.elsewhere.extend(keys[place] for place in there)
            for place in too_large:
                text = f"a record of {sizes[place]} bytes; the node's memory has {store.pool.largest}"
                loaded.failures[keys[place]] = TransientError(text, backend=store.name, operation="get")
            if reservation.places:
                try:
                    with_room = [
                        index for wave in reservation.rooms(min(deadline, time.monotonic() + _ROOM_S)) for index in wave
                    ]
                    for index in set(range(len(reservation.places))).difference(with_room):
                        text = f"no memory for {reservation.sizes[index]} bytes became free in time"
                        full = TransientError(text, backend=store.name, operation="get")
                        loaded.failures[reservation.keys[index]] = full
                    reads = [Read(reservation.keys[index], reservation.views[index]) for index in with_room]
                    outcomes = self.backend.get_into(reads, deadline=deadline)
                    whole: list[int] = []
                    for index, outcome in zip(with_room, outcomes, strict=True):
                        if outcome.error is not None:
                            loaded.failures[reservation.keys[index]] = outcome.error
                        elif outcome.ok and outcome.nbytes == reservation.sizes[index]:
                            whole.append(index)
                    brought = [reservation.keys[index] for index in whole]
                    reservation.commit(whole, born=self._born(brought), held=loaded.records)
                    self.touch(brought)
                finally:
                    reservation.close()
            if todo:
                store.wait_for_others([keys[place] for place in todo], deadline)
        with self._lock:
            self._loaded += len(loaded.records)
        for record in loaded.records.values():
            record.read = True  # its bytes were read, if not from memory
        return loaded

    def _born(self, keys: Sequence[Key]) -> Sequence[float]:
        """When records were put, if that decides when they go; else nothing, and loading them counts as use."""
        if self._expiry.ttl == math.inf or self._expiry.from_use:
            return ()
        return [self._age_mark(key) for key in keys]

    # The rest.

    def delete(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        return self._take_away(keys, deadline, "delete")

    def quarantine(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        return self._take_away(keys, deadline, "quarantine")

    def _take_away(self, keys: Sequence[Key], deadline: float, operation: str) -> list[Outcome]:
        """Records that wait to be written are not written any more, so that none comes back."""
        if not self._recall(keys, deadline):
            late = TransientError("a record is being written", backend=self.backend.name, operation=operation)
            return [Outcome.failed(late)] * len(keys)
        how = self.backend.delete if operation == "delete" else self.backend.quarantine
        return how(keys, deadline=deadline)

    def pages(self, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """As `Backend.list`, without records whose time has come."""
        ttl, _, clock = self._expiry
        for page in self.backend.list(deadline=deadline):
            if ttl == math.inf:
                yield page
            else:
                now = clock()
                yield [info for info in page if now - info.last_used < ttl]

    def sweep(self) -> int:
        """Remove records whose time has come; returns how many. What was used in memory since is marked as used here,
        so that it is not too old when it is evicted there."""
        ttl, from_use, clock = self._expiry
        if ttl == math.inf:
            return 0
        count = 0
        try:
            for page in self.backend.list(deadline=time.monotonic() + _SWEEP_S):
                now = clock()
                used = self._used(page) if from_use else {}
                due = [info.key for info in page if now - info.last_used >= ttl and info.key not in used]
                self._mark(used)
                if due:
                    count += sum(outcome.ok for outcome in self.delete(due, time.monotonic() + _SWEEP_S))
        except KVStoreError as error:
            logger.debug("the sweep of %s ended early: %s", self.backend.name, error)
        with self._lock:
            self._expired += count
        return count

    def _used(self, page: Sequence[KeyInfo]) -> dict[Key, float]:
        """Records of a page that memory has, too, and when they were used there, if the folder does not know yet."""
        ttl, step = self._expiry.ttl, self._expiry.ttl * _LAG
        found: dict[Key, float] = {}
        with self._store.lock:
            records = [self._store.records.get(info.key) for info in page]
        for info, record in zip(page, records, strict=True):
            if record is not None:
                used = record.expires - ttl
                if used - info.last_used > step or self._expiry.clock() - info.last_used >= ttl:
                    found[info.key] = used
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        """Records were used: put again, or read back. Does nothing where their age does not count from that."""
        if self._expiry.ttl != math.inf and self._expiry.from_use:
            self._mark(dict.fromkeys(keys, self._expiry.clock()))

    def _mark(self, used: Mapping[Key, float]) -> None:
        for key, when in used.items():
            try:
                os.utime(f"{self._folder}/{record_path(key)}", (when, when))
            except OSError:  # gone, or another owner's: it goes earlier than it should, that is all
                pass

    @property
    def expired(self) -> int:
        """Records removed by `sweep` so far."""
        return self._expired

    def counts(self) -> DiskCounts:
        with self._lock:
            return DiskCounts(self._written, self._dropped, self._failed, self._loaded, self._backlog)

    def settle(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; False if something still does after `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._lock:
            while self._waiting or self._writing:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout: float) -> None:
        """Write what waits, for `timeout` seconds at most, and close the folder."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if not self.settle(timeout):
            with self._lock:
                left = [*self._waiting.values()]
                self._waiting.clear()
                self._backlog -= sum(waiting.record.found.nbytes for waiting in left)
                self._dropped += len(left)
                self._changed.notify_all()
            self._store.let_go([waiting.record for waiting in left])
            if left:
                logger.warning("%s: %d records were not written in time", self.backend.name, len(left))
        self._thread.join(max(0.0, timeout))
        self.backend.close()
