"""The parts of `HedgedBackend`: when to ask again, how often, and in which threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Budget", "LatencyTable", "Workers"]

_WINDOW = 256  # latencies kept per class
_REFRESH = 16  # new ones after which the quantile is taken anew


class _Window:
    """The last latencies of one class of calls and their quantile."""

    __slots__ = ("count", "fresh", "quantile", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0
        self.fresh = 0
        self.quantile: float | None = None


class LatencyTable:
    """A quantile of recent latencies per operation and size class (powers of four): a large read is not late because
    small ones are fast. Bounded: about 32 classes of 256 values per operation. Not locked; the owner does that.

    Args:
        quantile: in (0, 1).
        min_samples: calls of a class needed before its quantile is known.
    """

    def __init__(self, quantile: float, min_samples: int) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._windows: dict[tuple[str, int], _Window] = {}

    @staticmethod
    def size_class(size: int) -> int:
        """Class of a call that moves `size` bytes (or looks up `size` keys)."""
        return (size.bit_length() + 1) // 2

    def note(self, operation: str, size: int, seconds: float) -> None:
        """Take in one latency."""
        window = self._windows.setdefault((operation, self.size_class(size)), _Window())
        if len(window.values) < _WINDOW:
            window.values.append(seconds)
        else:
            window.values[window.count % _WINDOW] = seconds
        window.count += 1
        window.fresh += 1
        if window.count >= self._min_samples and (window.quantile is None or window.fresh >= _REFRESH):
            ordered = sorted(window.values)
            window.quantile = ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]
            window.fresh = 0

    def quantile(self, operation: str, size: int) -> float | None:
        """The quantile in seconds; None if too few calls of that class were seen."""
        window = self._windows.get((operation, self.size_class(size)))
        return None if window is None else window.quantile


class Budget:
    """A share of all requests: since each request earns `share` and an extra one costs 1, extra requests never exceed
    `share` of all. Savings are bounded, so a quiet day does not pay for a storm. Not locked; the owner does that."""

    def __init__(self, share: float, *, burst: float = 64.0) -> None:
        self._share = share
        self._burst = burst
        self._saved = 0.0

    def earn(self, requests: int) -> None:
        """`requests` were made. Two batches of this size can always be saved for."""
        self._saved = min(self._saved + self._share * requests, max(self._burst, 2.0 * requests))

    def covers(self, requests: int) -> bool:
        """Whether `requests` extra ones could be paid now."""
        return self._saved >= requests

    def pay(self, requests: int) -> bool:
        """Pay for `requests` extra ones, or do nothing and return False."""
        if self._saved < requests:
            return False
        self._saved -= requests
        return True

    def refund(self, requests: int) -> None:
        """The extra requests that were paid for could not be made."""
        self._saved += requests


class Workers:
    """Up to `most` daemon threads, started when first needed and kept. A task must not raise."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, task: Callable[[], None]) -> bool:
        """Run `task` at once in some thread. False: all are busy, or it is closed; nothing was done."""
        with self._lock:
            if self._closed:
                return False
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._most:
                name = f"kvstore-hedge-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads
                    return False
                self._threads.append(thread)
            else:
                return False
            self._tasks.put(task)
        return True

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # its memory must not wait for the next one
            with self._lock:
                self._idle += 1

    def stop(self) -> None:
        """No more tasks; each thread ends with the task it has. Does not wait."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end. False: one still has a task; it ends by itself."""
        end = time.monotonic() + timeout
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current:
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not current)
