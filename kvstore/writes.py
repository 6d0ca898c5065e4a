"""The write side of the store: records built, encoded where wanted, and written to every replica.

The caller's memory is gathered, never copied (raw codec). Background writes are bounded in bytes: what does not fit
into the queue is dropped at once and said to be, never waited for. Two puts of one key cost one write: the second
waits for the first and tries itself if the first failed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from .backend import EXISTS, Capability, Outcome, Status, Write
from .buffers import Buffer
from .codec.base import Codec, Encoded, SegmentInfo
from .errors import ClosedError, ConfigError, KVStoreError, PermanentError, TransientError
from .keys import Key
from .layout import canonical_dtype, dtype_itemsize
from .placement import Placement
from .plan import group
from .record import build_record
from .scheduler import Batch, Job, Priority, by_priority, deadline_passed, seconds_left, traces_of
from .targets import Counters, Item, Target, attempt, pin_all
from .telemetry.tracing import BatchTrace

__all__ = ["Put", "Writer"]

logger = logging.getLogger("kvstore.writes")

_MAX_POSITION = (1 << 31) - 1
_HOT_BYTES = 4 << 20
"""Where a batch is not cheaper for the backend, it gets about so much at once: what was just checksummed is then still
in the cache as it is copied (4 MiB records to files: 8 % less time, 10 % less CPU time)."""
_RANK = {Status.OK: 3, Status.EXISTS: 2, Status.ERROR: 1, Status.MISS: 0}


class Put:
    """One record on its way to its replicas; or one that waits for another put of its key (its `host`).

    Args:
        segments: `item.segments` as flat views of bytes.
    """

    batch: Batch
    index: int  # in the batch
    # What few puts need is set when it is needed.
    priority = Priority.DEMAND
    jobs: Sequence[_WriteJob] = ()
    riders: dict[Put, None] | None = None  # puts of the same key that wait for this one
    host: Put | None = None
    lock: threading.Lock | None = None  # if it goes to several targets
    views: list[memoryview] | None = None  # the built record
    left = 1  # replicas without an outcome
    outcome: Outcome | None = None  # the best so far

    def __init__(self, item: Item, segments: Sequence[memoryview]) -> None:
        self.item = item
        self.key = item.key
        self.segments = segments
        self.nbytes = item.spec.nbytes

    @property
    def hold(self) -> Buffer | None:
        return self.item.hold

    def record(self, codec: Codec | None) -> list[memoryview]:
        """The record's views; encoded and checksummed once, by whichever lane comes first."""
        if self.lock is None:
            return self._build(codec)
        with self.lock:
            if self.views is None:
                self.views = self._build(codec)
            return self.views

    def _build(self, codec: Codec | None) -> list[memoryview]:
        item, spec = self.item, self.item.spec
        if codec is None:
            return build_record(item.key, spec, self.segments, meta=item.meta)
        about = _about(item, lossless=codec.lossless)
        coarse: list[Encoded] = []
        refinements: list[tuple[int, int, memoryview]] = []
        for layer, segment in enumerate(self.segments):
            first, *finer = codec.encode(segment, about._replace(layer=layer))
            coarse.append(first)
            refinements += [(layer, each.level, each.data) for each in finer]
        numbers = [each.codec for each in coarse]
        views = [each.data for each in coarse]
        return build_record(item.key, spec, views, meta=item.meta, codecs=numbers, refinements=refinements)

    def rank(self, outcome: Outcome) -> None:
        """Keep the best outcome over the replicas: stored anywhere is stored."""
        if self.outcome is None or _RANK[outcome.status] > _RANK[self.outcome.status]:
            self.outcome = outcome

    @property
    def deadline(self) -> float:
        """The latest deadline of those who wait for it."""
        waiting = (self, *self.riders) if self.riders else (self,)
        return max(put.batch.deadline for put in waiting)


