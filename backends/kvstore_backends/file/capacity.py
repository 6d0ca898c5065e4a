"""`bytes=`: what is stored never exceeds the cap, whoever stores it and however often processes restart.

Counting is shared (usage.py); the order of eviction is each process's own. A process knows as *hot* what it stored or
read itself: the policy orders that. The rest, *cold*, it finds by walking the folder when it first has to evict (and
again now and then), and orders by modification time, which every process sets when it uses a record. A victim that
another process used since is passed over. So there is no walk at open, no thread, and nothing to repair after a fork.

Modification times are set at put and, at most every half minute, at get; what is more recent than that is written at
close, in the policy's order. Within one interval the earlier use gets the later time, so that heads of a prefix stay
newer than tails although they are read first.
"""

from __future__ import annotations

import errno
import heapq
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence

from kvstore.backend import Write
from kvstore.errors import KVStoreError, PermanentError, TransientError, from_os_error
from kvstore.eviction import EvictionPolicy, FIFOPolicy, KeepPolicy, make_policy
from kvstore.keys import Key
from kvstore.wrappers.base import LocalWait

from .naming import file_name, leaf_path
from .oscalls import OsCalls
from .records import Removal, drop_quarantine, remove_record
from .stamps import STEP_NS
from .tree import HANDLE_FLAGS, list_quarantine, sweep_leaf, walk
from .usage import Usage

__all__ = ["Capacity"]

logger = logging.getLogger("kvstore.file")

RESCAN_SECONDS = 900.0
"""How old the view of what others stored may get while this process evicts."""
_FIRST_SCAN_SECONDS = 0.25  # a put that has to evict gives the walk so much, then evicts from what was found
_STEP_SECONDS = 0.005  # … and later ones so much
_WAIT_SECONDS = 10.0
_MAX_STUCK = 1024
_PRUNE_BELOW = 16 << 30
"""Up to this cap folders that become empty are removed, so that `du` stays below it too. All 65,792 take 257 MiB
on ext4; making and removing two for each record (0.3 ms) would cost more than that is worth under a large cap."""
_FLUSH_SECONDS = 1.0


class _Scan:
    """One walk over the folder, in steps."""

    def __init__(self, calls: OsCalls, root: int, added_before: int) -> None:
        self._calls = calls
        self._root = root
        self._leaves = walk(calls, root)
        self.added_before = added_before
        self.began = time.monotonic()
        self.found: list[tuple[int, Key]] = []
        self.total = 0
        self.failed: OSError | None = None

    def run(self, until: float) -> bool:
        """Go on until `until` (monotonic seconds), one leaf at least; True when everything was seen."""
        now = time.time()
        try:
            for leaf in self._leaves:
                self.found += [(mtime_ns, key) for key, _, mtime_ns in leaf.records]
                self.total += sum(nbytes for _, nbytes, _ in leaf.records)
                if leaf.temps:
                    self.total += sweep_leaf(self._calls, self._root, leaf, now)[1]
                if time.monotonic() >= until:
                    return False
            self.total += sum(nbytes for _, nbytes in list_quarantine(self._calls, self._root))
        except OSError as error:
            self.failed = error
        return True


