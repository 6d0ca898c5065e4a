"""Dynamic offload: pages of a device's free list are saved ahead of need, so that allocating hardly ever waits.

A freed page still holds KV. Before it is written to again that KV has to be copied away. LMCache (arXiv 2510.09665)
keeps three pointers into the list of free pages, start ≤ current ≤ end:

    [start, current)   copied: may be allocated at once
    [current, end)     being copied
    [end, total)       left alone: somebody may still want what is in them, and a copy would be duplication

Allocating k pages takes them from `start` and waits until current ≥ start + k; then start += k and
end = min(end + k, total), so that the copying keeps its distance. In the steady state current == end. The window
w = end - start trades duplication (pages that lie in two places) for stall.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.scheduler import seconds_left

__all__ = ["OffloadWindow", "PageOffloader"]

logger = logging.getLogger("kvstore.prefetch")

P = TypeVar("P")


class OffloadWindow:
    """The three pointers. They count pages since the beginning and only ever grow. Not thread-safe.

    Args:
        window: w, in pages.
        total: pages that are free to begin with.

    Attributes:
        start: pages that were allocated so far.
        current: pages before this are copied.
        end: pages before this are copied or being copied.
        total: pages that were freed so far.

    Raises:
        ConfigError: a window of less than one page, or a negative number of pages.
    """

    def __init__(self, window: int, total: int = 0) -> None:
        if window < 1 or total < 0:
            raise ConfigError(f"a window of {window} over {total} pages makes no sense")
        self.window = window
        self.start = self.current = 0
        self.total = total
        self.end = min(window, total)

    def free(self, count: int) -> None:
        """So many more pages are free, at the end of the list. A window that was cut short by it grows."""
        if count < 0:
            raise ConfigError(f"{count} pages cannot be freed")
        self.total += count
        self.end = max(self.end, min(self.start + self.window, self.total))

    def copied(self, count: int) -> None:
        """The next so many pages are copied. Raises `ConfigError` if not so many are being copied."""
        if not 0 <= count <= self.end - self.current:
            raise ConfigError(f"{count} pages are copied, but only {self.end - self.current} were to be")
        self.current += count

    def demand(self, count: int) -> bool:
        """Whether so many pages can be allocated now: current ≥ start + count. More than the window are copied at
        once, since no allocation would ever come about otherwise.

        Raises:
            PoolExhausted: there are not so many free pages.
        """
        if count < 0:
            raise ConfigError(f"{count} pages cannot be allocated")
        if count > self.total - self.start:
            raise PoolExhausted(f"{count} pages asked for, but only {self.total - self.start} are free")
        self.end = max(self.end, self.start + count)
        return self.current >= self.start + count

    def take(self, count: int) -> None:
        """Allocate so many pages from `start`. Raises `ConfigError` unless `demand` is true for them."""
        if not self.demand(count):
            raise ConfigError(f"{count} pages cannot be allocated before they are copied")
        self.start += count
        # As end = min(end + k, total), but that what a large demand had widened narrows again to the window. It never
        # moves back: those pages are being copied.
        self.end = max(self.end, min(self.start + self.window, self.total))


class PageOffloader(Generic[P]):
    """A free list whose pages are saved before they are allocated again. Thread-safe.

    Args:
        pages: what is free to begin with, the next to be allocated first.
        window: how many pages are kept ready (copied) at the front of the list.
        save: called with pages to copy, and with what to call once they are copied (at once, or from any thread; with
            the error if they could not be: their KV is lost then, and counted). It must not block. What it raises is
            logged, and counts as such an error.

    Attributes:
        lost: pages whose KV could not be saved.
    """

    def __init__(
        self,
        pages: Iterable[P],
        *,
        window: int,
        save: Callable[[Sequence[P], Callable[..., None]], None],
    ) -> None:
        self._pages = deque(pages)  # from `start` on
        self._pointers = OffloadWindow(window, len(self._pages))
        self._save = save
        self._changed = threading.Condition()
        self._issued = 0  # pages before this are copied or under way
        self._batches: deque[list[int | bool]] = deque()  # pages, copied; in the order they were issued
        self._waiting: deque[object] = deque()
        self._closed = False
        self.lost = 0
        self._issue()

    @property
    def pointers(self) -> tuple[int, int, int]:
        """(start, current, end) of now."""
        with self._changed:
            return self._pointers.start, self._pointers.current, self._pointers.end

    @property
    def num_free(self) -> int:
        """Pages in the list."""
        with self._changed:
            return len(self._pages)

    def free(self, pages: Sequence[P]) -> None:
        """Put pages at the end of the list. Their content stays until they are allocated again."""
        with self._changed:
            self._pages.extend(pages)
            self._pointers.free(len(pages))
            self._changed.notify_all()
        self._issue()

    def allocate(self, count: int, timeout: float | None = None) -> list[P]:
        """Take `count` pages from the front, once their KV is copied. In the order of the calls.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            PoolExhausted: not so many are free, or not so many were copied in time.
            ClosedError: the offloader is closed.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        turn = object()
        with self._changed:
            self._waiting.append(turn)
        try:
            while True:
                with self._changed:
                    self._check_open()
                    first = self._waiting[0] is turn
                    if first and self._pointers.demand(count):
                        self._pointers.take(count)
                        taken = [self._pages.popleft() for _ in range(count)]
                        break
                self._issue()
                with self._changed:
                    self._check_open()
                    if self._waiting[0] is turn and self._pointers.current >= self._pointers.start + count:
                        continue
                    if not self._changed.wait(seconds_left(end)) and time.monotonic() >= end:
                        raise PoolExhausted(f"{count} pages were not copied in time")
        finally:
            with self._changed:
                self._waiting.remove(turn)
                self._changed.notify_all()
        self._issue()
        return taken

    def close(self) -> None:
        """Nothing more is copied or allocated; who waits gets `ClosedError`. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the page offloader is closed")

    def _issue(self) -> None:
        """Have copied what lies in the window and is not under way."""
        with self._changed:
            begin, end = self._issued, self._pointers.end
            if self._closed or begin >= end:
                return
            self._issued = end
            at = self._pointers.start
            batch = [self._pages[number - at] for number in range(begin, end)]
            entry: list[int | bool] = [end - begin, False]
            self._batches.append(entry)

        def done(error: BaseException | None = None) -> None:
            self._done(entry, error)

        try:
            self._save(batch, done)
        except Exception as error:  # else these pages, and all behind them, could never be allocated
            logger.exception("pages are not saved")
            if not entry[1]:
                done(error)

    def _done(self, entry: list[int | bool], error: BaseException | None) -> None:
        """A batch is copied. `current` moves over what is copied without a gap."""
        with self._changed:
            if entry[1]:
                raise ConfigError("these pages were copied before")
            entry[1] = True
            if error is not None:
                self.lost += entry[0]
            while self._batches and self._batches[0][1]:
                self._pointers.copied(int(self._batches.popleft()[0]))
            self._changed.notify_all()
