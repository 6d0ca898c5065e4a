"""Questions about keys: lookups, headers, leases, deletes. They go to the replicas of each key, one after the other,
until one has it (or to all of them); the caller's memory takes no part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .backend import MISS, Outcome, Read, Status
from .buffers import Buffer
from .errors import ClosedError, CorruptRecord, KVStoreError, TransientError
from .keys import Key
from .placement import Placement
from .plan import group
from .record import RAW, Header, NeedMore, checksum, parse_header
from .scheduler import Batch, Job, Priority, deadline_passed, traces_of
from .staged import Stager, call_get
from .targets import Counters, Target, attempt
from .telemetry.tracing import BatchTrace

__all__ = ["Asker", "delete", "stat"]

Call = Callable[[Target, Sequence[Key], float], Sequence[Any]]
"""One call of a backend: (target, keys, deadline) → an `Outcome`, or what was found, for each key."""

_ANSWERS = (Outcome, Buffer, Header)

_HEAD_BYTES = 4096


class _AskJob(Job):
    """A question to one target."""

    __slots__ = ("_question", "indices", "number", "target")

    def __init__(self, question: _Question, target: Target, indices: Sequence[int], number: int) -> None:
        super().__init__(Priority.DEMAND)
        self.target = target
        self.indices = indices  # empty once they have an answer
        self.number = number  # which replica of each this is
        self._question = question

    def run(self) -> None:
        self._end(self._question.call(self.target, self.indices))

    def drop(self, error: KVStoreError) -> None:
        self._end([Outcome.failed(error)] * len(self.indices))

    def about(self) -> tuple[str, int, Sequence[BatchTrace]]:
        return self._question.operation, len(self.indices), traces_of((self._question.batch,))

    def _end(self, results: Sequence[Any]) -> None:
        indices, self.indices = self.indices, ()
        self._question.open_jobs.discard(self)
        self._question.answered(indices, results, self.number)


class _Question:
    """What one batch asks.

    Attributes:
        open_jobs: those that have not ended.
    """

    def __init__(
        self, targets: Sequence[Target], orders: Sequence[tuple[int, ...]], batch: Batch, keys: Sequence[Key],
        call: Call, operation: str, *, first_hit: bool,
    ) -> None:  # fmt: skip
        self._targets = targets
        self._orders = orders
        self.batch = batch
        self._keys = keys
        self._call = call
        self.operation = operation
        self._first_hit = first_hit
        self._best: list[Any] = [MISS] * len(keys)
        self.open_jobs: set[_AskJob] = set()

    def ask(self, indices: Sequence[int], number: int) -> None:
        """Ask the `number`-th replica of each of these keys."""
        by_target: dict[int, list[int]] = {}
        for index in indices:
            by_target.setdefault(self._orders[index][number], []).append(index)
        for place, some in by_target.items():
            target = self._targets[place]
            parts = group([1] * len(some), limits=target.limits, capabilities=target.capabilities)
            jobs = [_AskJob(self, target, some[begin:end], number) for begin, end in parts]
            self.open_jobs.update(jobs)
            try:
                target.lanes.submit(jobs)
            except KVStoreError as error:
                for job in jobs:
                    job.drop(error)
        if number and not self.batch.alive:  # it gave up just before there were jobs that could be withdrawn
            self.leave()

    def call(self, target: Target, indices: Sequence[int]) -> Sequence[Any]:
        batch, keys = self.batch, [self._keys[index] for index in indices]
        if not batch.alive:
            return [deadline_passed(target.name, self.operation)] * len(keys)
        return attempt(
            target.name, self.operation, len(keys), lambda: self._call(target, keys, batch.deadline), _ANSWERS
        )

    def answered(self, indices: Sequence[int], results: Sequence[Any], number: int) -> None:
        best, orders = self._best, self._orders
        final, more = [], []
        for index, result in zip(indices, results, strict=True):
            hit = not isinstance(result, Outcome) or result.status is Status.OK
            if hit or (isinstance(result, Outcome) and best[index] is MISS):
                best[index] = result
            if number + 1 < len(orders[index]) and not (hit and self._first_hit):
                more.append(index)
            else:
                final.append((index, best[index]))
        if more and self.batch.alive:  # before callbacks run: one that takes its time holds nobody up
            self.ask(more, number + 1)
        for late in self.batch.settle(final):
            if isinstance(late, Buffer):
                late.release()

    def leave(self) -> None:
        """The batch gave up: take back what no lane has begun."""
        gone = TransientError("nobody waits for it any more", operation=self.operation)
        for job in list(self.open_jobs):
            if job.target.lanes.withdraw(job):
                job.target.lanes.drop(job, gone)


class Asker:
    """Asks the targets of one store."""

    def __init__(self, targets: Sequence[Target], placement: Placement, stager: Stager, counters: Counters) -> None:
        self._counters = counters
        self._targets = targets
        self._order = placement.order
        self._stager = stager

    def submit(self, batch: Batch, keys: Sequence[Key], call: Call, operation: str, *, first_hit: bool) -> None:
        """Ask about keys; answers go to `batch` by index.

        Args:
            first_hit: the first replica that has it answers for all; else all are asked, and the best answer counts.
        """
        orders = [self._order(key) for key in keys]
        question = _Question(self._targets, orders, batch, keys, call, operation, first_hit=first_hit)
        question.ask(range(len(keys)), 0)
        batch.on_give_up(question.leave)

    def heads(self, target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
        """Verified headers of records. One that proves corrupt twice is quarantined, as by a read."""
        memory = memoryview(bytearray(_HEAD_BYTES * len(keys)))
        views = [memory[at : at + _HEAD_BYTES] for at in range(0, len(memory), _HEAD_BYTES)]
        reads = [Read(key, view) for key, view in zip(keys, views, strict=True)]
        outcomes = target.backend.get_into(reads, deadline=deadline)
        return [
            self._head(target, key, view[: outcome.nbytes], deadline) if outcome.status is Status.OK else outcome
            for key, view, outcome in zip(keys, views, outcomes, strict=True)
        ]

    def _head(self, target: Target, key: Key, data: memoryview, deadline: float) -> Header | Outcome:
        try:
            return parse_header(data, key=key)
        except CorruptRecord as error:
            need = error.need if isinstance(error, NeedMore) else _HEAD_BYTES
        memory = memoryview(bytearray(max(need, _HEAD_BYTES)))
        (outcome,) = call_get(target, [Read(key, memory)], deadline)
        if outcome.status is not Status.OK:
            return outcome
        try:
            return parse_header(memory[: outcome.nbytes], key=key)
        except CorruptRecord:
            self._stager.quarantine(target, key, deadline)
            return MISS

    def lease(self, target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
        """Leases on whole records stored raw, verified; MISS for others. What proves corrupt, and again when read, is
        quarantined."""
        leases = target.backend.lease(keys, deadline=deadline)
        results: list[Any] = [MISS] * len(keys)
        unusable: list[Buffer | None] = []
        suspects: list[tuple[Key, int]] = []
        good = False
        try:
            if len(leases) != len(keys):
                raise TransientError(f"it gave {len(leases)} leases for {len(keys)} keys", backend=target.name)
            for index, key in enumerate(keys):
                buffer = leases[index]
                if buffer is None:
                    continue
                try:
                    if _all_raw(buffer.view, key) and buffer.intact:
                        results[index] = buffer
                    else:
                        unusable.append(buffer)
                except CorruptRecord:
                    suspects.append((key, buffer.nbytes))
                    unusable.append(buffer)
                except ClosedError:  # memory of another process that has gone, or given back already
                    unusable.append(buffer)
            good = True
        finally:  # before a second look: a lease must not keep its record from being put aside
            for buffer in unusable if good else leases:
                if buffer is not None:
                    try:
                        buffer.release()
                    except ClosedError:  # nobody's any more; the others must be given back all the same
                        pass
        try:
            for key, nbytes in suspects:
                self._condemn(target, key, nbytes, deadline)
        except BaseException:
            for result in results:
                if isinstance(result, Buffer):
                    result.release()
            raise
        counters, served = self._counters, len(results) - results.count(MISS)
        if served:
            with counters.lock:
                counters.served.setdefault((target.index, -1), [0, 0])[0] += served
        return results

    def _condemn(self, target: Target, key: Key, nbytes: int, deadline: float) -> None:
        """Read a record of which a lease looked corrupt into memory of our own; quarantine it if it is corrupt."""
        memory = memoryview(bytearray(nbytes))
        (outcome,) = call_get(target, [Read(key, memory)], deadline)
        if outcome.status is not Status.OK:
            return
        try:
            _all_raw(memory[: outcome.nbytes], key)
        except CorruptRecord:
            self._stager.quarantine(target, key, deadline)


def stat(target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
    return target.backend.stat(keys, deadline=deadline)


def delete(target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
    return target.backend.delete(keys, deadline=deadline)


def _all_raw(view: memoryview, key: Key) -> bool:
    """Verify a whole record; True if all of it is stored raw. Raises `CorruptRecord` if it is not what it should be."""
    header = parse_header(view, key=key, nbytes=len(view))
    for segment in header.segments:
        if checksum(view[segment.offset : segment.offset + segment.length]) != segment.checksum:
            raise CorruptRecord("a segment's checksum is wrong", operation="lease", key=key)
    return all(segment.codec == RAW for segment in header.segments)