class Capacity:
    """Enforces a cap in bytes on one folder. Thread-safe.

    Args:
        cap: bytes of records, summed by file size (the file system rounds each up to its block).
        policy: name, see `kvstore.eviction.make_policy`.
        local: the file system lives in this kernel.
        deadline: until when to wait for processes that use the counter, in monotonic seconds.
        evicted: told, once per batch, which records were removed to make room.

    Raises:
        ConfigError: unknown policy.
        TransientError: the deadline passed.
    """

    def __init__(
        self,
        calls: OsCalls,
        root: int,
        cap: int,
        policy: str,
        name: str,
        *,
        count: Callable[[str], None],
        local: bool,
        deadline: float,
        evicted: Callable[[Sequence[Key]], None] = lambda keys: None,
    ) -> None:
        self.cap = cap
        self._calls = calls
        self._root = root
        self._name = name
        self._count = count
        self._evicted = evicted
        self._prune = local and cap <= _PRUNE_BELOW
        self._policy: EvictionPolicy = make_policy(policy)
        self._evicts = not isinstance(self._policy, KeepPolicy)
        self.counts_reads = self._evicts and not isinstance(self._policy, FIFOPolicy)
        self._lock = threading.Lock()  # over what follows; held for dictionary operations only
        self._used: dict[Key, int] = {}  # hot: last use, ns since the epoch
        self._stamp: dict[Key, int] = {}  # hot: modification time on disk, as far as we know
        # A heap of (modification time, key); it may hold keys that are no longer cold.
        self._cold: list[tuple[int, Key]] = []
        self._cold_keys: set[Key] = set()
        # Under the lock of the usage counter:
        self._scan: _Scan | None = None
        self._scanned_at = float("-inf")  # when the last finished walk began
        self._usage = Usage(calls, root, name, local=local, deadline=deadline)

    def start(self, deadline: float) -> None:
        """Count if nobody has counted yet, and evict what exceeds the cap (it may have been lowered)."""
        self._usage.acquire(deadline)
        try:
            if not self._usage.known and not self._finish_scan(self._begin_scan(), until=deadline):
                raise TransientError(
                    "the deadline passed while counting the folder", backend=self._name, operation="open"
                )
            before = self._usage.in_use
            try:
                self._make_room(0, deadline)
                if before > self.cap:
                    logger.warning(
                        "%s: the folder held %d bytes, more than its capacity of %d bytes; records were evicted. Every "
                        "process on it must be given the same capacity",
                        self._name, before, self.cap,
                    )  # fmt: skip
            except (KVStoreError, OSError) as error:
                logger.warning(
                    "%s: the folder holds more than its capacity of %d bytes: %s", self._name, self.cap, error
                )
        finally:
            self._usage.release()

    def in_use(self, *, deadline: float) -> int:
        """Bytes of stored and quarantined records, as counted."""
        self._usage.acquire(deadline)
        try:
            return self._usage.in_use
        finally:
            self._usage.release()

    @property
    def records(self) -> int | None:
        """Records, as known; None: the folder has not been walked to its end yet."""
        with self._lock:
            known = len(self._used) + len(self._cold_keys)
        return None if self._scanned_at == float("-inf") else known

    # Around a put.

    def reserve(self, nbytes: int, deadline: float) -> None:
        """Make room for `nbytes` and reserve it, evicting as needed.

        Raises:
            PermanentError: more than the cap (then nothing was evicted), or nothing is left that can be evicted.
            LocalWait: the deadline passed while others used the counter, or puts in flight hold all the room.
            TransientError: the deadline passed.
        """
        if nbytes > self.cap:
            raise self.too_large(nbytes)
        patience = min(deadline, time.monotonic() + _WAIT_SECONDS)
        while True:
            self._usage.acquire(deadline)
            try:
                if self._usage.unclean:
                    self._advance_scan(deadline)
                if self._make_room(nbytes, deadline):
                    self._usage.reserve(nbytes)
                    return
            except OSError as error:
                raise from_os_error(error, backend=self._name, operation="put", what="making room") from error
            finally:
                self._usage.release()
            if time.monotonic() >= patience:
                raise LocalWait("puts in flight hold all of the capacity", backend=self._name, operation="put")
            time.sleep(1e-3)  # another process or lane is about to commit, and its record can be evicted then

    def too_large(self, nbytes: int, key: Key | None = None) -> PermanentError:
        return PermanentError(
            f"a record of {nbytes} bytes exceeds the capacity of {self.cap} bytes",
            backend=self._name, operation="put", key=key,
        )  # fmt: skip

    def commit(self, stored: Sequence[tuple[Write, int, int]], reserved: int, deadline: float) -> None:
        """Records were published: (write, bytes, stamp). `reserved`: bytes no longer reserved, theirs included."""
        if stored:
            with self._lock:
                policy = self._policy
                for write, nbytes, stamp in stored:
                    key = write.key
                    if write.parent is not None and write.parent in self._cold_keys:
                        self._warm(write.parent, 0, stamp + STEP_NS)
                    policy.admit(key, nbytes, parent=write.parent, info=write.info)
                    self._cold_keys.discard(key)
                    self._used[key] = self._stamp[key] = stamp
        added = sum(nbytes for _, nbytes, _ in stored)
        if added or reserved:
            self._usage.change(added=added, reserved=-reserved, deadline=deadline)

    def put_stamps(self, writes: Sequence[Write]) -> list[int]:
        """Modification times for a batch: a record is older than its parent, and than those before it in the batch."""
        now = time.time_ns()
        stamps: list[int] = []
        here: dict[Key, int] = {}
        with self._lock:
            for position, write in enumerate(writes):
                stamp = now - position * STEP_NS
                if write.parent is not None:
                    parent = here.get(write.parent) or self._stamp.get(write.parent, 0)
                    if parent:
                        stamp = min(stamp, parent - STEP_NS)
                here[write.key] = stamp
                stamps.append(stamp)
        return stamps

    def free_some(self, nbytes: int, deadline: float) -> bool:
        """The disk is full although the cap is not reached: evict `nbytes`. True if anything was freed."""
        self._usage.acquire(deadline)
        try:
            return self._evict(lambda freed: nbytes - freed, deadline)[0] > 0
        except OSError as error:
            raise from_os_error(error, backend=self._name, operation="put", what="making room") from error
        finally:
            self._usage.release()

    # What else happens to records.

    def used(self, hits: Sequence[tuple[Key, int, int]]) -> None:
        """Records were read together: (key, bytes, modification time), head first."""
        if not self.counts_reads or not hits:
            return
        now = time.time_ns()
        with self._lock:
            for position, (key, nbytes, mtime_ns) in enumerate(hits):
                if key not in self._used:
                    self._warm(key, nbytes, mtime_ns)
                self._used[key] = now - position * STEP_NS
                self._stamp[key] = mtime_ns
            self._policy.touch([key for key, _, _ in hits])

    def stored_again(self, there: Sequence[tuple[Key, int]], batch: Sequence[Key]) -> None:
        """At the end of a batch of puts: some records were there already (key, bytes); all of `batch` are there now."""
        now = time.time_ns()
        with self._lock:
            for key, nbytes in there:
                if key in self._used:
                    self._used[key] = now
                else:
                    self._warm(key, nbytes, 1)  # its time on disk is not known
                    self._used[key] = now
            self._policy.touch(batch)

    def gone(self, key: Key, nbytes: int, deadline: float) -> None:
        """A record was taken away by this process; `nbytes` fewer lie on the disk."""
        with self._lock:
            self._forget(key)
        if nbytes:
            self._usage.change(removed=nbytes, deadline=deadline)

    def _warm(self, key: Key, nbytes: int, stamp: int) -> None:
        self._cold_keys.discard(key)
        self._policy.admit(key, nbytes)
        self._used[key] = self._stamp[key] = stamp

    def _forget(self, key: Key) -> None:
        self._policy.forget(key)
        self._used.pop(key, None)
        self._stamp.pop(key, None)
        self._cold_keys.discard(key)

    # Making room. The usage counter is locked in all of these.

    def _make_room(self, nbytes: int, deadline: float) -> bool:
        """True when `nbytes` more fit; False when only puts in flight stand in the way.

        Raises:
            PermanentError: nothing is left that can be evicted.
        """
        usage = self._usage

        def excess() -> int:
            return usage.total + nbytes - self.cap

        if excess() > 0:
            usage.reclaim()
        if excess() > 0 and (aside := list_quarantine(self._calls, self._root)):
            keep = max(0, sum(size for _, size in aside) - excess())
            usage.remove(drop_quarantine(self._calls, self._root, files=len(aside), nbytes=keep))
        if excess() <= 0:
            return True
        # With nothing in use (all is reserved by puts in flight) evicting would not help.
        _, stuck, reason = self._evict(lambda freed: excess() if usage.in_use else 0, deadline)
        if excess() <= 0:
            return True
        if usage.others_reserved:
            return False
        detail = f"; {stuck} records could not be removed ({reason})" if reason is not None else ""
        if not self._evicts:
            detail = "; the policy evicts nothing"
        raise PermanentError(
            f"no room for {nbytes} bytes: {usage.in_use} of {self.cap} bytes are in use{detail}",
            backend=self._name, operation="put", cause=reason,
        )  # fmt: skip

    def _evict(self, wanted: Callable[[int], int], deadline: float) -> tuple[int, int, OSError | None]:
        """Remove victims until `wanted(bytes freed so far)` is 0 or none are left.

        Returns the bytes freed, how many records could not be removed, and why.
        """
        if not self._evicts:
            return 0, 0, None
        began = time.monotonic()
        self._advance_scan(deadline)
        freed, stuck, reason = 0, 0, None
        aside: list[tuple[int, Key]] = []
        gone: list[Key] = []
        victims = self._victims()
        try:
            while wanted(freed) > 0 and stuck < _MAX_STUCK:
                if time.monotonic() >= deadline:
                    raise TransientError("the deadline passed while making room", backend=self._name, operation="put")
                with self._lock:
                    victim = next(victims, None)
                if victim is None:
                    if self._scan is not None or self._scanned_at < began:
                        # Out of what we know: look at what is really there, from the beginning to the end.
                        if not self._finish_scan(self._scan or self._begin_scan(), until=deadline):
                            continue
                        with self._lock:
                            victims.close()
                            victims = self._victims()
                        continue
                    break
                key, known, hot = victim
                removed = remove_record(self._calls, self._root, key, unless_used_since=known, prune=self._prune)
                if removed.how is Removal.STUCK:
                    stuck, reason = stuck + 1, removed.error
                    self._count("victims_stuck")
                    if not hot:
                        aside.append((known, key))
                    if reason is not None and reason.errno == errno.EROFS:
                        break
                    continue
                with self._lock:
                    if removed.how is Removal.NEWER:  # another process used it
                        if hot:
                            self._stamp[key] = self._used[key] = removed.mtime_ns
                            self._policy.touch([key])
                        else:
                            self._cold_keys.add(key)
                            heapq.heappush(self._cold, (removed.mtime_ns, key))
                        continue
                    self._forget(key)
                if removed.how is Removal.DONE:
                    freed += removed.nbytes
                    gone.append(key)
                    self._usage.remove(removed.nbytes)
                    self._count("evicted")
        finally:
            with self._lock:
                victims.close()
                for item in aside:
                    self._cold_keys.add(item[1])
                    heapq.heappush(self._cold, item)
            if gone:
                self._evicted(gone)
        return freed, stuck, reason

    def _victims(self) -> Generator[tuple[Key, int, bool], None, None]:
        """(key, modification time as known, hot) in the order in which they should go. Advance it under `_lock`."""
        walker = self._policy.victims()
        hot = next(walker, None)
        try:
            while True:
                while self._cold and self._cold[0][1] not in self._cold_keys:
                    heapq.heappop(self._cold)
                if self._cold and (hot is None or self._cold[0][0] <= self._used.get(hot, 0)):
                    mtime_ns, key = heapq.heappop(self._cold)
                    self._cold_keys.discard(key)
                    yield key, mtime_ns, False
                elif hot is not None:
                    if hot in self._used:
                        yield hot, self._stamp[hot], True
                    hot = next(walker, None)
                else:
                    return
        finally:
            if isinstance(walker, Generator):
                walker.close()

    def _begin_scan(self) -> _Scan:
        self._scan = _Scan(self._calls, self._root, self._usage.added)
        return self._scan

    def _advance_scan(self, deadline: float) -> None:
        """Walk a little, if there is reason to."""
        now = time.monotonic()
        scan = self._scan
        budget = _STEP_SECONDS
        if scan is None:
            if now - self._scanned_at < RESCAN_SECONDS and not self._usage.unclean:
                return
            scan = self._begin_scan()
            budget = _FIRST_SCAN_SECONDS
        self._finish_scan(scan, until=min(deadline, now + budget))

    def _finish_scan(self, scan: _Scan, *, until: float) -> bool:
        """Go on with a walk and use what it found; what a walk that is not finished has found can be evicted already.
        True when it ended."""
        already = len(scan.found)
        done = scan.run(until)
        with self._lock:
            fresh = scan.found[already:]
            for item in fresh:
                if item[1] not in self._used and item[1] not in self._cold_keys:
                    self._cold_keys.add(item[1])
                    heapq.heappush(self._cold, item)
        if not done:
            return False
        self._scan = None
        self._scanned_at = scan.began
        if scan.failed is None or not self._usage.known:
            # Bytes that were added during the walk may have been seen as well: at worst we count them twice.
            self._usage.set_total(scan.total + self._usage.added - scan.added_before)
        self._usage.unclean = False
        if scan.failed is not None:
            logger.warning("%s: a part of the folder cannot be read: %s", self._name, scan.failed)
        return True

    # The end.

    def close(self) -> None:
        """Write the times of last use that are not on disk yet, the most recent first, and close the counter."""
        self._flush()
        self._usage.close()

    def abandon(self) -> None:
        """In a forked child, whose parent goes on with this."""
        self._usage.abandon()

    def _flush(self) -> None:
        if not self.counts_reads:
            return
        until = time.monotonic() + _FLUSH_SECONDS
        with self._lock:
            if not any(used > self._stamp[key] for key, used in self._used.items()):
                return
            order = list(self._policy.victims())
        before = time.time_ns() + STEP_NS
        for key in reversed(order):
            before = min(before - STEP_NS, self._used.get(key, 0))
            if before <= 0 or time.monotonic() >= until:
                return
            if self._stamp[key] == before:
                continue
            try:
                folder = self._calls.open_beneath(self._root, leaf_path(key), HANDLE_FLAGS)
            except OSError:
                continue
            try:
                self._calls.utime(file_name(key), ns=(before, before), dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:  # not the owner, or read-only: others cannot be told
                return
            finally:
                self._calls.close(folder)
