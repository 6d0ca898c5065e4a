"""`file`: records as files in a folder, on a local disk or on NFS, EFS, FSx and other shared file systems.

Files are immutable. A record is written under a name (or none) that nobody else has, in its own folder, and published
with link(2), which never overwrites: over NFS a rename onto a name that other clients have cached makes it vanish there
for seconds. Nothing is ever deleted because it could not be read.

A byte is copied once, by the kernel, between the page cache and the caller's memory.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.backend import EXISTS, MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.errors import BackendError, ClosedError, ConfigError, KVStoreError, TransientError
from kvstore.errors import from_os_error as map_os_error
from kvstore.eviction import POLICIES
from kvstore.keys import Key
from kvstore.options import Option
from kvstore.registry import BackendURL

from .capacity import Capacity
from .counters import Counters
from .naming import new_writer_name
from .oscalls import LOCAL_FILE_SYSTEMS, OsCalls
from .publish import Publisher
from .reader import Failures, Reader
from .records import Removal, remove_record, set_aside
from .root import Sweep, folder_identity, open_root, probe_direct, revive_root, start_sweep
from .transfer import DeadlinePassed, Direct
from .tree import Marker, walk

__all__ = ["FileBackend"]

_PAGE_KEYS = 1000
_OPEN_SECONDS = 600.0  # for counting a folder that nobody has counted (1 M records: 7 s on ext4)
_LOCK_SECONDS = 60.0
_REOPEN_SECONDS = 1.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_instances: weakref.WeakSet[FileBackend] = weakref.WeakSet()


class FileBackend(Backend):
    """Records as files below one folder.

    Args:
        root: the folder; made if it is not there. Other files in it are never touched.
        nbytes: cap on the bytes stored, or None for no cap and no accounting at all. All processes on one folder must
            be given the same cap: one without counts nothing, so what it stores is neither seen nor held back. They
            share one counter where the file system has locks, else each has its own.
        policy: who goes first when the cap is reached (`kvstore.eviction`).
        fsync: "off": the operating system writes when it likes (a record that a power failure cut is found by its
            checksum, and is a miss); "data": the bytes are on the device before put says OK; "full": the name too.
        direct: "off", "on" or "auto" (from 1 MiB): go past the page cache where memory and offset are aligned to 4 KiB.
        lanes: useful number of concurrent calls.
        quarantine: bytes of corrupt records kept aside for inspection; 0 deletes them.
        name: for errors and metrics; default "file:" and the folder.
        calls: system calls, for tests.

    Raises:
        ConfigError: the root is a file or `/`, or cannot be made or read, or an argument makes no sense.
        TransientError: another process holds the usage counter for a minute.
    """

    options = (
        Option(
            "bytes", "size", None,
            "Cap on the stored bytes; not set: no cap and no accounting. Every process on the folder must give the "
            "same cap: what one without it stores is not counted, and the folder outgrows the cap.", minimum=1,
        ),
        Option(
            "policy", "choice", "lru", "Which records go first when the cap is reached; none: new ones are refused.",
            choices=tuple(POLICIES),
        ),
        Option(
            "fsync", "choice", "off",
            "What is on the device before a put is acknowledged: nothing, the data, or the name too.",
            choices=("off", "data", "full"),
        ),
        Option(
            "direct", "choice", "off", "Go past the page cache (O_DIRECT) where memory is aligned; auto: from 1 MiB.",
            choices=("auto", "on", "off"),
        ),
        Option("lanes", "int", 4, "Useful number of concurrent calls.", minimum=1, maximum=256),
        Option("quarantine", "size", 256 << 20, "Bytes of corrupt records kept aside in .kvstore/quarantine; 0: none."),
    )  # fmt: skip

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        nbytes: int | None = None,
        policy: str = "lru",
        fsync: str = "off",
        direct: str = "off",
        lanes: int = 4,
        quarantine: int = 256 << 20,
        name: str | None = None,
        calls: OsCalls | None = None,
    ) -> None:
        for option, value in (("fsync", fsync), ("direct", direct), ("lanes", lanes), ("policy", policy)):
            next(known for known in self.options if known.name == option).parse(value)
        if nbytes is not None and nbytes < 1:
            raise ConfigError(f"option 'bytes': {nbytes} is out of range; it must be at least 1")
        self._calls = calls or OsCalls()
        self._path = os.path.abspath(os.fspath(root))
        self.name = name or f"file:{self._path}"
        self._counters = Counters()
        self._lock = threading.Lock()
        self._open_lock = threading.Lock()
        self._in_flight = 0
        self._closed = False
        self._reopen_capacity = False
        self._quarantine = quarantine
        self._cap, self._policy = nbytes, policy
        self._listeners: list[Callable[[Sequence[Key]], None]] = []
        self._root = open_root(self._calls, self._path, self.name)
        self._held = _Held(self._root, Marker(self._calls, new_writer_name))
        self._finalizer = weakref.finalize(self, self._held.close)  # for those who forget close(), and at exit
        try:
            self.identity = folder_identity(self._root)
            system = self._calls.file_system(self._root)
            self._local = system in LOCAL_FILE_SYSTEMS
            self._direct = Direct(direct, self._calls, self._counters.add, self.name)
            if self._direct.enabled:
                probe_direct(self._calls, self._root, self._direct)
            self._failures = Failures(self.name, self._path)
            self._reader = Reader(
                self._calls,
                self._failures,
                self._direct,
                count=self._counters.add,
                revive=self._revive,
                local=self._local,
            )
            self._publisher = Publisher(
                self._calls, self._held.marker, self._direct, name=self.name, fsync=fsync, local=self._local,
                allocate=self._calls.prefers_fallocate(system),
            )  # fmt: skip
            self._held.sweep = start_sweep(self._calls, self._root, self.name)
            self._open_capacity(time.monotonic() + _OPEN_SECONDS)
        except BaseException:
            self._finalizer()
            raise
        self.capabilities = (
            Capability.RANGED_READ | Capability.LIST | Capability.SHARED | Capability.DURABLE | Capability.LANDING
            | (Capability.CAPACITY if nbytes is not None else Capability.NONE)
        )  # fmt: skip
        self.limits = Limits(
            max_value_bytes=Limits().max_value_bytes if nbytes is None else nbytes,
            alignment=4096, lanes=lanes, preferred_io_bytes=16 << 20,
        )  # fmt: skip
        _instances.add(self)

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> FileBackend:
        """`file:///folder?bytes=400GiB&policy=lru&fsync=off&direct=off&lanes=4&quarantine=256MiB`."""
        if url.authority:
            raise ConfigError(
                f"file:// takes no host, but the URL names {url.authority!r}; for a folder write three slashes: "
                f"file:///{url.authority}{url.path}"
            )
        if not url.path or "\0" in url.path:
            raise ConfigError("file:// needs the path of a folder, for instance file:///mnt/kv")
        given = dict(options)
        return cls(url.path, nbytes=given.pop("bytes"), **given)

    def __repr__(self) -> str:
        return f"FileBackend({self._path!r})"

    @property
    def counters(self) -> dict[str, int]:
        """How often something unusual was dealt with: `direct_ios`, `direct_refused`, `read_retries`, `evicted`,
        `victims_stuck`, `put_retries`, `foreign`."""
        return self._counters.snapshot()

    def bytes_in_use(self, *, deadline: float) -> int:
        """Bytes stored, as accounted (0 without a cap). Raises `TransientError` at the deadline."""
        self._enter("stat")
        try:
            return self._held.capacity.in_use(deadline=deadline) if self._held.capacity is not None else 0
        finally:
            self._leave()

    @property
    def capacity_bytes(self) -> int | None:
        """The cap; None: there is none."""
        return self._cap

    @property
    def records(self) -> int | None:
        """How many there are; None: not known. With a cap it is known once the folder has been walked: at the first
        open, and later when room must be made."""
        capacity = self._held.capacity
        return None if capacity is None else capacity.records

    def on_evicted(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """Have `tell` called, once per batch, with the records that this process removes to keep the cap."""
        self._listeners.append(tell)

    def _open_capacity(self, deadline: float) -> None:
        if self._cap is None:
            return
        old = self._held.capacity
        capacity = Capacity(
            self._calls, self._root, self._cap, self._policy, self.name, count=self._counters.add, local=self._local,
            deadline=min(deadline, time.monotonic() + _LOCK_SECONDS), evicted=_tell_all(self._listeners),
        )  # fmt: skip
        try:
            capacity.start(deadline)
        except BaseException:
            capacity.abandon()
            raise
        self._held.capacity = capacity
        if old is not None:  # of a root that is gone; calls in flight may still be using it
            self._held.retired.append(old)

    # Lifetime: the last call in flight closes what close() must leave open for it.

    def _enter(self, operation: str) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the backend is closed", backend=self.name, operation=operation)
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1
            last = self._closed and self._in_flight == 0
        if last:
            self._release()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._in_flight == 0
        if idle:
            self._release()

    def _release(self) -> None:
        self._finalizer()
        _instances.discard(self)

    def _after_fork(self) -> None:
        """In the child: calls of the parent's threads are not ours, locks may be held for ever, and the descriptor of
        the usage counter shares its locks with the parent."""
        self._lock, self._open_lock = threading.Lock(), threading.Lock()
        self._counters.after_fork()
        self._in_flight = 0
        self._held.sweep = None  # its thread stayed behind
        if self._held.capacity is not None:
            self._held.capacity.abandon()
            self._held.capacity = None
            if not self._closed:
                self._reopen_capacity = True

    def _ready_capacity(self, deadline: float) -> Capacity | None:
        """The capacity; after a fork the child's own, opened by the first put or delete. Raises `TransientError`."""
        if self._reopen_capacity:
            with self._open_lock:
                if self._reopen_capacity:
                    self._open_capacity(deadline)
                    self._reopen_capacity = False
        return self._held.capacity

    def _revive(self) -> None:
        """If the root itself went away (ESTALE, removed), open or make it anew, under the same descriptor number."""
        with self._open_lock:
            if revive_root(self._calls, self._root, self._path) and self._cap is not None:
                try:
                    self._open_capacity(time.monotonic() + _REOPEN_SECONDS)
                except TransientError:  # the next put has more patience
                    self._reopen_capacity = True

    # stat, get

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self._enter("stat")
        try:
            look, late, now = self._reader.stat, self._failures.late, time.monotonic
            return [look(self._root, key) if now() < deadline else late("stat", key) for key in keys]
        finally:
            self._leave()

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        """See `Backend.get_into`. One open per key and batch; ranges at most 64 KiB apart share a preadv(2)."""
        self._enter("get")
        try:
            capacity = self._held.capacity
            touch = capacity is not None and capacity.counts_reads
            outcomes, hits = self._reader.get(self._root, reads, deadline, touch=touch)
            if capacity is not None:
                capacity.used(hits)
            return outcomes
        finally:
            self._leave()

    # put

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self._enter("put")
        try:
            try:
                capacity = self._ready_capacity(deadline)
            except TransientError as error:
                return [Outcome.failed(error)] * len(writes)
            if capacity is None:
                return [self._put(write, write.nbytes, 0, deadline, None) for write in writes]
            return self._put_capped(capacity, writes, deadline)
        finally:
            self._leave()

    def _put_capped(self, capacity: Capacity, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        """In waves of at most an eighth of the cap: what is there needs no room, the rest is reserved at once."""
        outcomes: list[Outcome] = [MISS] * len(writes)
        stamps = capacity.put_stamps(writes)
        there: list[tuple[Key, int]] = []
        wave: list[tuple[int, int]] = []
        waiting, most = 0, max(1, capacity.cap // 8)
        for index, write in enumerate(writes):
            if time.monotonic() >= deadline:
                outcomes[index] = self._failures.late("put", write.key)
                continue
            found = self._reader.is_there(self._root, write.key)
            if found.ok:
                outcomes[index] = EXISTS
                there.append((write.key, found.nbytes))
                continue
            nbytes = write.nbytes
            if nbytes > capacity.cap:
                outcomes[index] = Outcome.failed(capacity.too_large(nbytes, write.key))
                continue
            if wave and waiting + nbytes > most:
                self._put_wave(capacity, writes, wave, waiting, stamps, outcomes, deadline)
                wave, waiting = [], 0
            wave.append((index, nbytes))
            waiting += nbytes
        if wave:
            self._put_wave(capacity, writes, wave, waiting, stamps, outcomes, deadline)
        capacity.stored_again(
            there, [write.key for write, outcome in zip(writes, outcomes, strict=True) if outcome.stored]
        )
        return outcomes

    def _put_wave(
        self, capacity: Capacity, writes: Sequence[Write], wave: list[tuple[int, int]], reserved: int,
        stamps: list[int], outcomes: list[Outcome], deadline: float,
    ) -> None:  # fmt: skip
        try:
            capacity.reserve(reserved, deadline)
        except KVStoreError as error:
            self._failures.notice(error.cause)
            for index, _ in wave:
                outcomes[index] = Outcome.failed(error)
            return
        stored: list[tuple[Write, int, int]] = []
        try:
            for index, nbytes in wave:
                outcome = self._put(writes[index], nbytes, stamps[index], deadline, capacity)
                outcomes[index] = outcome
                if outcome.ok:
                    stored.append((writes[index], nbytes, stamps[index]))
        finally:
            current = self._held.capacity
            if current is None or current is capacity:
                capacity.commit(stored, reserved, deadline)
            else:  # the root went away meanwhile, and its books with it
                current.commit(stored, 0, deadline)

    def _put(self, write: Write, nbytes: int, stamp: int, deadline: float, capacity: Capacity | None) -> Outcome:
        if time.monotonic() >= deadline:
            return self._failures.late("put", write.key)
        first = True
        while True:
            try:
                stored = self._publisher.put(self._root, write.key, write.src, nbytes, stamp, deadline)
                return Outcome(Status.OK, nbytes) if stored else EXISTS
            except OSError as error:
                if not (first and self._may_help(error, nbytes, deadline, capacity)):
                    return self._failures.of(error, "put", write.key)
                first = False
                self._counters.add("put_retries")
            except DeadlinePassed:
                return self._failures.late("put", write.key)
            except BackendError as error:
                return Outcome.failed(error)

    def _may_help(self, error: OSError, nbytes: int, deadline: float, capacity: Capacity | None) -> bool:
        """Whether a failed put should be tried again: after evicting on a full disk, with a root that is back."""
        if error.errno in _FULL and capacity is not None:
            try:
                return capacity.free_some(nbytes, deadline)
            except BackendError:
                return False
        if error.errno in (errno.ESTALE, errno.ENOENT):
            self._revive()
            return True
        return False

    # delete, quarantine

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self._enter("delete")
        try:
            return [self._take_away("delete", key, deadline, self._delete) for key in keys]
        finally:
            self._leave()

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """Move records to .kvstore/quarantine, at most 64 and `quarantine` bytes of them; if a record was stored again
        since this process last read it, it stays."""
        self._enter("quarantine")
        try:
            return [self._take_away("quarantine", key, deadline, self._set_aside) for key in keys]
        finally:
            self._leave()

    def _take_away(
        self, operation: str, key: Key, deadline: float, how: Callable[[Key], tuple[Removal, OSError | None, int]]
    ) -> Outcome:
        if time.monotonic() >= deadline:
            return self._failures.late(operation, key)
        try:
            capacity = self._ready_capacity(deadline)
        except TransientError as late:
            return Outcome.failed(late)
        try:
            removal, error, freed = how(key)
        except OSError as raised:
            removal, error, freed = Removal.STUCK, raised, 0
        if error is not None:
            return self._failures.of(error, operation, key)
        if removal is not Removal.DONE:
            return MISS
        if capacity is not None:
            capacity.gone(key, freed, deadline)
        return OK

    def _delete(self, key: Key) -> tuple[Removal, OSError | None, int]:
        removed = remove_record(self._calls, self._root, key, prune=self._local)
        return removed.how, removed.error, removed.nbytes

    def _set_aside(self, key: Key) -> tuple[Removal, OSError | None, int]:
        expected = self._reader.seen(key)
        removed, freed = set_aside(self._calls, self._root, key, expected=expected, max_bytes=self._quarantine)
        return removed.how, removed.error, freed

    # list

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of about 1000 records. `last_used` is the time of the put; with a cap of the last use, to a minute.

        Raises:
            TransientError, PermanentError: while iterating: the deadline passed, or a folder cannot be read.
        """
        self._enter("list")
        self._leave()
        return self._pages(deadline)

    def _pages(self, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        page: list[KeyInfo] = []
        leaves = walk(self._calls, self._root)
        ended = False
        while not ended:
            self._enter("list")
            try:
                while len(page) < _PAGE_KEYS:
                    if time.monotonic() >= deadline:
                        raise TransientError("the deadline passed", backend=self.name, operation="list")
                    leaf = next(leaves, None)
                    if leaf is None:
                        ended = True
                        break
                    page += [KeyInfo(key, nbytes, mtime_ns / 1e9) for key, nbytes, mtime_ns in leaf.records]
            except OSError as error:
                raise map_os_error(error, backend=self.name, operation="list", what=f"list {self._path}") from error
            finally:
                self._leave()
            if page:
                yield page
                page = []


class _Held:
    """What a backend must give back, apart from the backend itself, so that a finalizer can do it."""

    def __init__(self, root: int, marker: Marker) -> None:
        self.root = root
        self.marker = marker
        self.capacity: Capacity | None = None
        self.retired: list[Capacity] = []
        self.sweep: Sweep | None = None

    def close(self) -> None:
        if self.sweep is not None:
            self.sweep.stop()
        if self.capacity is not None:
            self.capacity.close()
        for old in self.retired:
            old.abandon()
        self.marker.remove(self.root)
        try:
            os.close(self.root)
        except OSError:  # nothing was written through it
            pass


def _after_fork_in_child() -> None:
    for backend in list(_instances):
        backend._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _tell_all(listeners: Sequence[Callable[[Sequence[Key]], None]]) -> Callable[[Sequence[Key]], None]:
    """Holds the listeners alone: what the finaliser holds must not hold the backend."""

    def tell(keys: Sequence[Key]) -> None:
        for each in listeners:
            each(keys)

    return tell
