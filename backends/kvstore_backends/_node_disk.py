"""`DiskTier`: the folder below a node's memory. Records are written behind (`_node_backlog`), and read back into
reserved memory.

Reading back never waits for a writer, who may have stopped: its reservation is rivalled, and who is ready first wins.
Several readers of one record bring it up once. While a record is being removed it is neither written nor brought up,
and a read that was under way when that began is not believed: what was removed does not come back.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.backend import MISS, Backend, KeyInfo, Outcome, Read
from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.eviction import FIFOPolicy
from kvstore.keys import Key
from kvstore.registry import BackendURL, open_backend, parse_url

from ._memory_reservation import Expiry, Record, Reservation
from ._memory_store import MemoryStore
from ._node_backlog import Backlog
from .file.naming import record_path

__all__ = ["DiskTier", "Loaded"]

logger = logging.getLogger("kvstore.node")

_SWEEP_S = 600.0  # for one walk
_ROOM_S = 5.0  # longest wait for memory
_LAG = 0.1  # of a ttl, by which a use in memory may be unknown to the folder


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


class DiskTier:
    """A folder below a `MemoryStore`.

    Args:
        url: `file:///folder?…`, with the options of that backend.
        store: the memory above it.
        backlog_bytes: most bytes that wait to be written.

    Attributes:
        backlog: has records written.

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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._loading: dict[Key, set[Key]] = {}  # being read back, with those of the same load that are not to come up
        self._loaded = self._expired = 0
        self.backend: Backend = open_backend(parsed)
        self.backlog = Backlog(self.backend, store, most_bytes=backlog_bytes, prepare=self._drop_expired)

    def _check_expiry(self, url: BackendURL) -> None:
        capped = "bytes" in url.options and url.options.get("policy", "lru") != FIFOPolicy.name
        if self._expiry.ttl != math.inf and not self._expiry.from_use and capped:
            raise ConfigError(
                "ttl_from=put needs the time of the put, which a folder with a cap keeps with policy=fifo only: "
                "there a read writes the time of last use. Give the disk policy=fifo, or use ttl_from=use"
            )

    def _drop_expired(self, keys: Sequence[Key]) -> None:
        """Before they are written: files whose time has come stand in the way of new ones."""
        ttl = self._expiry.ttl
        if ttl == math.inf:
            return
        now = self._expiry.clock()
        old = [key for key in keys if 0.0 < self._age_mark(key) <= now - ttl]
        if old:
            self.backend.delete(old, deadline=time.monotonic() + _SWEEP_S)

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
        loaded = Loaded({}, {}, [])
        todo: Sequence[int] = range(len(keys))
        try:
            while todo:
                if time.monotonic() >= deadline:
                    late = TransientError("the deadline passed", backend=self.backend.name, operation="get")
                    loaded.failures.update((keys[place], late) for place in todo)
                    break
                doomed: set[Key] = set()
                with self._lock:
                    mine = [place for place in todo if keys[place] not in self._loading]
                    self._loading.update((keys[place], doomed) for place in mine)
                    todo = [place for place in todo if self._loading[keys[place]] is not doomed]
                try:
                    there = [place for place in mine if not self.backlog.is_held(keys[place])]
                    if there:
                        self._load(keys, sizes, there, doomed, loaded, deadline)
                finally:
                    with self._lock:
                        for place in mine:
                            del self._loading[keys[place]]
                        self._changed.notify_all()
                self._wait_for_others([keys[place] for place in todo], deadline)
        except BaseException:
            self._store.let_go([*loaded.records.values()])
            raise
        with self._lock:
            self._loaded += len(loaded.records)
        return loaded

    def _wait_for_others(self, keys: Sequence[Key], deadline: float) -> None:
        """Until one of `keys`, which others are reading back, no longer is; until the deadline at most."""
        with self._lock:
            while keys and all(key in self._loading for key in keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(None if left > threading.TIMEOUT_MAX else left)

    def _load(
        self, keys: Sequence[Key], sizes: Sequence[int], places: Sequence[int], doomed: set[Key], loaded: Loaded,
        deadline: float,
    ) -> None:  # fmt: skip
        """Those at `places`, without what is `doomed` by the end."""
        store = self._store
        reservation, there, _, too_large = store.claim(keys, sizes, [None] * len(keys), places, rival=True)
        try:
            loaded.elsewhere.extend(keys[place] for place in there)
            for place in too_large:
                text = f"a record of {sizes[place]} bytes; the node's memory has {store.pool.largest}"
                loaded.failures[keys[place]] = TransientError(text, backend=store.name, operation="get")
            if not reservation.places:
                return
            whole = self._read(reservation, loaded.failures, deadline)
            born = self._born([reservation.keys[index] for index in whole])
            with self._lock:  # nobody dooms them in between
                if doomed:
                    kept = [at for at, index in enumerate(whole) if reservation.keys[index] not in doomed]
                    whole, born = [whole[at] for at in kept], [born[at] for at in kept] if born else ()
                lost = reservation.commit(whole, born=born, held=loaded.records)
            loaded.elsewhere.extend(reservation.keys[index] for index in lost)
            self.touch([reservation.keys[index] for index in whole])
        finally:
            reservation.close()

    def _read(self, reservation: Reservation, failures: dict[Key, KVStoreError], deadline: float) -> list[int]:
        """Read what there is memory for; the indices of those that are whole."""
        waves = reservation.rooms(min(deadline, time.monotonic() + _ROOM_S))
        with_room = [index for wave in waves for index in wave]
        for index in set(range(len(reservation.places))).difference(with_room):
            text = f"no memory for {reservation.sizes[index]} bytes became free in time"
            failures[reservation.keys[index]] = TransientError(text, backend=self._store.name, operation="get")
        reads = [Read(reservation.keys[index], reservation.views[index]) for index in with_room]
        whole: list[int] = []
        for index, outcome in zip(with_room, self.backend.get_into(reads, deadline=deadline), strict=True):
            if outcome.error is not None:
                failures[reservation.keys[index]] = outcome.error
            elif outcome.ok and outcome.nbytes == reservation.sizes[index]:
                whole.append(index)
        return whole

    def _born(self, keys: Sequence[Key]) -> Sequence[float]:
        """When records were put, if that decides when they go; else nothing, and loading them counts as use."""
        if self._expiry.ttl == math.inf or self._expiry.from_use:
            return ()
        return [self._age_mark(key) for key in keys]

    # Removing.

    @contextlib.contextmanager
    def removing(self, keys: Collection[Key], deadline: float) -> Iterator[set[Key]]:
        """While records are removed, from here first and then from the memory above: none of them is written or
        brought up, and none that was on its way up arrives.

        Yields:
            those that were still being written at the deadline, and so cannot be removed.
        """
        late = self.backlog.hold(keys, deadline)
        try:
            with self._lock:
                for key in keys:
                    if key in self._loading:
                        self._loading[key].add(key)
            yield late
        finally:
            self.backlog.release(keys)

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
                    count += self._remove_expired(due)
        except KVStoreError as error:
            logger.debug("the sweep of %s ended early: %s", self.backend.name, error)
        with self._lock:
            self._expired += count
        return count

    def _remove_expired(self, keys: Sequence[Key]) -> int:
        """Those that are still too old when nobody writes them any more."""
        deadline = time.monotonic() + _SWEEP_S
        with self.removing(keys, deadline) as late:
            before = self._expiry.clock() - self._expiry.ttl
            due = [key for key in keys if key not in late and self._age_mark(key) <= before]
            return sum(outcome.ok for outcome in self.backend.delete(due, deadline=deadline))

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

    def counts(self) -> dict[str, int]:
        """Those of `BacklogCounts`; `loaded`: records read back into memory; `expired`: removed by `sweep`."""
        with self._lock:
            return {**self.backlog.counts()._asdict(), "loaded": self._loaded, "expired": self._expired}

    def settle(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; False if something still does after `timeout` seconds."""
        return self.backlog.settle(timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for `timeout` seconds at most, and close the folder."""
        self.backlog.close(timeout)
        self.backend.close()
