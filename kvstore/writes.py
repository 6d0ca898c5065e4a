"""The write side of the store: records built, encoded where wanted, and written to every replica.

The caller's memory is gathered, never copied (raw codec). Background writes are bounded in bytes: what does not fit
into the queue is dropped at once and said to be, never waited for. Two puts of one key cost one write: the second
waits for the first and tries itself if the first failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from .backend import EXISTS, Outcome, Status, Write
from .codec.base import Codec
from .errors import BackendError, KVStoreError, PermanentError, TransientError
from .keys import Key
from .layout import dtype_itemsize
from .placement import Placement
from .plan import group
from .record import build_record
from .scheduler import Batch, Priority, deadline_passed
from .targets import Counters, Item, Target, attempt

__all__ = ["Writer"]

logger = logging.getLogger("kvstore.writes")


class _Put:
    """One record on its way to its replicas."""

    __slots__ = (
        "batch", "followers", "index", "item", "left", "lock", "nbytes", "outcome", "priority", "segments", "views",
    )  # fmt: skip

    def __init__(self, batch: Batch, index: int, item: Item, segments: Sequence[memoryview]) -> None:
        self.batch = batch
        self.index = index
        self.item = item
        self.segments = segments
        self.nbytes = item.spec.nbytes
        self.followers: list[_Put] = []
        self.priority = Priority.BACKGROUND
        self.lock = threading.Lock()
        self.views: list[memoryview] | None = None  # the built record
        self.left = 1  # replicas without an outcome
        self.outcome: Outcome | None = None  # the best so far

    @property
    def wanted(self) -> bool:
        return self.batch.alive or any(put.batch.alive for put in self.followers)

    def record(self, codec: Codec | None) -> list[memoryview]:
        """The record's views; encoded and checksummed once, by whichever lane comes first."""
        with self.lock:
            if self.views is None:
                item = self.item
                if codec is None:
                    self.views = build_record(item.key, item.spec, self.segments, meta=item.meta)
                else:
                    itemsize = _itemsize(item)
                    encoded = [codec.encode(segment, itemsize=itemsize) for segment in self.segments]
                    self.views = build_record(
                        item.key,
                        item.spec,
                        [each.data for each in encoded],
                        meta=item.meta,
                        codecs=[(each.codec, each.level) for each in encoded],
                    )
            return self.views

    def rank(self, outcome: Outcome) -> None:
        """Keep the best outcome over the replicas: stored anywhere is stored."""
        order = {Status.OK: 3, Status.EXISTS: 2, Status.ERROR: 1, Status.MISS: 0}
        if self.outcome is None or order[outcome.status] > order[self.outcome.status]:
            self.outcome = outcome


