"""The parts of `HedgedBackend`: when to ask again, how often, and in which threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

__all__ = ["Budget", "LatencyTable", "Workers"]

_WINDOW = 256  # latencies kept per class
_REFRESH = 16  # new ones after which the quantile is taken anew
_NEAR = 2  # classes up and down that say something about one of which too little is known
_STEP = 2.0  # how much longer four times the size takes: between a fixed cost and one in proportion
_BATCHES = 8  # of the size at hand, that can always be saved for


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

    A class of which too few were seen is filled up from its neighbours: parts of batches have many sizes. Larger calls
    count as they are, since a smaller one takes no longer; smaller ones as if they took twice as long per class.

    Args:
        quantile: in (0, 1).
        min_samples: calls of a class needed before its quantile is known.
    """

    def __init__(self, quantile: float, min_samples: int) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._windows: dict[tuple[str, int], _Window] = {}
        self._noted = 0
        self._filled: dict[tuple[str, int], tuple[int, float]] = {}  # (latencies noted by then, quantile)

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
        self._noted += 1
        if window.count >= self._min_samples and (window.quantile is None or window.fresh >= _REFRESH):
            window.quantile = self._of(window.values)
            window.fresh = 0

    def _of(self, values: Sequence[float]) -> float:
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]

    def quantile(self, operation: str, size: int) -> float | None:
        """The quantile in seconds; None if too few calls of that class and its neighbours were seen."""
        number = self.size_class(size)
        window = self._windows.get((operation, number))
        if window is not None and window.quantile is not None:
            return window.quantile
        known = self._filled.get((operation, number))
        if known is not None and self._noted - known[0] < _REFRESH:
            return known[1]
        values = [] if window is None else [*window.values]
        for distance in range(1, _NEAR + 1):
            for neighbour, factor in ((number + distance, 1.0), (number - distance, _STEP**distance)):
                found = self._windows.get((operation, neighbour))
                if found is not None and len(values) < self._min_samples:
                    values += [seconds * factor for seconds in found.values]
        if len(values) < self._min_samples:
            return None
        filled = self._of(values)
        self._filled[operation, number] = (self._noted, filled)
        return filled


class Budget:
    """A share of all requests: since each request earns `share` and an extra one costs 1, extra requests never exceed
    `share` of all. Savings are bounded, so a quiet day does not pay for a storm. Not locked; the owner does that.

    Half of the most that can be saved is kept for urgent ones: whoever asks again at the 95th percentile spends 5 % on
    what is a little slow, day by day, and would have nothing left when a replica hangs.
    """

    def __init__(self, share: float, *, burst: float = 64.0) -> None:
        self._share = share
        self._burst = burst
        self._saved = 0.0

    def _most(self, requests: int) -> float:
        return max(self._burst, float(_BATCHES * requests))

    def earn(self, requests: int) -> None:
        """`requests` were made. Eight batches of this size can always be saved for."""
        self._saved = min(self._saved + self._share * requests, self._most(requests))

    def covers(self, requests: int) -> bool:
        """Whether `requests` extra ones could be paid now, if they are urgent."""
        return self._saved >= requests

    def pay(self, requests: int, *, urgent: bool = True) -> bool:
        """Pay for `requests` extra ones, or do nothing and return False."""
        kept = 0.0 if urgent or self._share >= 1 else self._most(requests) / 2
        if self._saved - kept < requests:
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
