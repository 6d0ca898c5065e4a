"""Calls of Mooncake's client, which block without a deadline, made in threads of the backend's own.

The caller's thread waits for what a worker posts, and leaves at its deadline. Then the worker's call goes on: it
writes only into staging memory, which it holds pinned until the call has really ended, and it stores nothing any more.
All that touches the caller's `dst` is done by the caller's thread, before it returns.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Protocol

from kvstore.backend import Outcome
from kvstore.errors import ClosedError, KVStoreError, PoolExhausted, TransientError

from .s3.lanes import Lanes

__all__ = ["Call", "Calls", "Late", "Piece", "seconds_left"]

_AHEAD = 2  # pieces of one call that are on their way or wait for the caller
_SPARE = 4  # workers for calls that go on after their deadline, besides one per lane
_CLOSE_S = 1.0


class Late(Exception):
    """The deadline passed while the caller waited."""


class Piece(Protocol):
    """Something posted to the caller that holds memory."""

    def release(self) -> None: ...


def seconds_left(deadline: float) -> float:
    """Until `deadline`, in what `threading` takes as a timeout; never negative."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


class Call:
    """What one call of a backend and its worker share.

    Attributes:
        deadline: of the call.
        left: set when the caller has left: nothing is stored or written for it any more.
    """

    def __init__(self, operation: str, deadline: float) -> None:
        self.operation, self.deadline = operation, deadline
        self.left = threading.Event()
        self._lock = threading.Lock()
        self._posted: SimpleQueue[Piece | KVStoreError | None] = SimpleQueue()
        self._ahead = threading.Semaphore(_AHEAD)
        self._touching = False

    # The worker's side.

    def room(self) -> bool:
        """Wait until one more piece may be prepared. False: the caller has left."""
        return self._ahead.acquire(timeout=seconds_left(self.deadline)) and not self.left.is_set()

    def post(self, piece: Piece) -> None:
        """Hand a piece to the caller, or release it if the caller has left."""
        with self._lock:
            if not self.left.is_set():
                self._posted.put(piece)
                return
        piece.release()

    def touch(self) -> bool:
        """From now until `untouched` the caller's own memory is written to: the caller does not leave meanwhile.
        False: it has left already."""
        with self._lock:
            self._touching = not self.left.is_set()
            return self._touching

    def untouched(self) -> None:
        with self._lock:
            self._touching = False

    def end(self, error: KVStoreError | None = None) -> None:
        """The worker is done, or failed with `error`."""
        self._posted.put(error)

    # The caller's side.

    def pieces(self) -> Iterator[Piece]:
        """What the worker posts, until it has ended. The caller releases each.

        Raises:
            Late: the deadline passed first.
            KVStoreError: what the worker failed with, or `ClosedError`.
        """
        while True:
            try:
                # SimpleQueue's C timeout is a little smaller than threading's.
                piece = self._posted.get(timeout=min(seconds_left(self.deadline), 1e6))
            except Empty:
                with self._lock:
                    touching = self._touching
                    if not touching and time.monotonic() >= self.deadline:
                        self.left.set()
                        raise Late from None
                if touching:
                    piece = self._posted.get()
                else:
                    continue
            if piece is None:
                return
            if isinstance(piece, KVStoreError):
                raise piece
            self._ahead.release()
            yield piece

    def leave(self) -> None:
        """The caller wants no more: pieces that wait for it are released."""
        with self._lock:
            self.left.set()
        self._ahead.release()  # a worker that waits for room goes on and sees it
        while True:
            try:
                piece = self._posted.get_nowait()
            except Empty:
                return
            if piece is not None and not isinstance(piece, KVStoreError):
                piece.release()


class Calls:
    """The workers of one backend, and the end of them.

    Args:
        lanes: calls that are expected at a time. A few more may be under way, late ones included; what comes on top
            waits for one of them, until its own deadline.
        leave: called once after `close`, when no call is under way any more.
    """

    def __init__(self, name: str, lanes: int, leave: Callable[[], None]) -> None:
        self.name = name
        self._lanes = Lanes(lanes + _SPARE, "mooncake")
        self._slots = threading.Semaphore(lanes + _SPARE)
        self._lock = threading.Lock()
        self._active: set[Call] = set()
        self._leave = leave
        self._pid = os.getpid()
        self._closed = False

    def check(self, operation: str) -> None:
        """Raises `ClosedError` after `close`, and in a forked child."""
        if self._pid != os.getpid():
            text = "this Mooncake client was opened before os.fork(); open another one in the child"
            raise ClosedError(text, backend=self.name, operation=operation)
        if self._closed:
            raise ClosedError("the Mooncake backend is closed", backend=self.name, operation=operation)

    def late(self, operation: str) -> Outcome:
        return Outcome.failed(TransientError("the deadline passed", backend=self.name, operation=operation))

    def start(self, call: Call, work: Callable[[Call], None]) -> None:
        """Have `work(call)` done by a worker; the caller then takes `call.pieces()`.

        Raises:
            Late: no worker was free before the deadline.
            ClosedError: closed meanwhile.
        """
        if not self._slots.acquire(timeout=seconds_left(call.deadline)):
            raise Late
        with self._lock:
            if self._closed:
                self._slots.release()
                self.check(call.operation)
            self._active.add(call)
            self._lanes.spawn(lambda: self._work(call, work))

    def _work(self, call: Call, work: Callable[[Call], None]) -> None:
        error: KVStoreError | None = None
        try:
            if not call.left.is_set():
                work(call)
        except PoolExhausted as raised:
            text = f"no staging memory became free in time: {raised.message}"
            error = TransientError(text, backend=self.name, operation=call.operation, cause=raised)
        except KVStoreError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - pybind raises RuntimeError and TypeError; the caller must hear of it
            text = f"Mooncake's client raised {type(raised).__name__}: {raised}"
            error = TransientError(text, backend=self.name, operation=call.operation, cause=raised)
        call.end(error)
        with self._lock:
            self._active.discard(call)
            last = self._closed and not self._active
        self._slots.release()
        if last:
            self._leave()

    def close(self) -> None:
        """No more calls. Those under way have a second to end; after that their callers get a `ClosedError`, and the
        client is left when the last of them has ended."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = not self._active
        if idle:
            self._leave()
        self._lanes.close(_CLOSE_S)
        with self._lock:
            left = list(self._active)
        for call in left:
            call.end(ClosedError("the Mooncake backend was closed", backend=self.name, operation=call.operation))
