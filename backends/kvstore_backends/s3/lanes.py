"""Threads of the backend's own: many requests of one call at once, without a lock hop per request.

A call hands over one function and a number of items. The calling thread works too; helpers join it as threads are
free and take the next item from a shared counter. When the items are used up, the caller waits for the helpers that are
still at one, and for nobody else: a helper whose turn comes later finds the work closed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

__all__ = ["Lanes", "Pace"]


class Pace:
    """How many requests may be under way at once: halved (once per round) when the service throttles, one more for each
    round that goes well (Chiu and Jain, "Analysis of the increase and decrease algorithms", 1989)."""

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self.most = most
        self._allowed = float(most)
        self._shrunk_at = 0.0

    @property
    def allowed(self) -> int:
        return int(self._allowed)

    def note(self, *, throttled: bool) -> None:
        """One request was answered."""
        if not throttled and self._allowed >= self.most:
            return
        with self._lock:
            if throttled:
                now = time.monotonic()
                if now - self._shrunk_at > 0.05:
                    self._shrunk_at = now
                    self._allowed = max(1.0, self._allowed / 2)
            else:
                self._allowed = min(float(self.most), self._allowed + 1 / self._allowed)


class _Work:
    """The items of one call. `order` is shared: taking from it is atomic under the GIL."""

    def __init__(self, do: Callable[[int], None], count: int, pace: Pace | None) -> None:
        self._do = do
        self._order: Iterator[int] = iter(range(count))
        self._pace = pace
        self._lock = threading.Lock()
        self._busy = 0
        self._closed = False
        self._raised: BaseException | None = None
        self._done = threading.Event()

    def help(self) -> None:
        """As a helper: take items until there are none, or the pace says that there are too many of us."""
        with self._lock:
            if self._closed:
                return
            self._busy += 1
        try:
            for index in self._order:
                self._do(index)
                if self._pace is not None and self._busy >= self._pace.allowed:
                    break
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            self._raised = error
        finally:
            with self._lock:
                self._busy -= 1
                if self._is_over():
                    self._done.set()

    def _is_over(self) -> bool:
        return self._closed and not self._busy

    def finish(self) -> None:
        """As the caller: work too, then wait for the helpers that are still at an item."""
        try:
            for index in self._order:
                self._do(index)
        finally:
            with self._lock:
                self._closed = True
                busy = self._busy
            if busy:
                self._done.wait()
        if self._raised is not None:
            raise self._raised


class Lanes:
    """Up to `most` daemon threads, started when first needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting = 0
        self._closed = False
        self._numbers = itertools.count()

    def each(self, do: Callable[[int], None], count: int, *, at_once: int, pace: Pace | None = None) -> None:
        """Call `do(0)` … `do(count - 1)`, up to `at_once` of them at a time. Returns when all have ended.

        `do` must not raise; what it does raise ends its thread's share and is raised here at the end.
        """
        if pace is not None:
            at_once = min(at_once, pace.allowed)
        helpers = min(count, at_once) - 1
        if helpers <= 0:
            for index in range(count):
                do(index)
            return
        work = _Work(do, count, pace)
        self._call(work.help, helpers)
        work.finish()

    def spawn(self, task: Callable[[], None]) -> None:
        """Run `task` some time soon; it must not raise."""
        self._call(task, 1)

    def _call(self, task: Callable[[], None], times: int) -> None:
        with self._lock:
            if self._closed:
                return
            self._waiting += times
            missing = min(self._waiting - self._idle, self._most - len(self._threads))
            for _ in range(missing):
                name = f"kvstore-{self._name}-{next(self._numbers)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads; those that are there do the work
                    break
                self._threads.append(thread)
        for _ in range(times):
            self._queue.put(task)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            task = self._queue.get()
            with self._lock:
                self._idle -= 1
                self._waiting -= task is not None
            if task is None:
                return
            task()
            del task  # its memory must not wait for the next one

    def after_fork(self) -> None:
        """In a forked child: the threads are the parent's, and one of them may have held the lock."""
        self._lock = threading.Lock()
        self._closed = True
        self._threads = []

    def close(self, timeout: float) -> bool:
        """End the threads; wait up to `timeout` seconds. False: one still has work, and ends with it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