class Writer:
    """Plans and runs writes over the targets of one store.

    Args:
        codec: None stores raw.
        queue_bytes: bound on the bytes of puts that are not done.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        placement: Placement,
        counters: Counters,
        *,
        codec: Codec | None,
        queue_bytes: int,
    ) -> None:
        self._targets = targets
        self._placement = placement
        self._counters = counters
        self._codec = codec
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._puts: dict[Key, _Put] = {}
        self._queued = 0

    @property
    def queued_bytes(self) -> int:
        """Bytes of puts that are not done."""
        return self._queued

    def submit(self, batch: Batch, items: Sequence[tuple[Item, Sequence[memoryview]]], priority: Priority) -> None:
        """Start writing; outcomes go to `batch` by index."""
        batch.begin(len(items))
        fresh: list[_Put] = []
        refused: list[_Put] = []
        puts = [_Put(batch, index, item, segments) for index, (item, segments) in enumerate(items)]
        with self._lock:
            for put in puts:
                if put.item.hold is not None:
                    put.item.hold.pin()
                put.priority = priority
                leader = self._puts.get(put.item.key)
                if leader is not None:
                    leader.followers.append(put)
                # An item larger than the whole queue runs alone.
                elif self._queued and self._queued + put.nbytes > self._queue_bytes:
                    refused.append(put)
                else:
                    self._puts[put.item.key] = put
                    self._queued += put.nbytes
                    fresh.append(put)
            self._counters.values["put_items"] += len(items)
            self._counters.values["put_dropped"] += len(refused)
        if refused:
            full = TransientError(
                f"dropped: the write queue holds {self._queued} of {self._queue_bytes} bytes", operation="put"
            )
            self._settle([(put, Outcome.failed(full)) for put in refused])
        self._dispatch(fresh)

    def _dispatch(self, puts: Sequence[_Put]) -> None:
        by_target: dict[tuple[int, Priority], list[_Put]] = {}
        for put in puts:
            order = self._placement.order(put.item.key)
            put.left = len(order)
            for index in order:
                by_target.setdefault((index, put.priority), []).append(put)
        for (index, priority), some in by_target.items():
            target = self._targets[index]
            jobs = group([put.nbytes for put in some], limits=target.limits, capabilities=target.capabilities)
            try:
                target.lanes.submit([self._job(target, some[begin:end]) for begin, end in jobs], priority)
            except KVStoreError as error:
                self._replica_done(some, [Outcome.failed(error)] * len(some))

    def _job(self, target: Target, puts: Sequence[_Put]) -> Callable[[], None]:
        return lambda: self._replica_done(puts, self._write(target, puts))

    def _write(self, target: Target, puts: Sequence[_Put]) -> list[Outcome]:
        """Write records to one target. Never raises."""
        outcomes: list[Outcome | None] = [None] * len(puts)
        for index, put in enumerate(puts):
            if not put.wanted:
                outcomes[index] = deadline_passed(target.name, "put")
        deadline = max((put.batch.deadline for put in puts), default=0.0)
        backend, keys = target.backend, [put.item.key for put in puts]
        if self._codec is not None:  # encoding what is there already would be wasted
            open_ = [index for index, outcome in enumerate(outcomes) if outcome is None]
            asked = [keys[index] for index in open_]
            found = attempt(target.name, "put", len(open_), lambda: backend.stat(asked, deadline=deadline))
            for index, outcome in zip(open_, found, strict=True):
                if outcome.status is Status.OK:
                    outcomes[index] = EXISTS
        writes, places = [], []
        for index, put in enumerate(puts):
            if outcomes[index] is None:
                try:
                    record = put.record(self._codec)
                except KVStoreError as error:  # meta that does not fit the format
                    outcomes[index] = Outcome.failed(error)
                except (MemoryError, ValueError, TypeError) as error:
                    outcomes[index] = Outcome.failed(PermanentError(f"encoding failed: {error}", key=keys[index]))
                else:
                    writes.append(Write(keys[index], record, put.item.parent))
                    places.append(index)
        if writes:
            written = attempt(target.name, "put", len(writes), lambda: backend.put(writes, deadline=deadline))
            for index, outcome in zip(places, written, strict=True):
                outcomes[index] = outcome
        return [_UNTOLD if outcome is None else outcome for outcome in outcomes]

    def _replica_done(self, puts: Sequence[_Put], outcomes: Sequence[Outcome]) -> None:
        """One target is done with these records; settle those that have no replica left."""
        done: list[tuple[_Put, Outcome]] = []
        again: list[_Put] = []
        with self._lock:
            for put, outcome in zip(puts, outcomes, strict=True):
                put.rank(outcome)
                put.left -= 1
                if put.left or put.outcome is None:
                    continue
                put.views = None
                done.append((put, put.outcome))
                self._queued -= put.nbytes
                del self._puts[put.item.key]
                followers, put.followers = put.followers, []
                if put.outcome.stored:
                    done += [(follower, EXISTS) for follower in followers]
                elif followers:
                    self._promote(followers, put.outcome, done, again)
            for _, outcome in done:
                self._count(outcome)
            self._idle.notify_all()
        self._settle(done)
        if again:
            self._dispatch(again)

    def _promote(
        self, followers: list[_Put], outcome: Outcome, done: list[tuple[_Put, Outcome]], again: list[_Put]
    ) -> None:
        """The first writer of a key failed: the next one who still waits really tries."""
        alive = [put for put in followers if put.batch.alive]
        done += [(put, outcome) for put in followers if not put.batch.alive]
        if alive:
            leader, leader.followers = alive[0], alive[1:]
            self._puts[leader.item.key] = leader
            self._queued += leader.nbytes
            again.append(leader)

    def _count(self, outcome: Outcome) -> None:
        values = self._counters.values
        if outcome.status is Status.OK:
            values["put_stored"] += 1
            values["put_bytes"] += outcome.nbytes
        elif outcome.status is Status.EXISTS:
            values["put_exists"] += 1
        else:
            values["put_errors"] += 1

    @staticmethod
    def _settle(done: Sequence[tuple[_Put, Outcome]]) -> None:
        results: dict[Batch, list[tuple[int, Outcome]]] = {}
        for put, outcome in done:
            results.setdefault(put.batch, []).append((put.index, outcome))
            if put.item.hold is not None:
                put.item.hold.unpin()
        for batch, outcomes in results.items():
            batch.end(len(outcomes))
            batch.settle(outcomes)

    def drain(self, end: float) -> bool:
        """Wait until no put is under way, or until the absolute monotonic time `end`. True if none is."""
        with self._idle:
            while self._puts:
                left = end - time.monotonic()
                if left <= 0 or not self._idle.wait(left):
                    return not self._puts
        return True

    def abandon(self, error: BackendError | KVStoreError) -> None:
        """End every put that has not begun; its lanes' queues were dropped."""
        with self._lock:
            puts = [put for put in self._puts.values() if put.views is None]
        for put in puts:
            put.batch.fail(error)


_UNTOLD = Outcome.failed(PermanentError("the backend gave no outcome", operation="put"))


def _itemsize(item: Item) -> int:
    """Bytes per element, for codecs that work on byte planes; 1 if the record does not say its dtype."""
    dtype = item.meta.get("dtype")
    return dtype_itemsize(dtype) if isinstance(dtype, str) else 1
