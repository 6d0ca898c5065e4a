"""The seam above the store: one handle that can be blocked on, awaited, called back or polled.

`Completion` is resolved once per batch, never per key. `CompletionQueue` gives engines that poll an
eventfd. There is no second, asynchronous twin of anything: `await store.submit_get(...)` is the async form.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import ClosedError

if TYPE_CHECKING:
    import asyncio

__all__ = ["CancelledError", "Completion", "CompletionQueue"]

logger = logging.getLogger("kvstore.completion")

T = TypeVar("T")


class Completion(Generic[T]):
    """The future result of one batch.

    `done` becomes true at the batch's deadline at the latest. `settled` becomes true when, beyond that, no
    late I/O can touch the caller's memory any more. The two differ only after a deadline or a cancel: memory
    that belongs to a `BufferPool` is kept out of circulation until then by itself; memory of the caller's own
    (a plain memoryview) must not be reused before `settled()`.

    `await` gives the result as `result` does. A task that is cancelled while it awaits cancels the completion with it
    (`asyncio.shield` it if others need the result); a completion cancelled elsewhere raises `asyncio.CancelledError`.
    If the result came first it is not lost: the completion keeps it, and buffers in it are still to be released.
    """

    __slots__ = ("_cancel_hook", "_cancelling", "_future", "_lock", "_settled")

    def __init__(self) -> None:
        self._future: Future[T] = Future()
        self._lock = threading.Lock()  # guards what follows
        self._cancelling = False  # of several cancels the first is the only one
        self._settled: threading.Event | None = None  # None: settled together with done
        self._cancel_hook: Callable[[], None] | None = None

    def done(self) -> bool:
        """True once there is a result, an error or a cancellation."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Block until done and return the result.

        Args:
            timeout: seconds; None waits until the batch's own deadline resolves it.

        Raises:
            TimeoutError: not done within `timeout`; the batch goes on.
            CancelledError: it was cancelled.
            KVStoreError: the whole batch was impossible (for instance `ClosedError`).
        """
        return self._future.result(_seconds(timeout))

    def add_done_callback(self, fn: Callable[[Completion[T]], None]) -> None:
        """Call `fn(self)` once done, in the resolving thread, or now if already done. `fn` must not block. What it
        raises is logged and goes no further."""
        self._future.add_done_callback(_Callback(fn, self))

    def cancel(self) -> bool:
        """Give up on the result. True if this call cancelled it, False if it was done before.

        I/O already under way runs to its end (see `settled`); I/O not yet begun is dropped unless another
        caller waits for the same record.
        """
        with self._lock:  # not held below: callbacks and the hook run in this thread and may come back here
            if self._cancelling:
                return False
            self._cancelling = True
        if not self._future.cancel():
            return False
        self._future.set_running_or_notify_cancel()
        with self._lock:
            hook, self._cancel_hook = self._cancel_hook, None
        if hook is not None:
            hook()
        return True

    def cancelled(self) -> bool:
        """True if `cancel` succeeded."""
        return self._future.cancelled()

    def settled(self, timeout: float | None = 0) -> bool:
        """True if no I/O of this batch can touch the caller's memory any more.

        Args:
            timeout: seconds to wait for that; 0 only looks, None waits without limit.
        """
        seconds = _seconds(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        if not self._future.done():
            if timeout == 0:
                return False
            try:
                self._future.exception(seconds)
            except CancelledError:
                pass
            except TimeoutError:
                return False
        # Only now: late I/O may have been announced while this thread waited.
        late = self._settled
        return late is None or late.wait(None if end is None else max(0.0, end - time.monotonic()))

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # 30 ms that a synchronous program need not spend; here it is loaded already

        if not self._future.done():
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def wake(_: object) -> None:
                try:
                    loop.call_soon_threadsafe(_resolve, waiter)
                except RuntimeError:  # the loop was closed; nobody waits any more
                    pass

            self._future.add_done_callback(wake)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        try:
            return self._future.result(0)
        except CancelledError as error:
            raise asyncio.CancelledError("the completion was cancelled") from error

    # For the side that produces the result.

    def set_result(self, value: T) -> bool:
        """Resolve with `value`. False, without effect, if it was already done or cancelled."""
        try:
            self._future.set_result(value)
        except InvalidStateError:
            return False
        self._cancel_hook = None  # whatever it holds may go
        return True

    def set_exception(self, error: BaseException) -> bool:
        """Resolve with `error`. False, without effect, if it was already done or cancelled."""
        try:
            self._future.set_exception(error)
        except InvalidStateError:
            return False
        self._cancel_hook = None
        return True

    def on_cancel(self, hook: Callable[[], None]) -> None:
        """Have `hook` called when the caller cancels: at once if that has happened. One hook; the last one counts."""
        with self._lock:
            if not self._future.done():
                self._cancel_hook = hook
                return
        if self._future.cancelled():
            hook()

    def expect_late_io(self) -> threading.Event:
        """Promise to set the returned event when the I/O has really ended; until then `settled` is False.

        To be called before the result is set, and before I/O begins that a cancel would not stop.
        """
        with self._lock:
            if self._settled is None:
                self._settled = threading.Event()
            return self._settled

    @classmethod
    def of(cls, value: T) -> Completion[T]:
        """A completion that is already done."""
        done: Completion[T] = cls()
        done.set_result(value)
        return done


class _Callback(Generic[T]):
    """A callback of the user's. The thread that resolves a completion has others to resolve, so nothing it raises
    reaches that thread; and once called it holds nothing, so that a completion is not kept in a cycle with itself."""

    __slots__ = ("_completion", "_fn")

    def __init__(self, fn: Callable[[Completion[T]], None], completion: Completion[T]) -> None:
        self._fn: Callable[[Completion[T]], None] | None = fn
        self._completion: Completion[T] | None = completion

    def __call__(self, _: object) -> None:
        fn, completion = self._fn, self._completion
        self._fn = self._completion = None
        if fn is None or completion is None:
            return
        try:
            fn(completion)
        except KeyboardInterrupt:  # of the main thread, and meant for it
            if threading.current_thread() is threading.main_thread():
                raise
            logger.exception("a callback failed")
        except BaseException:
            logger.exception("a callback failed")


def _seconds(timeout: float | None) -> float | None:
    """As the standard library takes it: `math.inf`, the deadline that never passes, overflows there."""
    return None if timeout is None or timeout > threading.TIMEOUT_MAX else timeout


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class CompletionQueue:
    """Completions that are done, behind a file descriptor for `select`, `poll` or `epoll`.

    `add` a completion after submitting; when it is done the descriptor becomes readable; `drain` returns
    all that are done and makes it unreadable again. Thread-safe.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done: deque[Completion[object]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, completion: Completion[T]) -> Completion[T]:
        """Have `completion` delivered through this queue; returns it for chaining."""
        if self._closed:
            raise ClosedError("the completion queue is closed")
        completion.add_done_callback(self._deliver)
        return completion

    def _deliver(self, completion: Completion[T]) -> None:
        with self._lock:
            if self._closed:
                return
            self._done.append(completion)  # type: ignore[arg-type]
            os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        """The eventfd. Readable while `drain` would return something. Raises `ClosedError` after `close`."""
        if self._closed:  # the number may already name another file
            raise ClosedError("the completion queue is closed")
        return self._fd

    def drain(self) -> list[Completion[object]]:
        """All completions done since the last call, in the order they became done."""
        with self._lock:
            if self._closed:
                return []
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return []
            done = list(self._done)
            self._done.clear()
            return done

    def close(self) -> None:
        """Close the descriptor; later completions are dropped silently. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._done.clear()
                os.close(self._fd)

    def __enter__(self) -> CompletionQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
