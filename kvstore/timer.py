"""Ends batches at their deadlines, whatever their lanes do."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .scheduler import Batch, seconds_left

__all__ = ["Timer"]

logger = logging.getLogger("kvstore.timer")


class Timer:
    """Ends batches at their deadlines. One thread, started with the first batch that has one."""

    _ROOM = 256  # entries below which dead ones are left where they are

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Batch], Callable[[], Any]]] = []
        self._room = self._ROOM
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, batch: Batch, make: Callable[[], Any]) -> None:
        """Have `batch.expire(make)` called at its deadline, unless it is gone by then. Where no thread can be had to
        see to it, at once."""
        if batch.deadline == math.inf or not batch.alive:
            return
        with self._wake:
            if self._closed:
                return
            if self._thread is not None or self._start():
                self._push((batch.deadline, next(self._sequence), weakref.ref(batch), make))
                return
        batch.expire(make)

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="kvstore-timer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is about to end
            logger.warning("no thread for deadlines can be started")
            return False
        self._thread = thread
        return True

    def _push(self, entry: tuple[float, int, weakref.ref[Batch], Callable[[], Any]]) -> None:
        """Called with the lock held."""
        if len(self._heap) >= self._room:  # most batches end long before their deadline; forget them now and then
            self._heap = [each for each in self._heap if _alive(each[2])]
            heapq.heapify(self._heap)
            self._room = max(self._ROOM, 2 * len(self._heap))
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._wake.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for _, _, ref, make in due:
                batch = ref()
                if batch is not None:
                    try:
                        batch.expire(make)
                    except BaseException:  # all others wait for this thread
                        logger.exception("ending a batch at its deadline failed")
            batch = None  # nothing is kept alive while this thread waits
            del due

    def _wait(self) -> list[tuple[float, int, weakref.ref[Batch], Callable[[], Any]]] | None:
        """The entries that are due, or whose batch is done; None after `close`."""
        due = []
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                while self._heap and (self._heap[0][0] <= now or not _alive(self._heap[0][2])):
                    due.append(heapq.heappop(self._heap))
                if due:
                    return due
                # With an idle heap wait without limit; a new earlier deadline notifies.
                self._wake.wait(seconds_left(self._heap[0][0]) if self._heap else None)
        return None

    @property
    def here(self) -> bool:
        """True in the timer's own thread."""
        return self._thread is threading.current_thread()

    def pending(self) -> int:
        """Number of entries, those of batches that have ended included."""
        with self._wake:
            return len(self._heap)

    def close(self, end: float = math.inf) -> None:
        """Stop the thread; waits for it until the monotonic time `end`. Batches still open are the caller's to end."""
        with self._wake:
            self._closed = True
            self._heap.clear()
            self._wake.notify()
        if self._thread is not None and not self.here:
            self._thread.join(seconds_left(end))


def _alive(ref: weakref.ref[Batch]) -> bool:
    batch = ref()
    return batch is not None and batch.alive
