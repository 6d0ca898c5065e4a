"""One node as the pool sees it: its client behind a breaker of its own, and what was measured of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.backend import Backend, Outcome, Status
from kvstore.buffers import Buffer
from kvstore.errors import BackendError, ClosedError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.wrappers import BreakerBackend, BreakerState, Wrapper
from kvstore.wrappers.base import Operation, call_backend

from .client import NodeClient
from .errors import NodeDown, error_of
from .members import Member

__all__ = ["Node", "Patient"]

_FAILURES = 3  # in a row, after which a node is left alone
_OPEN_S = 0.5
_MAX_OPEN_S = 5.0
_PING_S = 1.0
_BASE_BYTES = 64 << 10  # what a call costs beyond its bytes
_FORGET_S = 10.0  # a pace that was not measured for so long counts half, so that a slow node gets another chance
_MISSED = 4096  # keys remembered that a node did not have


class Node(Wrapper):
    """A `NodeClient` in a `BreakerBackend`. While the breaker is not closed, calls are refused without trying: `ping`,
    called in the background, is what finds out that the node is back.

    Args:
        on_down: called when the breaker has opened.
        metrics: None: counted nowhere.

    Attributes:
        member, client: as given.
        outstanding: bytes that calls under way move.
        missed: keys that reads lately did not find here.
    """

    def __init__(
        self,
        member: Member,
        client: NodeClient,
        *,
        on_down: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        breaker = BreakerBackend(
            client, failures=_FAILURES, open_for=_OPEN_S, max_open_for=_MAX_OPEN_S, probe=_ping, probe_timeout=_PING_S,
            metrics=metrics, clock=clock,
        )  # fmt: skip
        super().__init__(breaker)
        self.member = member
        self.client = client
        self.outstanding = 0
        self.missed: set[Key] = set()
        self._breaker = breaker
        self._on_down = on_down
        self._clock = clock
        self._lock = threading.Lock()
        self._pace = 0.0  # seconds per byte, call overhead included
        self._paced = 0.0  # when it was measured last
        self._under_way: dict[object, float] = {}  # when each call began, the oldest first

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._under_way = {}

    @property
    def up(self) -> bool:
        """Whether it takes reads."""
        return self._breaker.read_state is BreakerState.CLOSED

    @property
    def writable(self) -> bool:
        """Whether it takes writes."""
        return self._breaker.write_state is BreakerState.CLOSED

    @property
    def state(self) -> BreakerState:
        """The worse of both."""
        return self._breaker.state

    def ping(self, deadline: float) -> bool:
        """Try again if it is time to, and say whether all is well. Takes up to a second."""
        for call in (self._breaker.stat, self._breaker.delete):
            try:
                call([], deadline=deadline)  # the breaker asks `_ping` first, and believes it
            except ClosedError:
                return True  # nobody will ask it again
        return self.up and self.writable

    def cost(self) -> tuple[float, float]:
        """(seconds per byte, bytes that wait already): the product says how long one more read would take."""
        age = self._clock() - self._paced
        return self._pace * 0.5 ** (age / _FORGET_S), self.outstanding + _BASE_BYTES

    def stuck(self) -> float:
        """Seconds since the oldest call under way began; 0.0 if there is none. Of a node that hangs it grows and
        grows, long before a call has failed."""
        with self._lock:
            for began in self._under_way.values():
                return self._clock() - began
        return 0.0

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        reads = operation in {"stat", "get"}
        if not (self.up if reads else self.writable):
            error = NodeDown("the node does not answer and is left alone", backend=self.name, operation=operation)
            return [Outcome.failed(error)] * len(items)
        if operation == "get":
            nbytes = sum([len(item[1]) for item in items])
        else:
            nbytes = sum([item.nbytes for item in items]) if operation == "put" else 0
        call = object()
        start = self._clock()
        with self._lock:
            self.outstanding += nbytes
            self._under_way[call] = start
        clean = False
        try:
            outcomes = call_backend(self._inner, operation, items, deadline)
            clean = not any(map(error_of, outcomes))
        finally:
            with self._lock:
                self.outstanding -= nbytes
                self._under_way.pop(call, None)
                if clean and operation == "get":
                    self._measured(self._clock() - start, nbytes)
            if not clean and not (self.up and self.writable):
                self._on_down()
        return outcomes

    def _measured(self, seconds: float, nbytes: int) -> None:
        """Called with the lock held."""
        pace = seconds / (nbytes + _BASE_BYTES)
        self._pace = pace if not self._pace else 0.8 * self._pace + 0.2 * pace
        self._paced = self._clock()

    def note_missed(self, keys: Sequence[Key]) -> None:
        """Reads did not find these here; another replica may have them."""
        if len(self.missed) + len(keys) > _MISSED:
            self.missed = set()
        self.missed.update(keys)

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        return super().lease(keys, deadline=deadline) if self.up else [None] * len(keys)

    def __repr__(self) -> str:
        return f"<Node {self.name!r} {'up' if self.up and self.writable else 'down'}>"


class Patient(Wrapper):
    """A node as the first to be asked of several: it gets half of the time that is left, so that one that hangs leaves
    the other half to the next. Notes what it did not have. Does not close the node."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._node = node

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        if operation not in {"stat", "get"}:
            return call_backend(self._node, operation, items, deadline)
        now = time.monotonic()
        half = deadline if deadline <= now else now + (deadline - now) / 2
        outcomes = call_backend(self._node, operation, items, half)
        missed = [
            item if operation == "stat" else item.key
            for item, outcome in zip(items, outcomes, strict=True)
            if outcome.status is Status.MISS
        ]
        if missed:
            self._node.note_missed(missed)
        return outcomes

    def close(self) -> None:
        self._closed = True


def _ping(backend: Backend, deadline: float) -> bool:
    if not isinstance(backend, NodeClient):
        return False
    try:
        backend.info(deadline=deadline)
    except BackendError:
        return False
    return True
