"""`Below`: what lies below a node's memory, a folder, a remote place, or both (`_node_tiers`). Records are written
behind (`_node_backlog`), and read back into reserved memory.

Reading back never waits for a writer, who may have stopped: its reservation is rivalled, and who is ready first wins.
Several readers of one record bring it up once. While a record is being removed it is neither written nor brought up,
and a read that was under way when that began is not believed: what was removed does not come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.backend import MISS, Backend, KeyInfo, Outcome, Read, Write
from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.eviction import FIFOPolicy
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.registry import BackendURL
from kvstore.wrappers import BreakerBackend, BreakerState, Wrapper, unwrap

from ._memory_reservation import Expiry, Record, Reservation
from ._memory_store import MemoryStore
from ._node_backlog import Backlog
from ._node_tiers import DISK, Lower, Note, check_disk, open_lower
from .file.backend import FileBackend
from .file.naming import OWN, record_path
from .node.background import Background

__all__ = ["GLANCE_S", "Below", "Loaded", "before"]

logger = logging.getLogger("kvstore.node")

_SWEEP_S = 600.0  # for one walk
_ROOM_S = 5.0  # longest wait for memory
_LAG = 0.1  # of a ttl, by which a use in memory may be unknown to the folder
_MARGIN, _MOST_MARGIN_S = 0.1, 0.05
_PROBE_S = 5.0
_PROBE_KEY = Key(hashlib.sha256(b"kvstore node probe").digest())

GLANCE_S = 1.0
"""Longest wait of a put for the answer whether a record is below, in seconds; then it is taken for new."""


def before(deadline: float) -> float:
    """When what lies below must have answered a request that ends at `deadline`: a tenth of the time before, at most 50
    ms. So what memory has of a batch reaches the client although the rest hangs."""
    left = deadline - time.monotonic()
    if left <= 0 or left == math.inf:
        return deadline
    return deadline - min(left * _MARGIN, _MOST_MARGIN_S)


class Loaded(NamedTuple):
    """What `Below.load` brought.

    Attributes:
        records: with one reader each, for `MemoryStore.let_go`.
        failures: why others could not be read.
        elsewhere: records that somebody else has brought into memory meanwhile.
    """

    records: dict[Key, Record]
    failures: dict[Key, KVStoreError]
    elsewhere: list[Key]


class FolderUsage(NamedTuple):
    """Of a folder with a cap; of one without it nothing is known.

    Attributes:
        used, capacity: bytes.
        records: -1: not known.
        evicted: records that went for want of room.
    """

    used: int
    capacity: int
    records: int
    evicted: int


class Below:
    """What lies below a `MemoryStore`.

    Args:
        disk: `file:///folder?…`, with the options of that backend; "": no folder.
        remote: any URL of `kvstore`; "": nothing. At least one of the two is given.
        store: the memory above it.
        backlog_bytes: most bytes that wait to be written.
        note: told what comes into the folder and leaves it.

    Attributes:
        lower: what it is.
        backend: likewise, as one backend.
        backlog: has records written.
        metrics: what a hierarchy's wrappers count.

    Raises:
        ConfigError: a URL or its options are wrong, or they cannot go together with `store.expiry`.
    """

    def __init__(
        self, disk: str, remote: str, store: MemoryStore, *, backlog_bytes: int,
        note: Note = lambda tier, op, keys: None,
    ) -> None:  # fmt: skip
        self._store = store
        self._expiry: Expiry = store.expiry
        self._folder = ""
        if disk:
            parsed = check_disk(disk)
            self._folder = parsed.path
            self._check_expiry(parsed)
        if remote and self._expiry.ttl != math.inf:
            raise ConfigError(
                "ttl and remote do not go together: what is too old here would come back from there. Have the remote "
                "place remove what is old (of a bucket: a lifecycle rule), and leave ttl out"
            )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._loading: dict[Key, set[Key]] = {}  # being read back, with those of the same load that are not to come up
        self._removing: Counter[Key] = Counter()
        self._replacing: set[Key] = set()
        self._loaded = self._expired = 0
        self._closed = False
        self.metrics = Metrics(())
        self.lower: Lower = open_lower(disk, remote, self.metrics, note)
        self.backend: Backend = self.lower.backend
        tiers = self.lower.tiers
        if tiers is not None:
            self.metrics.before_snapshot(lambda: tiers.publish(self.metrics))
        self.backlog = Backlog(self.backend, store, most_bytes=backlog_bytes, prepare=self._drop_expired)
        self._prober = Background(self._probe, "kvstore-node-probe")
        self._next_probe = 0.0
        self._claim: int | None = None

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
        barred = self._enter(keys, deadline)
        late = self.backlog.hold(keys, deadline)
        try:
            with self._lock:
                for key in keys:
                    if key in self._loading:
                        self._loading[key].add(key)
            yield late | barred
        finally:
            self.backlog.release(keys)
            self._leave([key for key in {*keys} if key not in barred])

    def _enter(self, keys: Collection[Key], deadline: float) -> set[Key]:
        """Note that they are being removed; returns those that are still being replaced at the deadline."""
        with self._lock:
            while not self._replacing.isdisjoint(keys) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            barred = self._replacing.intersection(keys)
            self._removing.update({*keys} - barred)
        return barred

    def _leave(self, keys: Sequence[Key]) -> None:
        with self._lock:
            self._removing.subtract(keys)
            for key in keys:
                if self._removing[key] <= 0:
                    del self._removing[key]
            self._changed.notify_all()

    @contextlib.contextmanager
    def replacing(self, keys: Collection[Key], deadline: float) -> Iterator[set[Key]]:
        """While records get other bytes: as `removing`, and nobody else removes them meanwhile, so that what he removed
        does not come back.

        Yields:
            those that somebody else was removing or replacing, or that were being written, until the deadline.
        """
        with self._lock:
            while (
                any(key in self._removing or key in self._replacing for key in keys)
                and (left := deadline - time.monotonic()) > 0
            ):
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            mine = {key for key in keys if key not in self._removing and key not in self._replacing}
            self._replacing |= mine
        late = self.backlog.hold(mine, deadline)
        try:
            yield {key for key in keys if key not in mine} | late
        finally:
            self.backlog.release(mine)
            with self._lock:
                self._replacing -= mine
                self._changed.notify_all()

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

    def folder_usage(self) -> FolderUsage:
        """Of a folder that is alone below the memory."""
        inner = unwrap(self.backend)
        if not isinstance(inner, FileBackend) or inner.capacity_bytes is None:
            return FolderUsage(0, 0, -1, 0)
        used = 0
        with contextlib.suppress(KVStoreError):
            used = inner.bytes_in_use(deadline=time.monotonic() + 1.0)
        records, evicted = inner.records, inner.counters.get("evicted", 0)
        return FolderUsage(used, inner.capacity_bytes, -1 if records is None else records, evicted)

    def troubles(self) -> list[tuple[str, str]]:
        """(tier, sentence) of each place that fails just now."""
        found = []
        for place in self.lower.places:
            state = _breaker_state(place.backend)
            if state is not None and state is not BreakerState.CLOSED:
                found.append((place.name, f"tier {place.name} does not answer and is left alone: {place.url}"))
            elif place.number < 0 and self.backlog.failing:
                found.append((place.name, f"tier {place.name} takes no records: {place.url}"))
        return found

    def look_again(self) -> None:
        """Try a folder that fails, in the background, every few seconds: a node that is not ready gets no requests, so
        nobody else may ever try it."""
        now = time.monotonic()
        if now >= self._next_probe and any(tier == DISK for tier, _ in self.troubles()):
            self._next_probe = now + _PROBE_S
            self._prober.wake()

    def _probe(self) -> float:
        backend = self.lower.places[0].backend
        deadline = time.monotonic() + _PROBE_S
        stored = backend.put([Write(_PROBE_KEY, [memoryview(b"probe")])], deadline=deadline)[0].stored
        if stored:
            backend.delete([_PROBE_KEY], deadline=deadline)
            self.backlog.failing = False
        backend.stat([_PROBE_KEY], deadline=deadline)
        return math.inf

    def claim(self) -> None:
        """Have the folder for ourselves: two nodes would count, evict and bring down each other's records. Raises
        `ConfigError`: another one has it. It ends with `close`, or with this process; where a file system knows no
        locks, nobody is kept out."""
        if not self._folder or self._claim is not None:
            return
        try:
            fd = os.open(f"{self._folder}/{OWN}/node", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", self._folder, error)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise ConfigError(
                f"the folder {self._folder} is the disk of another node that runs; each needs its own", cause=error
            ) from error
        except OSError as error:
            logger.debug("%s cannot be locked: %s", self._folder, error)
            os.close(fd)
            return
        self._claim = fd

    def settle(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; False if something still does after `timeout` seconds. With a remote
        place: until it has all that the folder owes it."""
        end = time.monotonic() + timeout
        if not self.backlog.settle(timeout):
            return False
        tiers = self.lower.tiers
        return tiers is None or not tiers.drain(end)

    def close(self, timeout: float) -> None:
        """Write what waits, for `timeout` seconds at most, and close what lies below. What a folder owes the remote
        place after that is named in the log; it is brought there later, at the latest when it must leave the folder."""
        end = time.monotonic() + timeout
        self._prober.close()
        self.backlog.close(timeout)
        tiers = self.lower.tiers
        with self._lock:
            first, self._closed = not self._closed, True
        if tiers is not None and first:
            tiers.drain(end)
        self.backend.close()
        fd, self._claim = self._claim, None
        if fd is not None:
            os.close(fd)


def _breaker_state(backend: Backend) -> BreakerState | None:
    """Of the breaker among the wrappers of a backend; None: there is none."""
    while isinstance(backend, Wrapper):
        if isinstance(backend, BreakerBackend):
            return backend.state
        backend = backend.inner
    return None
