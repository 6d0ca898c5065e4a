"""Lanes, priorities and deadlines. One job is one call of a backend; nothing here happens per key.

A `LaneGroup` runs the jobs of one backend on its lanes (threads): demand reads before prefetches before background
writes, and background work never holds the last free lane. A `Batch` collects the outcomes of what was submitted
together; the `Timer` (timer.py) ends it at its deadline even if a lane hangs. Memory that a hung lane may still write
to stays pinned until that lane returns; what no lane has begun by then is withdrawn, so that it waits for nobody.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from .backend import Outcome, Status
from .completion import Completion
from .errors import ClosedError, KVStoreError, PermanentError, TransientError
from .telemetry.tracing import BatchTrace, Tracer, run_traced

__all__ = ["Batch", "Job", "LaneGroup", "Priority", "by_priority", "deadline_passed", "seconds_left", "traces_of"]

logger = logging.getLogger("kvstore.scheduler")

_NOTICE_S = 1.0  # for an idle thread to end, even if the time is up


class Priority(enum.IntEnum):
    """What goes first when lanes are scarce."""

    DEMAND = 0  # somebody waits for it
    PREFETCH = 1  # somebody probably will
    BACKGROUND = 2  # nobody waits


def deadline_passed(backend: str | None, operation: str) -> Outcome:
    """The outcome of an item that was not done by its deadline."""
    return Outcome(
        Status.ERROR, 0, TransientError("the deadline passed before it was done", backend=backend, operation=operation)
    )


def seconds_left(end: float) -> float:
    """Seconds until the monotonic time `end`, as waits of the standard library take them: not negative, and not
    beyond what they can count."""
    return min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)


class _Ranked(Protocol):
    priority: Priority


_R = TypeVar("_R", bound=_Ranked)


def traces_of(batches: Iterable[Batch]) -> list[BatchTrace]:
    """The traces of those batches that have one, each once."""
    return list(dict.fromkeys(batch.trace for batch in batches if batch.trace is not None))


def by_priority(things: Sequence[_R]) -> list[tuple[Priority, Sequence[_R]]]:
    """Things of one priority together, the most urgent first. Mostly they all have the same."""
    ranks = [thing.priority for thing in things]
    if not ranks or ranks.count(ranks[0]) == len(ranks):
        return [(ranks[0], things)] if ranks else []
    return [(rank, [thing for thing in things if thing.priority is rank]) for rank in sorted(set(ranks))]


class Batch:
    """The outcomes of one submission, gathered from many jobs, resolved once.

    Args:
        size: number of items.
        deadline: absolute monotonic seconds.
        finish: makes the completion's result from the outcomes (in submission order).

    Attributes:
        alive: False once it is resolved, expired, cancelled or failed: nobody waits for its items any more.
        trace: what is traced of it; None: nothing is.
    """

    __slots__ = (
        "__weakref__", "_busy", "_cut_short", "_finish", "_hook", "_left", "_lock", "_outcomes", "_quiet", "alive",
        "completion", "deadline", "trace",
    )  # fmt: skip

    def __init__(self, size: int, deadline: float, finish: Callable[[list[Any]], Any]) -> None:
        self.deadline = deadline
        self.completion: Completion[Any] = Completion()
        self.alive = True
        self.trace: BatchTrace | None = None
        self._finish = finish
        self._outcomes: list[Any] = [None] * size
        self._left = size  # items without an outcome
        self._busy = 0  # uses of the caller's memory under way
        self._hook: Callable[[], None] | None = None
        self._cut_short = False
        self._lock = threading.Lock()
        self._quiet = self.completion.expect_late_io()
        self.completion.on_cancel(self._cancelled)
        if not size:
            self.settle(())

    def begin(self, count: int) -> None:
        """`count` items' memory is handed to I/O; each is taken back by `settle` or `end`."""
        with self._lock:
            self._busy += count

    def on_give_up(self, hook: Callable[[], None]) -> None:
        """Have `hook` called if the batch ends before all its outcomes are there: at once if that has happened. It
        lets go of what has not begun. Called before the completion is resolved; must not block."""
        with self._lock:
            if self.alive:
                self._hook = hook
                return
        if self._cut_short:
            hook()

    def settle(self, results: Iterable[tuple[int, Any]], ended: int = 0) -> list[Any]:
        """Record (index, outcome) pairs.

        Args:
            ended: so many items' I/O has really ended with this, as `end` says.

        Returns:
            The outcomes that came too late to be delivered.
        """
        late: list[Any] = []
        complete: list[Any] | None = None
        with self._lock:
            self._busy -= ended
            if self.alive:
                outcomes = self._outcomes
                for index, outcome in results:
                    if outcomes[index] is None:
                        outcomes[index] = outcome
                        self._left -= 1
                if not self._left:
                    self.alive = False
                    complete, self._outcomes, self._hook = outcomes, [], None
            else:
                late = [outcome for _, outcome in results]
            quiet = not self._busy and not self.alive
        if quiet:
            self._quiet.set()
        if complete is not None:
            self._resolve(complete)
        return late

    def end(self, count: int) -> None:
        """The I/O on `count` items' memory has really ended."""
        with self._lock:
            self._busy -= count
            quiet = not self._busy and not self.alive
        if quiet:
            self._quiet.set()

    def expire(self, make: Callable[[], Any]) -> None:
        """Resolve now; items without an outcome get `make()`."""
        outcomes = self._give_up()
        if outcomes is not None:
            missing = make()
            self._resolve([missing if outcome is None else outcome for outcome in outcomes])

    def fail(self, error: KVStoreError) -> None:
        """Resolve with an exception."""
        outcomes = self._give_up()
        if outcomes is not None:
            _dispose(outcomes)
            self.completion.set_exception(error)

    def _cancelled(self) -> None:
        outcomes = self._give_up()
        if outcomes is not None:
            _dispose(outcomes)

    def _give_up(self) -> list[Any] | None:
        """End without the outcomes that are missing. Returns those that are there; None if it had ended before."""
        with self._lock:
            if not self.alive:
                return None
            self.alive, self._cut_short = False, True
            outcomes, self._outcomes = self._outcomes, []
            hook, self._hook = self._hook, None
        if hook is not None:
            try:
                hook()
            except BaseException:  # the caller must hear of the end whatever happens
                logger.exception("letting go of a batch failed")
        with self._lock:
            quiet = not self._busy
        if quiet:
            self._quiet.set()
        return outcomes

    def _resolve(self, outcomes: list[Any]) -> None:
        try:
            value = self._finish(outcomes)
        except Exception as error:  # noqa: BLE001 - on_error="raise"; and a caller must hear of anything else, too
            self.completion.set_exception(error)
            return
        if not self.completion.set_result(value):  # cancelled in the meantime
            _dispose(outcomes)


