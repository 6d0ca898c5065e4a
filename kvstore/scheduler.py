"""Lanes, priorities and deadlines. One job is one call of a backend; nothing here happens per key.

A `LaneGroup` runs the jobs of one backend on its lanes (threads): demand reads before prefetches before background
writes, and background work never holds the last free lane. A `Batch` collects the outcomes of what was submitted
together; the `Timer` ends it at its deadline even if a lane hangs. Memory that a hung lane may still write to stays
pinned until that lane returns.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .backend import Outcome, Status
from .completion import Completion
from .errors import ClosedError, KVStoreError, TransientError

__all__ = ["Batch", "Job", "LaneGroup", "Priority", "Timer"]

logger = logging.getLogger("kvstore.scheduler")

Job = Callable[[], None]


class Priority(enum.IntEnum):
    """What goes first when lanes are scarce."""

    DEMAND = 0  # somebody waits for it
    PREFETCH = 1  # somebody probably will
    BACKGROUND = 2  # nobody waits


class Batch:
    """The outcomes of one submission, gathered from many jobs, resolved once.

    Args:
        size: number of items.
        deadline: absolute monotonic seconds.
        finish: makes the completion's result from the outcomes (in submission order).
    """

    __slots__ = ("__weakref__", "_busy", "_finish", "_lock", "_open", "_outcomes", "_quiet", "completion", "deadline")

    def __init__(self, size: int, deadline: float, finish: Callable[[list[Any]], Any]) -> None:
        self.deadline = deadline
        self.completion: Completion[Any] = Completion()
        self._finish = finish
        self._outcomes: list[Any] = [None] * size
        self._open = size  # items without an outcome
        self._busy = 0  # uses of the caller's memory under way
        self._lock = threading.Lock()
        self._quiet = self.completion.expect_late_io()
        self.completion.on_cancel(self._cancelled)
        if not size:
            self._resolve()

    @property
    def alive(self) -> bool:
        """False once it is resolved, expired or cancelled: nobody waits for its items any more."""
        return self._open > 0

    def begin(self, count: int) -> None:
        """`count` items' memory is handed to I/O; each is taken back by `settle` or `end`."""
        with self._lock:
            self._busy += count

    def settle(self, results: Iterable[tuple[int, Any]]) -> list[Any]:
        """Record (index, outcome) pairs. Returns the outcomes that came too late to be delivered."""
        with self._lock:
            if not self._open:
                return [outcome for _, outcome in results]
            for index, outcome in results:
                if self._outcomes[index] is None:
                    self._outcomes[index] = outcome
                    self._open -= 1
            if self._open:
                return []
        self._resolve()
        return []

    def end(self, count: int) -> None:
        """The I/O on `count` items' memory has really ended."""
        with self._lock:
            self._busy -= count
            quiet = not self._busy and not self._open
        if quiet:
            self._quiet.set()

    def expire(self, make: Callable[[], Any]) -> None:
        """Resolve now; items without an outcome get `make()`."""
        with self._lock:
            if not self._open:
                return
            missing = make()
            self._outcomes = [missing if outcome is None else outcome for outcome in self._outcomes]
            self._open = 0
        self._resolve()

    def fail(self, error: KVStoreError) -> None:
        """Resolve with an exception."""
        with self._lock:
            if not self._open:
                return
            self._open = 0
            outcomes, self._outcomes = self._outcomes, []
            quiet = not self._busy
        if quiet:
            self._quiet.set()
        _dispose(outcomes)
        self.completion.set_exception(error)

    def _resolve(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        with self._lock:
            quiet = not self._busy
        if quiet:
            self._quiet.set()
        try:
            value = self._finish(outcomes)
        except KVStoreError as error:
            self.completion.set_exception(error)
            return
        if not self.completion.set_result(value):  # cancelled in the meantime
            _dispose(outcomes)

    def _cancelled(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = 0
            outcomes, self._outcomes = self._outcomes, []
            quiet = not self._busy
        if quiet:
            self._quiet.set()
        _dispose(outcomes)


def _dispose(outcomes: Sequence[Any]) -> None:
    """Give back leases among outcomes that nobody will take."""
    for outcome in outcomes:
        if outcome is not None and hasattr(outcome, "release"):
            outcome.release()


def deadline_passed(backend: str | None, operation: str) -> Outcome:
    """The outcome of an item that was not done by its deadline."""
    return Outcome(
        Status.ERROR, 0, TransientError("the deadline passed before it was done", backend=backend, operation=operation)
    )


class Timer:
    """Ends batches at their deadlines. One thread, started with the first batch that has one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Batch], Callable[[], Any]]] = []
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, batch: Batch, make: Callable[[], Any]) -> None:
        """Have `batch.expire(make)` called at its deadline, unless it is gone by then."""
        if batch.deadline == float("inf") or not batch.alive:
            return
        with self._wake:
            if self._closed:
                return
            entry = (batch.deadline, next(self._sequence), weakref.ref(batch), make)
            heapq.heappush(self._heap, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-timer", daemon=True)
                self._thread.start()
            elif self._heap[0] is entry:
                self._wake.notify()

    def _run(self) -> None:
        while True:
            due = []
            with self._wake:
                while not self._closed:
                    now = time.monotonic()
                    while self._heap and (self._heap[0][0] <= now or not _alive(self._heap[0][2])):
                        due.append(heapq.heappop(self._heap))
                    if due:
                        break
                    # With an idle heap wait without limit; a new earlier deadline notifies.
                    self._wake.wait(self._heap[0][0] - now if self._heap else None)
                if self._closed:
                    return
            for _, _, ref, make in due:
                batch = ref()
                if batch is not None:
                    batch.expire(make)
            del due
            batch = None

    def close(self) -> None:
        """Stop the thread. Batches still open are the caller's to end."""
        with self._wake:
            self._closed = True
            self._heap.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _alive(ref: weakref.ref[Batch]) -> bool:
    batch = ref()
    return batch is not None and batch.alive


class LaneGroup:
    """The lanes of one backend: up to `lanes` daemon threads that take jobs by priority, then in order.

    A job must not raise; whatever it does raise is logged and counted, and the lane goes on.
    """

    def __init__(self, name: str, lanes: int) -> None:
        self.name = name
        self.lanes = max(1, lanes)
        self.failures = 0  # jobs that raised
        self._heap: list[tuple[int, int, Job]] = []
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._background = 0  # lanes busy with background jobs
        self._busy = 0
        self._closed = False

    def submit(self, jobs: Sequence[Job], priority: Priority) -> None:
        """Queue jobs. Raises `ClosedError` after `close`."""
        with self._wake:
            if self._closed:
                raise ClosedError("the store is closed", backend=self.name)
            for job in jobs:
                heapq.heappush(self._heap, (int(priority), next(self._sequence), job))
            wanted = min(len(self._heap) - self._idle, self.lanes - len(self._threads))
            for _ in range(wanted):
                number = len(self._threads)
                thread = threading.Thread(target=self._run, name=f"kvstore-{self.name}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify(len(jobs))

    def _next(self) -> tuple[int, Job] | None:
        """The next job this lane may take; called with the lock held."""
        if not self._heap:
            return None
        priority = self._heap[0][0]
        # The last lane is kept for demand and prefetch.
        if priority == Priority.BACKGROUND and self.lanes > 1 and self._background >= self.lanes - 1:
            return None
        _, _, job = heapq.heappop(self._heap)
        return priority, job

    def _run(self) -> None:
        while True:
            with self._wake:
                while (taken := self._next()) is None:
                    if self._closed and not self._heap:
                        return
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                priority, job = taken
                self._busy += 1
                self._background += priority == Priority.BACKGROUND
            try:
                job()
            except BaseException:
                self.failures += 1
                logger.exception("a job of lane group %s failed", self.name)
            finally:
                del job, taken
                with self._wake:
                    self._busy -= 1
                    if self._closed:
                        self._wake.notify_all()  # lanes that wait for the rest of the queue must see it end
                    elif priority == Priority.BACKGROUND:
                        self._wake.notify()  # a background job may have waited for this lane
                    self._background -= priority == Priority.BACKGROUND

    def stats(self) -> dict[str, int]:
        """Queued jobs, busy lanes, lanes, failed jobs."""
        with self._wake:
            return {"queued": len(self._heap), "busy": self._busy, "lanes": self.lanes, "failures": self.failures}

    def close(self, *, drop: bool, timeout: float) -> bool:
        """No more jobs; those queued are still run, or dropped. Waits up to `timeout` seconds for the lanes to end.

        Returns:
            False if a lane is still busy (a hung backend); its thread is a daemon and ends with its I/O.
        """
        with self._wake:
            self._closed = True
            if drop:
                self._heap.clear()
            self._wake.notify_all()
        end = time.monotonic() + timeout
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current:
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not current)
