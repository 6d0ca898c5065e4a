"""`Arbiter`: what the `Prefetcher` and its streams call. Streams begin, are waited for and end here.

It has no thread of its own: whatever happens comes through a `Mailbox`. Who gets memory is decided in `allotment`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.buffers import Buffer
from kvstore.completion import CancelledError
from kvstore.errors import ClosedError, PoolExhausted
from kvstore.metrics import renew_after_fork
from kvstore.scheduler import seconds_left

from .allotment import Allotment
from .parts import Part, State, StreamState, paged
from .plan import LayerPlan

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["Arbiter"]

logger = logging.getLogger("kvstore.prefetch")

_POLL_S = 0.005  # between looks whether late I/O has ended; there is no notice of that
_POOL_SLICE_S = 0.25  # between looks for a cancel, while memory of the pool is waited for


class Arbiter(Allotment):
    """The streams of a prefetcher. Thread-safe. Arguments as of `Allotment`."""

    def __init__(self, store: Store, *, budget: int, lookahead: int, first: int, most: int) -> None:
        super().__init__(store, budget=budget, lookahead=lookahead, first=first, most=most)
        renew_after_fork(self)

    # For the prefetcher.

    def start(self, plan: LayerPlan, deadline: float) -> StreamState:
        """A stream that begins now; if its records were announced, with what came by that."""
        with self._locked():
            if self._closed:
                raise ClosedError("the prefetcher is closed")
            state = self._same(self._queue.pop(plan.name, None), plan)
            if state is not None:
                self._adopt(state, plan, deadline)
            else:
                state = self._new(plan, deadline, started=True)
            self._pump()
        return state

    def announce(self, plans: Sequence[LayerPlan]) -> None:
        """The jobs that wait, the most urgent first; those of the last call that are not among them are forgotten."""
        with self._locked():
            if self._closed:
                return
            before, self._queue = self._queue, {}
            for plan in plans:
                state = self._same(before.pop(plan.name, None) or self._queue.pop(plan.name, None), plan)
                if state is None:
                    state = self._new(plan, math.inf, started=False)
                state.plan = plan
                self._queue[plan.name] = state
            for state in before.values():
                self._end(state)
            self._pump()

    def stats(self) -> dict[str, Any]:
        """See `Prefetcher.stats`."""
        with self._locked():
            self._reap()
            return {
                "budget_bytes": self._budget, "used_bytes": self._used, "peak_bytes": self._peak,
                "streams": sum(state.started for state in self._streams), "announced": len(self._queue),
                "revoked": self._revoked, "late": len(self._late), "bandwidth": self.speed.bytes_per_s,
            }  # fmt: skip

    def close(self) -> None:
        """Cancel all streams, and start no more."""
        with self._locked():
            self._closed = True
            for state in list(self._streams):
                self._end(state)
            self._queue.clear()

    def _after_fork(self) -> None:
        """The child has neither the store's threads nor its memory, and maybe locks that nobody frees."""
        self._renew()
        self._closed = True
        for state in list(self._streams):
            state.error = ClosedError("this stream was begun before fork()")
            for part in state.active:
                part.buffers, part.completion = (), None
            state.active.clear()
            state.pending.clear()
            state.wake = threading.Event()
        self._streams, self._queue, self._late, self._used = {}, {}, [], 0

    # Waiting.

    def await_front(
        self, state: StreamState, end: float, *, layer: int | None = None, keep: bool = False
    ) -> Part | None:
        """The stream's first part, now held; None if there is none any more, or nothing of it can be used.

        Args:
            end: monotonic seconds; behind it `TimeoutError`, behind the stream's own deadline what is not there is a
                miss.
            layer: first give back all before this layer.
            keep: hold it once more, for the caller.

        Raises:
            CancelledError: the stream was cancelled.
            TimeoutError: it is not there yet.
            KVStoreError: what ended the stream: a closed store, or the first error with `on_error="raise"`.
        """
        with self._locked():
            if layer is not None and not state.over:
                self._advance(state, layer)
            state.waiting += 1
            self._pump()
        try:
            while True:
                with self._locked():
                    known, part = self._look(state)
                    if known:
                        if part is not None:
                            part.holds += keep
                        return part
                    if time.monotonic() >= end and end < state.deadline:
                        raise TimeoutError("what was waited for is not there yet")
                    state.wake.clear()
                    need_pool, late = state.need_pool, bool(self._late)
                stop = min(end, state.deadline)
                if need_pool:
                    self._wait_for_pool(state, stop)
                    with self._locked():
                        self._pump()  # if it was in vain, it is asked for again: nobody else may come by to do so
                    continue
                state.wake.wait(_POLL_S if late else max(seconds_left(stop), _POLL_S))
                if late:
                    self.look_again()
        finally:
            with self._locked():
                state.waiting -= 1
                state.need_pool = state.need_pool and state.waiting > 0

    def _look(self, state: StreamState) -> tuple[bool, Part | None]:
        """Whether it is known what comes first, and what: a part that is there, or None for nothing."""
        if state.error is not None:
            raise state.error
        if state.cancelled:
            raise CancelledError("the stream was cancelled")
        while True:
            if state.hopeless:
                for part in list(state.active):
                    self._free(state, part)
                state.pending.clear()
            first = state.active[0] if state.active else state.prune()
            if first is None:
                self._streams.pop(state, None)
                return True, None
            if first.state is State.READY:
                first.state, first.holds = State.HELD, 1
                self._pump()
            if first.state is State.HELD:
                return True, first
            if first.state is not State.PLANNED or time.monotonic() < state.deadline:
                return False, None  # what is under way is resolved by the store at the deadline
            for pair in first.pairs:  # it was not even asked for in time
                state.limit(*pair)

    def _wait_for_pool(self, state: StreamState, end: float) -> None:
        """In the caller's own thread: wait for the pool, in turn with all others who use it, and ask for the part."""
        with self._locked():
            part = state.prune()
            if not state.need_pool or state.over or state.active or part is None:
                state.need_pool = False
                return
            sizes, size = self._sizes(state, part), part.size
            if self._used and self._used + size > self._budget:
                state.need_pool = False  # it is the budget that is short by now
                return
            self._use(size)
        buffers: Sequence[Buffer] = ()
        try:
            buffers = self._pool.acquire_many(sizes, min(seconds_left(end), _POOL_SLICE_S))
        except PoolExhausted as error:
            never = sum(map(paged, sizes)) > self._pool.nbytes or max(sizes) > self._pool.largest
            if never or time.monotonic() >= state.deadline:
                logger.warning("a prompt is not loaded: %s; buffer_pool_bytes may be too small", error)
                with self._locked():
                    state.hits = [0] * len(state.hits)
        finally:
            with self._locked():
                self._used -= size
                state.need_pool = False
                free = not state.over and part.state is State.PLANNED and state.prune() is part
                if buffers and free and self._sizes(state, part) == sizes:
                    self._use(size)
                    self._submit(state, part, buffers, size)
                else:
                    for buffer in buffers:
                        buffer.release()

    def limit(self, state: StreamState, prefix: int, chunks: int) -> None:
        """No more than so many chunks of a prefix are wanted."""
        with self._locked():
            state.limit(prefix, chunks)
            state.wake.set()

    def ready(self, state: StreamState, layer: int) -> bool:
        """True if nobody would have to wait for a layer."""
        with self._locked():
            if state.over or state.hopeless:
                return True
            parts = [part for part in (*state.active, *state.pending) if part.first <= layer < part.end]
            return all(part.state in (State.READY, State.HELD) for part in parts)
