"""A lock that nobody has to wait for: what is to be done under it is posted, and done by whoever can take it."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Mailbox"]


class Mailbox(ABC):
    """State under one lock. Whatever happens elsewhere (in a callback of the store, in a garbage collection) is posted;
    whoever holds the lock, or can take it, empties the box, and then pumps: does what has become possible by that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._later: list[Callable[[], object]] = []  # to be done once the lock is free

    @abstractmethod
    def _pump(self) -> None:
        """Do what has become possible. Called with the lock held."""

    def _renew(self) -> None:
        """In the child of a fork: whoever held the lock is not there."""
        self._lock = threading.Lock()
        self._posted.clear()
        self._later.clear()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._empty()
                yield
        finally:
            self._after()

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done with the lock held, by whoever can. Never waits for it: also for callbacks."""
        self._posted.append(work)
        self._after()

    def post_from_anywhere(self, work: Callable[[], None]) -> None:
        """The same from a garbage collection, which may be in the middle of code that holds other locks: a thread of
        its own sees to it; if none can be had, whoever comes here next."""
        self._posted.append(work)
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._after, name="kvstore-prefetch-dropped", daemon=True).start()

    def look_again(self) -> None:
        """Have `_pump` called soon."""
        self.post(_nothing)

    def _after(self) -> None:
        """What is to be done whenever the lock was released: the rest of the mailbox, cancels, once more."""
        while self._posted or self._later:
            later: list[Callable[[], object]] = []
            if not self._lock.acquire(blocking=False):
                return  # whoever holds it comes here next
            try:
                self._empty()
                later, self._later = self._later, []
            finally:
                self._lock.release()
            for work in later:  # may call anybody back
                work()
            if later:
                self._posted.append(_nothing)  # cancelled I/O may have ended by that

    def _empty(self) -> None:
        if not self._posted:
            return
        while self._posted:
            self._posted.popleft()()
        self._pump()


def _nothing() -> None:
    """Posted to have the owner pump."""
