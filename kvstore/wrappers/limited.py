"""At most so many calls and bytes at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.backend import Backend, Outcome
from kvstore.errors import ClosedError, ConfigError, PoolExhausted, TransientError
from kvstore.metrics import Change, Metrics
from kvstore.options import Option

from .base import LocalWait, Operation, Wrapper, call_backend, item_bytes

__all__ = ["LimitedBackend"]


class _Waiter:
    """A call that waits for its turn."""

    __slots__ = ("cost", "granted", "turn")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.granted = False
        self.turn = threading.Event()


class LimitedBackend(Wrapper):
    """Bounds the calls and the bytes in flight. Callers wait in the order they came, until their deadline.

    Bytes are those of the destinations of reads and of the sources of writes. A batch with more bytes than the budget
    goes in several calls, one after the other (all reads of one key in one of them); an item that alone is larger than
    the budget runs when no other bytes are in flight. The lock is taken twice per inner call: to enter and to leave.

    With `adaptive`, throttling halves the calls allowed at once (down to one), at most once per round trip, and each
    successful call adds a fraction until the full number is back: additive increase, multiplicative decrease (Chiu and
    Jain, "Analysis of the increase and decrease algorithms", 1989). A call was throttled if more than half of its
    items failed with a `TransientError`; the contract has no finer signal.

    `lease`, `register` and `list` are not bounded: they move nothing, or a page at a time.

    Args:
        concurrency: calls at once; at least 1.
        bytes_in_flight: bytes at once; None: no bound.
        adaptive: shrink and grow as above.
        metrics: counts waits; None: counted nowhere.
        clock: `time.monotonic`, or one that advances with it.

    Raises:
        ConfigError: an argument out of range.
    """

    options = (
        Option("max_calls", "int", None, "Calls of the backend at once, shrunk while it throttles; unset: the "
               "backend's lanes; 0: no bound.", minimum=0, maximum=4096),
        Option("max_inflight", "size", None, "Bytes moved at once between memory and the backend; a larger item runs "
               "alone; unset or 0: no bound.", minimum=0),
    )  # fmt: skip

    def __init__(
        self,
        inner: Backend,
        *,
        concurrency: int,
        bytes_in_flight: int | None = None,
        adaptive: bool = True,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency} must be at least 1")
        if bytes_in_flight is not None and bytes_in_flight < 1:
            raise ConfigError(f"bytes_in_flight={bytes_in_flight} must be at least 1")
        self._most = concurrency
        self._budget = bytes_in_flight
        self._adaptive = adaptive
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._allowed = float(concurrency)
        self._calls = 0
        self._bytes = 0
        self._round = 0  # number of times the limit was shrunk; a call counts against the limit it began under

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._waiters = deque()
        self._calls = self._bytes = 0

    @property
    def allowed(self) -> int:
        """Calls allowed at once right now."""
        return int(self._allowed)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Calls and bytes in flight right now."""
        with self._lock:
            return self._calls, self._bytes

    def _fits(self, cost: int) -> bool:
        """Called with the lock held."""
        if self._calls >= int(self._allowed):
            return False
        return self._budget is None or not cost or not self._bytes or self._bytes + cost <= self._budget

    def _grant(self) -> None:
        """Let those in who fit, in their order. Called with the lock held."""
        while self._waiters and self._fits(self._waiters[0].cost):
            waiter = self._waiters.popleft()
            self._calls += 1
            self._bytes += waiter.cost
            waiter.granted = True
            waiter.turn.set()

    def _enter(self, cost: int, deadline: float) -> bool:
        """Wait for a slot. False: the deadline passed first."""
        with self._lock:
            if not self._waiters and self._fits(cost):
                self._calls += 1
                self._bytes += cost
                return True
            self._check_open("wait")
            waiter = _Waiter(cost)
            self._waiters.append(waiter)
        start = self._clock()
        try:
            self._await(waiter, deadline)
        except BaseException:  # an interrupt: give the place, or the slot, back
            if not self._withdraw(waiter):
                self._leave(cost, self._round, None)
            raise
        entered = waiter.granted or not self._withdraw(waiter)
        if self._metrics is not None:
            waited: Change = ("kvstore_limit_wait_seconds", (self.name,), self._clock() - start)
            late: Change = ("kvstore_limit_timeouts_total", (self.name,), 0 if entered else 1)
            self._metrics.update((waited, late))
        if self._closed:
            if entered:
                self._leave(cost, self._round, None)
            raise ClosedError("the backend was closed while a call waited", backend=self.name)
        return entered

    def _await(self, waiter: _Waiter, deadline: float) -> None:
        left = deadline - self._clock()
        if left > 0:
            waiter.turn.wait(min(left, threading.TIMEOUT_MAX))

    def _withdraw(self, waiter: _Waiter) -> bool:
        """Stop waiting. False: it was let in meanwhile, and keeps its slot."""
        with self._lock:
            if waiter.granted:
                return False
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()  # those behind a large one may fit
            return True

    def _leave(self, cost: int, began: int, throttled: bool | None) -> None:
        """Give the slot back. `throttled`: what the call says about the backend; None: nothing."""
        with self._lock:
            self._calls -= 1
            self._bytes -= cost
            before = int(self._allowed)
            if throttled and began == self._round and self._adaptive:
                self._allowed = max(1.0, self._allowed / 2)
                self._round += 1
            elif throttled is False and self._allowed < self._most:
                self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)
            after = int(self._allowed)
            self._grant()
        if after != before and self._metrics is not None:
            self._metrics.set("kvstore_limit_concurrency", self.name, value=after)

    def _call(self, operation: Operation, items: Sequence[Any], cost: int, deadline: float) -> list[Outcome]:
        if not self._enter(cost, deadline):
            error = LocalWait("no slot became free before the deadline", backend=self.name, operation=operation)
            return [Outcome.failed(error)] * len(items)
        began, throttled = self._round, None
        too_late = deadline <= self._clock()  # then it says nothing about the backend
        try:
            outcomes = call_backend(self._inner, operation, items, deadline)
            if not too_late:
                throttled = _throttled(outcomes)
        finally:
            self._leave(cost, began, throttled)
        return outcomes

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        if self._budget is None or operation not in {"get", "put"}:
            return self._call(operation, items, 0, deadline)
        cost = sum([item_bytes(operation, item) for item in items])
        if cost <= self._budget or len(items) == 1:
            return self._call(operation, items, cost, deadline)
        outcomes: list[Outcome | None] = [None] * len(items)
        for part, part_cost in _parts(operation, items, self._budget):
            done = self._call(operation, [items[at] for at in part], part_cost, deadline)
            for at, outcome in zip(part, done, strict=True):
                outcomes[at] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """As `Wrapper.close`; callers that wait for a slot get `ClosedError`."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
            for waiter in waiters:
                waiter.turn.set()
        super().close()


def _throttled(outcomes: Sequence[Outcome]) -> bool | None:
    """Whether most items failed in passing. None: it says nothing (an empty batch, or memory or a turn was
    to be had too late in this process)."""
    transient = local = 0
    for outcome in outcomes:
        if outcome.error is not None:
            transient += isinstance(outcome.error, TransientError)
            local += isinstance(outcome.error, LocalWait | PoolExhausted)
    if not outcomes or local:
        return None
    return 2 * transient > len(outcomes)


def _parts(operation: Operation, items: Sequence[Any], budget: int) -> list[tuple[list[int], int]]:
    """Indices and bytes of calls that each fit the budget, if one key (of a get) or item (of a put) does."""
    if operation == "get":
        by_key: dict[bytes, list[int]] = {}
        for at, item in enumerate(items):
            by_key.setdefault(item.key, []).append(at)
        units = list(by_key.values())
    else:
        units = [[at] for at in range(len(items))]
    parts: list[tuple[list[int], int]] = []
    part: list[int] = []
    cost = 0
    for unit in units:
        size = sum(item_bytes(operation, items[at]) for at in unit)
        if part and cost + size > budget:
            parts.append((part, cost))
            part, cost = [], 0
        part += unit
        cost += size
    if part:
        parts.append((part, cost))
    return parts
