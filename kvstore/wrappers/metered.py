"""Counts what goes through."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.backend import Backend, KeyInfo, Outcome
from kvstore.metrics import Metrics, OperationMeter, error_class

from .base import Operation, Wrapper, call_backend

if TYPE_CHECKING:
    from kvstore.buffers import Buffer
    from kvstore.keys import Key

__all__ = ["CallTrace", "MeteredBackend", "Trace"]

logger = logging.getLogger("kvstore.wrappers")

_OPERATIONS = ("stat", "get", "put", "delete", "quarantine", "lease", "list")


class CallTrace(NamedTuple):
    """What a trace hook is told, once when a call starts and once when it has finished.

    Attributes:
        finished: False: it starts; the three fields after `items` are 0 then.
        items: number of items in the batch (0 for a list).
        nbytes: bytes moved for items that are OK.
        seconds: how long the call took.
        failed: number of items that ended with an error; of a call that raised, all of them, and at least 1.
    """

    finished: bool
    backend: str
    operation: str
    items: int
    nbytes: int = 0
    seconds: float = 0.0
    failed: int = 0


Trace = Callable[[CallTrace], object]


class MeteredBackend(Wrapper):
    """Counts calls, items, bytes, outcomes, errors and latencies per operation (`kvstore_backend_…`, see
    `kvstore.metrics.METRICS`), in one lock hop per call. A failed item adds nothing to the bytes, and a call with a
    failed item nothing to the throughput.

    Args:
        metrics: where to count.
        trace: told of every start and end of a call, in the calling thread; it must not block. One that raises is
            switched off. None: no tracing, at no cost.
        clock: seconds.
    """

    def __init__(
        self,
        inner: Backend,
        metrics: Metrics,
        *,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._metrics = metrics
        self._trace = trace
        self._clock = clock
        self._meters: dict[str, OperationMeter] = {}

    def _meter(self, operation: str) -> OperationMeter:
        meter = self._meters.get(operation)
        if meter is None:
            meter = self._meters[operation] = self._metrics.operation(self.name, operation)
        return meter

    def _tell(self, event: CallTrace) -> None:
        trace = self._trace
        if trace is None:
            return
        try:
            trace(event)
        except Exception:
            self._trace = None
            logger.exception("the trace hook of backend %s raised and is switched off", self.name)

    def _raised(self, operation: str, error: BaseException, items: int, seconds: float) -> None:
        failed = max(1, items)
        self._meter(operation).record(
            seconds, statuses={"error": items} if items else {}, errors={error_class(error): failed}
        )
        if self._trace is not None:
            self._tell(CallTrace(True, self.name, operation, items, 0, seconds, failed))

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        if self._trace is not None:
            self._tell(CallTrace(False, self.name, operation, len(items)))
        start = self._clock()
        try:
            outcomes = call_backend(self._inner, operation, items, deadline)
        except BaseException as error:
            self._raised(operation, error, len(items), self._clock() - start)
            raise
        seconds = self._clock() - start
        moves = operation in {"get", "put"}
        nbytes, failed = self._meter(operation).record_outcomes(seconds, outcomes, moves_bytes=moves)
        if self._trace is not None:
            self._tell(CallTrace(True, self.name, operation, len(items), nbytes, seconds, failed))
        return outcomes

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """As the inner backend. A key without a lease counts as a miss; leased bytes are not moved, hence not counted
        as bytes."""
        if self._trace is not None:
            self._tell(CallTrace(False, self.name, "lease", len(keys)))
        start = self._clock()
        try:
            leases = super().lease(keys, deadline=deadline)
        except BaseException as error:
            self._raised("lease", error, len(keys), self._clock() - start)
            raise
        seconds = self._clock() - start
        misses = leases.count(None)
        statuses = {name: n for name, n in (("ok", len(leases) - misses), ("miss", misses)) if n}
        self._meter("lease").record(seconds, statuses=statuses)
        if self._trace is not None:
            self._tell(CallTrace(True, self.name, "lease", len(keys), 0, seconds))
        return leases

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """As the inner backend. Counted once, when the listing ends: records as items, and the seconds spent in the
        backend, not those of the caller between pages."""
        if self._trace is not None:
            self._tell(CallTrace(False, self.name, "list", 0))
        start = self._clock()
        try:
            pages = super().list(deadline=deadline)
        except BaseException as error:
            self._raised("list", error, 0, self._clock() - start)
            raise
        return self._metered_pages(pages, self._clock() - start)

    def _metered_pages(self, pages: Iterator[Sequence[KeyInfo]], seconds: float) -> Iterator[Sequence[KeyInfo]]:
        items = 0
        failure: BaseException | None = None
        try:
            while True:
                start = self._clock()
                try:
                    page = next(pages, None)
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    seconds += self._clock() - start
                if page is None:
                    return
                items += len(page)
                yield page
        finally:
            if failure is not None:
                self._raised("list", failure, 0, seconds)
            else:
                self._meter("list").record(seconds, statuses={"ok": items} if items else {})
                if self._trace is not None:
                    self._tell(CallTrace(True, self.name, "list", items, 0, seconds))