def _dispose(outcomes: Sequence[Any]) -> None:
    """Give back leases among outcomes that nobody will take."""
    for outcome in outcomes:
        if outcome is not None and hasattr(outcome, "release"):
            outcome.release()


class Job(ABC):
    """One call of a backend, for some items. It is run once by a lane, or dropped, never both (unless it raised).

    Attributes:
        priority: with what priority it is queued. Changed by its `LaneGroup` alone.
        taken: True once a lane has it, or it was withdrawn. Changed by its `LaneGroup` alone.
    """

    __slots__ = ("priority", "queued", "taken")

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.queued = False
        self.taken = False

    @abstractmethod
    def run(self) -> None:
        """Do it, and end the items. Must not raise."""

    @abstractmethod
    def drop(self, error: KVStoreError) -> None:
        """It will not be run, or has raised: end those of its items that have not ended, with `error`."""

    def about(self) -> tuple[str, int, Sequence[BatchTrace]]:
        """For a trace: the operation, how many items it has, and the traces of the batches that wait for them. One
        that nobody traces has none."""
        return "", 0, ()


class LaneGroup:
    """The lanes of one backend: up to `lanes` daemon threads that take jobs by priority, then in order.

    A job must not raise; if it does, that is logged and counted, its items end with an error, and the lane goes on.
    """

    def __init__(self, name: str, lanes: int) -> None:
        self.name = name
        self.lanes = max(1, lanes)
        self.failures = 0  # jobs that raised
        self.tracer: Tracer | None = None
        self._heap: list[tuple[int, int, Job]] = []
        self._stale = 0  # entries whose job was withdrawn, or queued again with a higher priority
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._background = 0  # lanes busy with background jobs
        self._busy = 0
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs. Raises `ClosedError` after `shut`, and `TransientError` if the system gives not one thread."""
        with self._wake:
            if self._closed:
                raise ClosedError("the store is closed", backend=self.name)
            jobs = [job for job in jobs if not job.taken]  # its caller may have given up before it came here
            for job in jobs:
                job.queued = True
                heapq.heappush(self._heap, (int(job.priority), next(self._sequence), job))
            if jobs and not self._staff():
                for job in jobs:
                    job.taken = True
                self._stale += len(jobs)
                raise TransientError("no thread can be started", backend=self.name)
            self._wake.notify(len(jobs))

    def _staff(self) -> bool:
        """Start lanes as far as they are needed. False if there is none. Called with the lock held."""
        for _ in range(min(len(self._heap) - self._stale - self._idle, self.lanes - len(self._threads))):
            name = f"kvstore-{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads, or the interpreter is about to end
                logger.warning("backend %s: no lane beyond %d can be started", self.name, len(self._threads))
                break
            self._threads.append(thread)
        return bool(self._threads)

    def promote(self, job: Job, priority: Priority) -> None:
        """Let a job that still waits go with a higher priority."""
        with self._wake:
            if job.taken or priority >= job.priority:
                return
            job.priority = priority
            if job.queued:
                heapq.heappush(self._heap, (int(priority), next(self._sequence), job))
                self._stale += 1  # its first entry
                self._tidy()
                self._wake.notify()

    def withdraw(self, job: Job) -> bool:
        """Take back a job that no lane has begun. True: it will never be run, and is the caller's to drop."""
        with self._wake:
            if job.taken:
                return False
            job.taken = True
            if job.queued:
                self._stale += 1
                self._tidy()
            return True

    def _tidy(self) -> None:
        """Forget stale entries once they are the larger part: a hung backend must not fill the memory."""
        if self._stale > 32 and 2 * self._stale > len(self._heap):
            self._heap = [entry for entry in self._heap if not _stale(entry)]
            heapq.heapify(self._heap)
            self._stale = 0

    def _next(self) -> Job | None:
        """The next job this lane may take; called with the lock held."""
        while self._heap:
            if _stale(self._heap[0]):
                heapq.heappop(self._heap)
                self._stale -= 1
                continue
            # The last lane is kept for demand and prefetch.
            priority = self._heap[0][0]
            if priority == Priority.BACKGROUND and self.lanes > 1 and self._background >= self.lanes - 1:
                return None
            job = heapq.heappop(self._heap)[2]
            job.taken = True
            return job
        return None

    def _run(self) -> None:
        while True:
            with self._wake:
                while (job := self._next()) is None:
                    if self._closed and not self._heap:
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                background = job.priority == Priority.BACKGROUND
                self._busy += 1
                self._background += background
            self._carry_out(job)
            del job  # nothing is kept alive while this lane waits
            with self._wake:
                self._busy -= 1
                self._background -= background
                if self._closed:
                    self._wake.notify_all()  # lanes that wait for the rest of the queue must see it end
                elif background:
                    self._wake.notify()  # a background job may have waited for this lane

    def _carry_out(self, job: Job) -> None:
        try:
            if self.tracer is not None and self.tracer.live:
                run_traced(self.name, job)
            else:
                job.run()
        except BaseException as error:
            self.failures += 1
            logger.exception("a job of lane group %s failed", self.name)
            # Without its cause, whose traceback would keep the memory of all its items.
            self.drop(job, PermanentError(f"the store failed: {type(error).__name__}", backend=self.name))

    @staticmethod
    def drop(job: Job, error: KVStoreError) -> None:
        """Drop a job that was withdrawn. Never raises."""
        try:
            job.drop(error)
        except BaseException:
            logger.exception("dropping a job failed")

    def stats(self) -> dict[str, int]:
        """Queued jobs, busy lanes, lanes, failed jobs."""
        with self._wake:
            queued = len(self._heap) - self._stale
            return {"queued": queued, "busy": self._busy, "lanes": self.lanes, "failures": self.failures}

    @property
    def here(self) -> bool:
        """True in one of these lanes."""
        return threading.current_thread() in self._threads

    def shut(self, *, drop: bool) -> None:
        """No more jobs. Those queued are still run, or dropped now. May be called again."""
        dropped: list[Job] = []
        with self._wake:
            self._closed = True
            if drop:
                dropped = [entry[2] for entry in self._heap if not _stale(entry)]
                for job in dropped:
                    job.taken = True
                self._heap.clear()
                self._stale = 0
            self._wake.notify_all()
        for job in dropped:
            self.drop(job, ClosedError("the store was closed before this was done", backend=self.name))

    def join(self, end: float) -> bool:
        """Wait for the lanes to end after `shut`, until the monotonic time `end`.

        Returns:
            False if a lane is still busy (a hung backend); its thread is a daemon and ends with its I/O.
        """
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(seconds_left(end))
        with self._wake:
            idle = not self._busy and not self._heap
        for thread in others if idle else ():  # they have only to notice that it is over
            thread.join(_NOTICE_S)
        return not any(thread.is_alive() for thread in others)


def _stale(entry: tuple[int, int, Job]) -> bool:
    return entry[2].taken or entry[0] != entry[2].priority
