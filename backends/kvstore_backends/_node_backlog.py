"""`Backlog`: records on their way from a node's memory down to its folder, written by one thread.

A put is over when the record is in memory. The thread writes it later, from the same memory: the record is pinned until
then. What could not be written because the place is away or busy waits for another turn. What waits is bounded in
bytes; what does not fit is counted and stays in memory only, as does what the place refuses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvstore.backend import Backend, Write
from kvstore.errors import ClosedError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key

from ._memory_reservation import Record
from ._memory_store import MemoryStore

__all__ = ["Backlog", "BacklogCounts"]

logger = logging.getLogger("kvstore.node")

_BATCH_BYTES = 32 << 20
_BATCH_RECORDS = 256
_WRITE_S = 60.0  # for one batch
_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0  # before a place that took nothing is tried again


class BacklogCounts(NamedTuple):
    """What became of records on their way down.

    Attributes:
        written: records stored in the folder.
        dropped: records that did not fit into the backlog, so are in memory only.
        failed: records that the folder refused, or that could not be written for another reason.
        errors: batches that ended in an exception, which no folder should raise; the log has the first.
        backlog: bytes that wait now.
    """

    written: int
    dropped: int
    failed: int
    errors: int
    backlog: int


class _Waiting(NamedTuple):
    record: Record
    parent: Key | None


class _Held:
    """A key that is being removed: who does so, and what was offered, or waited, in the meantime."""

    __slots__ = ("count", "offered", "parent")

    def __init__(self) -> None:
        self.count = 0
        self.offered = False
        self.parent: Key | None = None

    def offer(self, parent: Key | None) -> None:
        self.offered, self.parent = True, parent


class Backlog:
    """Has records of `store` written to `backend`.

    Args:
        most_bytes: most bytes that wait.
        prepare: called in the thread with the keys of each batch, before it is written.

    Attributes:
        failing: the place took nothing of the last batch, and not because of the records.
    """

    def __init__(
        self, backend: Backend, store: MemoryStore, *, most_bytes: int, prepare: Callable[[Sequence[Key]], None]
    ) -> None:  # fmt: skip
        self._backend = backend
        self._store = store
        self._most_bytes = most_bytes
        self._prepare = prepare
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._writing: frozenset[Key] = frozenset()
        self._held: dict[Key, _Held] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._nbytes = self._written = self._dropped = self._failed = self._errors = 0
        self._complained = False
        self._closing = self._dropping = False
        self.failing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-node-disk", daemon=True)
        self._thread.start()

    def offer(self, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
        """Have records written that were just put into memory, as far as there is room."""
        records = self._store.pin(keys)
        refused: list[Record] = []
        with self._lock:
            for key, record, parent in zip(keys, records, parents, strict=True):
                if record is None:  # gone again
                    continue
                if record.gone or key in self._waiting:
                    refused.append(record)
                elif key in self._held:  # whoever removes it looks afterwards whether it was put anew
                    self._held[key].offer(parent)
                    refused.append(record)
                elif self._closing or self._nbytes + record.found.nbytes > self._most_bytes:
                    self._dropped += 1
                    refused.append(record)
                else:
                    self._waiting[key] = _Waiting(record, parent)
                    self._nbytes += record.found.nbytes
            self._changed.notify_all()
        self._store.let_go(refused)

    # Removing.

    def hold(self, keys: Collection[Key], deadline: float) -> set[Key]:
        """Until `release` of the same keys: nothing of them is written. Those that were being written at the deadline
        (`time.monotonic()` seconds) are returned."""
        wanted = set(keys)
        recalled: list[Record] = []
        with self._lock:
            for key in wanted:
                held = self._held.setdefault(key, _Held())
                held.count += 1
                waiting = self._waiting.pop(key, None)
                if waiting is not None:
                    held.offer(waiting.parent)
                    recalled.append(waiting.record)
                    self._nbytes -= waiting.record.found.nbytes
            while not wanted.isdisjoint(self._writing):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(None if left > threading.TIMEOUT_MAX else left)
            late = wanted & self._writing
            self._changed.notify_all()
        self._store.let_go(recalled)
        return late

    def release(self, keys: Iterable[Key]) -> None:
        """Take back `hold`. What memory has of them (it was not removed, or put anew) is offered again."""
        again: dict[Key, Key | None] = {}
        with self._lock:
            for key in set(keys):
                held = self._held[key]
                held.count -= 1
                if not held.count:
                    del self._held[key]
                    if held.offered:
                        again[key] = held.parent
        if again:
            self.offer([*again], [*again.values()])

    def is_held(self, key: Key) -> bool:
        """Whether it is being removed."""
        return key in self._held

    # The thread.

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._lock:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                end = time.monotonic() + pause
                while self._waiting and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._waiting:
                    if self._closing:
                        return
                    continue
                batch = self._next_batch()
            written = errors = 0
            again: set[Key] = set()
            try:
                written, again = self._write(batch)
            except Exception:  # noqa: BLE001 - logged, once; this thread must not end
                errors = 1
                self.failing = True
                self._complain()
            pause = min(max(2 * pause, _PAUSE_S), _MOST_PAUSE_S) if again and not written else 0.0
            with self._lock:
                for key in again:
                    if key in self._held:  # whoever removes it looks afterwards whether it is still there
                        self._held[key].offer(batch[key].parent)
                    elif key not in self._waiting and not self._dropping:
                        self._waiting[key] = batch.pop(key)
            self._store.let_go([waiting.record for waiting in batch.values()])
            with self._lock:
                self._nbytes -= sum(waiting.record.found.nbytes for waiting in batch.values())
                self._written += written
                self._failed += len(batch) - written
                self._errors += errors
                self._writing = frozenset()
                self._changed.notify_all()

    def _next_batch(self) -> dict[Key, _Waiting]:
        batch: dict[Key, _Waiting] = {}
        nbytes = 0
        while self._waiting and len(batch) < _BATCH_RECORDS:
            key, waiting = next(iter(self._waiting.items()))
            nbytes += waiting.record.found.nbytes
            if batch and nbytes > _BATCH_BYTES:
                break
            batch[key] = waiting
            del self._waiting[key]
        self._writing = frozenset(batch)
        return batch

    def _write(self, batch: dict[Key, _Waiting]) -> tuple[int, set[Key]]:
        """How many were written, and which may be tried again. Raises what the backend raises."""
        self._prepare([*batch])
        writes = [Write(key, [waiting.record.view], waiting.parent) for key, waiting in batch.items()]
        try:
            outcomes = self._backend.put(writes, deadline=time.monotonic() + _WRITE_S)
        except ClosedError:
            return 0, set()
        self._complained = False
        failed = [outcome for outcome in outcomes if not outcome.stored]
        self.failing = len(failed) == len(outcomes) and any(_is_of_place(outcome.error) for outcome in failed)
        if failed:
            logger.debug("%d of %d records were not written: %s", len(failed), len(writes), failed[0].error)
        again = {
            write.key
            for write, outcome in zip(writes, outcomes, strict=True)
            if isinstance(outcome.error, TransientError)
        }  # fmt: skip
        return len(writes) - len(failed), again

    def _complain(self) -> None:
        """Once, until something is written again: a folder that is broken is so for every batch."""
        if not self._complained:
            self._complained = True
            logger.exception("%s: records were not written; they stay in memory, and it goes on", self._backend.name)

    # The rest.

    def counts(self) -> BacklogCounts:
        with self._lock:
            return BacklogCounts(self._written, self._dropped, self._failed, self._errors, self._nbytes)

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
        """Write what waits, for `timeout` seconds at most; what is being written then is left to itself."""
        end = time.monotonic() + timeout
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        late = 0
        if not self.settle(timeout):
            with self._lock:
                late = len(self._waiting) + len(self._writing)
                self._dropping = True
                left = [*self._waiting.values()]
                self._waiting.clear()
                self._nbytes -= sum(waiting.record.found.nbytes for waiting in left)
                self._dropped += len(left)
                self._changed.notify_all()
            self._store.let_go([waiting.record for waiting in left])
        if late:
            logger.warning("%s: %d records were not written in time", self._backend.name, late)
        self._thread.join(max(0.0, end - time.monotonic()))


def _is_of_place(error: KVStoreError | None) -> bool:
    """Whether a place is broken or full, and not a record one that it would never take."""
    return not isinstance(error, PermanentError) or isinstance(error.cause, OSError)