class _WriteJob(Job):
    """Puts to one target."""

    __slots__ = ("_writer", "puts", "target")

    def __init__(self, priority: Priority, target: Target, puts: Sequence[Put], writer: Writer) -> None:
        super().__init__(priority)
        self.target = target
        self.puts = puts  # empty once they have ended
        self._writer = writer

    @property
    def wanted(self) -> bool:
        """False if nobody waits for any of it."""
        return any(put.batch.alive for put in self.puts)

    def run(self) -> None:
        self._end(self._writer.write(self.target, self.puts))

    def about(self) -> tuple[str, int, Sequence[BatchTrace]]:
        return "put", len(self.puts), traces_of(put.batch for put in self.puts)

    def drop(self, error: KVStoreError) -> None:
        self._end([Outcome.failed(error)] * len(self.puts))

    def refuse(self, error: KVStoreError) -> None:
        """No lane will take it, nor another one for those who wait for these puts."""
        self._end([Outcome.failed(error)] * len(self.puts), promote=False)

    def _end(self, outcomes: Sequence[Outcome], *, promote: bool = True) -> None:
        puts, self.puts = self.puts, ()
        self._writer.replica_done(puts, outcomes, promote=promote)


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
        self._less = threading.Condition(self._lock)
        self._current: dict[Key, Put] = {}
        self._queued = 0

    @property
    def queued_bytes(self) -> int:
        """Bytes of puts that are not done."""
        return self._queued

    def submit(self, batch: Batch, puts: Sequence[Put], priority: Priority, *, wait: bool = False) -> None:
        """Start writing; outcomes go to `batch` by index.

        Args:
            wait: wait for room in the queue, until the batch's deadline.

        Raises:
            ClosedError: a `hold` was released.
        """
        try:
            pin_all([put.item.hold for put in puts if put.item.hold is not None])
        except ClosedError as error:
            batch.fail(error)
            raise
        batch.begin(len(puts))
        fresh: list[Put] = []
        try:
            self._enter(batch, puts, priority, fresh, wait=wait)
            self._dispatch(fresh)
        except BaseException:  # an interrupt: nobody may wait for a put that never starts
            self._ground(fresh)
            raise
        batch.on_give_up(lambda: self._leave(batch, puts))

    def _await_room(self, batch: Batch, nbytes: int) -> None:
        """Called with the lock held, which it keeps from its last look at the queue on: the room is the caller's."""
        while self._queued and self._queued + nbytes > self._queue_bytes and batch.alive:
            if not self._less.wait(seconds_left(batch.deadline)):
                return

    def _enter(self, batch: Batch, puts: Sequence[Put], priority: Priority, fresh: list[Put], *, wait: bool) -> None:
        refused: list[Put] = []
        urgent: list[_WriteJob] = []
        for index, put in enumerate(puts):
            put.batch, put.index, put.priority = batch, index, priority
        with self._less:
            if wait:
                try:
                    self._await_room(batch, sum(put.nbytes for put in puts))
                except BaseException:  # an interrupt: all of them end
                    fresh += puts
                    raise
            for put in puts:
                host = self._current.get(put.key)
                if host is not None:
                    self._ride(put, host, urgent)
                # An item larger than the whole queue runs alone.
                elif self._queued and self._queued + put.nbytes > self._queue_bytes:
                    refused.append(put)
                else:
                    self._current[put.key] = put
                    self._queued += put.nbytes
                    fresh.append(put)
            self._counters.values["put_items"] += len(puts)
            self._counters.values["put_dropped"] += len(refused)
            queued = self._queued
        for job in urgent:
            job.target.lanes.promote(job, priority)
        if refused:
            message = f"dropped: the write queue holds {queued} of {self._queue_bytes} bytes"
            full = Outcome.failed(TransientError(message, operation="put"))
            self._settle([(put, full) for put in refused])

    @staticmethod
    def _ride(put: Put, host: Put, urgent: list[_WriteJob]) -> None:
        """`put` waits for `host`. Called with the lock held."""
        put.host = host
        if host.riders is None:
            host.riders = {}
        host.riders[put] = None
        if put.priority < host.priority:  # nobody waits behind work of a lower priority than his own
            host.priority = put.priority
            urgent += host.jobs

    def _ground(self, puts: Sequence[Put]) -> None:
        error = TransientError("submitting it was interrupted", operation="put")
        for job in {job: None for put in puts for job in put.jobs}:
            if job.target.lanes.withdraw(job):
                job.target.lanes.drop(job, error)
        never = [put for put in puts if not put.jobs]
        for put in never:
            put.left = 1
        self.replica_done(never, [Outcome.failed(error)] * len(never))

    def _leave(self, batch: Batch, puts: Sequence[Put]) -> None:
        """`batch` gave up: take its puts off whatever has not begun to write them."""
        left: list[Put] = []
        jobs: dict[_WriteJob, None] = {}
        with self._lock:
            for put in puts:
                if put.host is None:
                    jobs.update(dict.fromkeys(put.jobs))
                elif put.host.riders and put in put.host.riders:
                    del put.host.riders[put]
                    left.append(put)
            self._counters.values["put_errors"] += len(left)
        _unpin(left)
        batch.end(len(left))
        gone = TransientError("nobody waits for it any more", operation="put")
        for job in jobs:
            if not job.wanted and job.target.lanes.withdraw(job):
                job.target.lanes.drop(job, gone)

    def _dispatch(self, puts: Sequence[Put]) -> None:
        by_target: dict[int, Sequence[Put]] = {0: puts}
        if len(self._targets) > 1:
            spread: dict[int, list[Put]] = {}
            for put in puts:
                order = self._placement.order(put.key)
                if len(order) > 1:
                    put.left = len(order)
                    put.lock = threading.Lock()
                for index in order:
                    spread.setdefault(index, []).append(put)
            by_target = {**spread}
        queues: list[tuple[Target, Priority, list[_WriteJob]]] = []
        for index, some in by_target.items():
            target = self._targets[index]
            for priority, equal in by_priority(some):
                jobs = []
                sizes = [put.nbytes for put in equal]
                for begin, end in group(sizes, limits=target.limits, capabilities=target.capabilities):
                    job = _WriteJob(priority, target, equal[begin:end], self)
                    jobs.append(job)
                    its = (job,)
                    for put in job.puts:
                        put.jobs = (*put.jobs, job) if put.jobs else its
                queues.append((target, priority, jobs))
        for target, priority, jobs in queues:  # once every put knows all its jobs
            try:
                target.lanes.submit(jobs)
            except KVStoreError as error:
                for job in jobs:
                    job.refuse(error)
                continue
            for job in jobs:  # somebody more urgent may have come before there were jobs
                for put in job.puts:
                    if put.priority is not priority:
                        target.lanes.promote(job, put.priority)

    def write(self, target: Target, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Write records to one target."""
        outcomes: list[Outcome | None] = [None] * len(puts)
        deadline, batch = -math.inf, None
        for index, put in enumerate(puts):
            if not put.batch.alive:
                outcomes[index] = deadline_passed(target.name, "put")
                continue
            if put.batch is not batch:
                batch = put.batch
                deadline = max(deadline, batch.deadline)
            if put.riders:
                deadline = max(deadline, put.deadline)
        backend = target.backend
        if self._codec is not None:  # encoding what is there already would be wasted
            open_ = [index for index, outcome in enumerate(outcomes) if outcome is None]
            asked = [puts[index].key for index in open_]
            found = attempt(target.name, "put", len(open_), lambda: backend.stat(asked, deadline=deadline))
            for index, outcome in zip(open_, found, strict=True):
                if outcome.status is Status.OK:
                    outcomes[index] = EXISTS
        writes: list[Write] = []
        places: list[int] = []
        nbytes, most = 0, math.inf if Capability.NATIVE_BATCH in target.capabilities else _HOT_BYTES
        for index, put in enumerate(puts):
            if outcomes[index] is None:
                if nbytes and nbytes + put.nbytes > most:
                    _written(target, writes, places, deadline, outcomes)
                    writes, places, nbytes = [], [], 0
                try:
                    record = put.record(self._codec)
                except KVStoreError as error:  # meta that does not fit the format
                    outcomes[index] = Outcome.failed(error)
                except Exception as error:  # noqa: BLE001 - memory taken away, a map changed meanwhile, a codec's own
                    message = f"the record cannot be built: {type(error).__name__}: {error}"
                    outcomes[index] = Outcome.failed(PermanentError(message, operation="put", key=put.key))
                else:
                    writes.append(Write(put.key, record, put.item.parent, put.item.info))
                    places.append(index)
                    nbytes += put.nbytes
        if writes:
            _written(target, writes, places, deadline, outcomes)
        return [_untold(target) if outcome is None else outcome for outcome in outcomes]

    def replica_done(self, puts: Sequence[Put], outcomes: Sequence[Outcome], *, promote: bool = True) -> None:
        """One target is done with these records; settle those that have no replica left.

        Args:
            promote: if a put failed, let one that waits for it try.
        """
        done: list[tuple[Put, Outcome]] = []
        again: list[Put] = []
        urgent: list[_WriteJob] = []
        with self._less:
            for put, outcome in zip(puts, outcomes, strict=True):
                best = outcome
                if put.lock is not None:
                    put.rank(outcome)
                    put.left -= 1
                    if put.left or put.outcome is None:
                        continue
                    put.views, best = None, put.outcome
                done.append((put, best))
                if self._current.get(put.key) is put:
                    del self._current[put.key]
                    self._queued -= put.nbytes
                if put.riders:
                    riders, put.riders = put.riders, None
                    if best.stored:
                        done += [(rider, EXISTS) for rider in riders]
                    elif not promote:
                        done += [(rider, best) for rider in riders]
                    else:
                        self._promote(riders, best, done, again, urgent)
            for put, outcome in done:
                self._count(put, outcome)
            self._less.notify_all()
        if again:  # before callbacks run: one that takes its time holds nobody up
            self._dispatch(again)
            for put in again:
                if not put.batch.alive:  # it gave up just before there was a job that could be withdrawn
                    self._leave(put.batch, [put])
        self._settle(done)

    def _promote(
        self,
        riders: dict[Put, None],
        outcome: Outcome,
        done: list[tuple[Put, Outcome]],
        again: list[Put],
        urgent: list[_WriteJob],
    ) -> None:
        """The first writer of a key failed: the next one who still waits really tries."""
        alive = [put for put in riders if put.batch.alive]
        done += [(put, outcome) for put in riders if not put.batch.alive]
        if not alive:
            return
        host, *others = alive
        host.host = None
        for put in others:
            self._ride(put, host, urgent)
        self._current[host.key] = host
        self._queued += host.nbytes
        again.append(host)

    def _count(self, put: Put, outcome: Outcome) -> None:
        values = self._counters.values
        if outcome.status is Status.OK:
            values["put_stored"] += 1
            values["put_bytes"] += outcome.nbytes
            values["put_raw_bytes"] += put.item.spec.raw_bytes
        elif outcome.status is Status.EXISTS:
            values["put_exists"] += 1
        else:
            values["put_errors"] += 1

    @staticmethod
    def _settle(done: Sequence[tuple[Put, Outcome]]) -> None:
        results: dict[Batch, list[tuple[int, Outcome]]] = {}
        batch, outcomes = None, []
        for put, outcome in done:
            if put.batch is not batch:
                batch = put.batch
                outcomes = results.setdefault(batch, [])
            outcomes.append((put.index, outcome))
        _unpin([put for put, _ in done])
        for batch, outcomes in results.items():
            batch.settle(outcomes, ended=len(outcomes))

    def drain(self, end: float) -> bool:
        """Wait until no put is under way, or until the absolute monotonic time `end`. True if none is."""
        with self._less:
            return self._less.wait_for(lambda: not self._current, seconds_left(end))


def _written(
    target: Target, writes: Sequence[Write], places: Sequence[int], deadline: float, outcomes: list[Outcome | None]
) -> None:
    """Write records with one call of the backend; its answers go to `outcomes`, at `places`."""
    backend = target.backend
    found = attempt(target.name, "put", len(writes), lambda: backend.put(writes, deadline=deadline))
    for index, outcome in zip(places, found, strict=True):
        outcomes[index] = outcome


def _unpin(puts: Sequence[Put]) -> None:
    for put in puts:
        if put.item.hold is not None:
            try:
                put.item.hold.unpin()
            except KVStoreError:  # somebody unpinned what he had not pinned; others must not wait for ever
                logger.exception("a buffer has lost its pin")


def _untold(target: Target) -> Outcome:
    return Outcome.failed(PermanentError("the backend gave no outcome", backend=target.name, operation="put"))


def _about(item: Item, *, lossless: bool) -> SegmentInfo:
    """What a codec is told of an item's segments: what its spec says, and of the meta the names `tokens`, `rope` and
    `positions`. Raises `ConfigError` if these contradict each other."""
    spec, meta = item.spec, item.meta
    dtype = meta.get("dtype") if spec.dtype is None else spec.dtype
    itemsize = dtype_itemsize(dtype) if isinstance(dtype, str) else 1
    if spec.layout is None or lossless:
        return SegmentInfo(itemsize)
    if isinstance(meta.get("dtype"), str) and canonical_dtype(meta["dtype"]) != spec.dtype:
        raise ConfigError(f"the spec is of {spec.dtype}, but meta says dtype {meta['dtype']!r}")
    rope = meta.get("rope")
    if rope not in (None, "applied", "none"):
        raise ConfigError(f"meta rope={rope!r} is not known; use 'applied', or 'none' for K before the rotation")
    start, positions = None, None
    span = meta.get("tokens")
    if span is not None:
        start, end = _span(span)
        if (packed := meta.get("positions")) is not None:
            from .dropping import unpack_positions

            positions = unpack_positions(packed, start, end)
        held = end - start if positions is None else len(positions)
        if held != spec.tokens:
            what = "tokens" if positions is None else "tokens and positions"
            raise ConfigError(f"meta {what} say that the record holds {held} tokens, but its spec says {spec.tokens}")
    elif meta.get("positions") is not None:
        raise ConfigError("meta positions needs meta tokens, [begin, end], which it is a map of")
    return SegmentInfo(itemsize, 0, spec.layout, spec.dtype, spec.tokens, start, positions, rope)


def _span(tokens: object) -> tuple[int, int]:
    if isinstance(tokens, list | tuple) and len(tokens) == 2 and all(type(each) is int for each in tokens):
        begin, end = tokens
        if 0 <= begin <= end <= _MAX_POSITION:
            return begin, end
    raise ConfigError(f"meta tokens={tokens!r:.60} is not [begin, end], positions in the prompt")
